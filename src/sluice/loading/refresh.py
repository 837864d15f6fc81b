"""Refresh live weights in place: only what changed is read, and it is installed as a whole or not at all.

A refresh is a load into a module whose requests are those of changed tensors. They are read into memory of their own
first, so that nothing that can fail happens while the live tensors change: then each is copied into place, under the
lock of the caller. ``torn="allow"`` reads straight into the live tensors, without that memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any, ClassVar, Literal, TypeAlias, TypeGuard, cast

import torch
from msgspec.structs import asdict, replace

from sluice._errors import MismatchError, StreamError, UnsupportedError
from sluice._progress import Progress
from sluice.checkpoint.open_checkpoint import OpenCheckpoint
from sluice.engine.running_plan import RunResult
from sluice.formats.manifest import Manifest
from sluice.loading.contents import request_contents, version_of
from sluice.loading.job import Loaded
from sluice.loading.module_fill import naming_partial, partial_load, read_tree
from sluice.loading.module_job import ModuleJob
from sluice.loading.module_request import ModuleRequest
from sluice.modules.install import finish_loading, note_written
from sluice.modules.parked import is_guarded
from sluice.modules.unloaded import is_partly_loaded
from sluice.reports.refresh import RefreshState
from sluice.sharding.dtensors import local_of

__all__ = ["Lock", "RefreshRequest", "Torn"]

#: State in which a refresh that fails may leave a model.
Torn: TypeAlias = Literal["never", "undo", "allow"]

#: A lock, or a function that returns the lock of a module by its path.
Lock: TypeAlias = "AbstractContextManager[object] | Callable[[str], AbstractContextManager[object]] | None"


#: Locks, and positions of the requests that change while they are held.
_Group: TypeAlias = "tuple[tuple[AbstractContextManager[object], ...], Sequence[int]]"


class RefreshRequest(ModuleRequest, frozen=True, kw_only=True):
    """Arguments of ``sluice.refresh``."""

    verb: ClassVar[str] = "refresh"
    can_map: ClassVar[bool] = False

    #: Digests of what the model holds by name, or the hashes of the checkpoint it is from; None if that is unknown.
    since: Mapping[str, str] | Manifest | None = None
    #: Whether live tensors may be left in part by a failure.
    torn: Torn = "never"
    #: Held while live tensors change.
    lock: Lock = None
    #: Hashes of the tensors of the checkpoint.
    manifest: Manifest | None = None

    def job(self, checkpoint: OpenCheckpoint) -> RefreshJob:
        """See ``LoadRequest.job``: the tensors whose content differs.

        Raises:
            MismatchError: A tensor is not live, or would change its dtype or device.
            StreamError: The model is streamed.
        """
        if is_guarded(self.model):
            raise StreamError("a streamed model cannot be refreshed", advice="End the stream, and open another.")
        whole = super().job(checkpoint)
        _check_live(whole)
        contents = request_contents(checkpoint.index, whole.requests, self.manifest)
        since = self.since or {}
        if isinstance(since, Manifest):
            since = request_contents(checkpoint.index, whole.requests, since, of_index=False)
        if is_partly_loaded(self.model):  # nothing is known of it
            since = {}
        changed = [i for i, each in enumerate(whole.requests) if since.get(each.name) != contents[each.name]]
        if self.torn != "allow":
            whole = replace(whole, requests=tuple(replace(each, existing=False) for each in whole.requests))
        part = whole.part(changed, self.options)
        version = version_of({} if checkpoint.format == "torch-zip" else checkpoint.metadata, contents)
        state = RefreshState(
            version=version,
            contents=contents,
            changed=tuple(whole.requests[i].name for i in changed),
            unchanged=len(whole.requests) - len(changed),
        )
        return RefreshJob(**asdict(part), new=state, lock=self.lock)


def _check_live(job: ModuleJob) -> None:
    slots = job.state.outline.slots
    other = [
        slots[slot].names[0] for slot, each in zip(job.match.slots, job.requests, strict=True) if not each.existing
    ]
    other += [slots[slot].names[0] for slot in (*job.match.zeroed, *job.match.initialised)]
    if job.quantized or job.attributes:
        raise UnsupportedError(
            "a refresh fills tensors, and not quantized weights or attributes", advice="Load the model again."
        )
    if other:
        error = MismatchError(f"{len(other)} of {len(slots)} tensors cannot be filled in place", tensor=other[0])
        error.advice = "Load the model with sluice.load_into first, and refresh it with the same dtype and device."
        raise error


class RefreshJob(ModuleJob, frozen=True, kw_only=True):
    """A decided refresh."""

    #: Contents of the model afterwards.
    new: RefreshState
    #: Held while live tensors change.
    lock: Lock

    @property
    def in_place(self) -> bool:
        """Whether live tensors are read into directly, so that a failure may leave a part of them changed."""
        return bool(self.requests) and self.requests[0].existing

    def state_maker(self) -> Callable[[], RefreshState]:
        """See ``LoadJob.state_maker``."""
        new = self.new
        return lambda: new

    def request_lines(self) -> Iterator[str]:
        """See ``LoadJob.request_lines``: what changed may differ between ranks, as each has a part."""
        return iter([f"{self.key} {self.prefix}", *(f"{slot.names} {slot.dtype}" for slot in self.state.outline.slots)])

    def fetch(self, progress: Progress) -> Any:
        """See ``LoadJob.fetch``; with ``torn="allow"``, live tensors change here."""
        if self.in_place:
            with self.lock("") if _is_function(self.lock) else _whole(self.lock):
                return super().fetch(progress)
        extra = {name: read_tree(self.checkpoint, value) for name, value in self.extra_state.items()}
        return *self.read(progress), extra

    def install(self, fetched: Any) -> Loaded:
        """See ``LoadJob.install``: copy what was read into the live tensors.

        Raises:
            PartialLoadError: A lock, or the code of the model, failed after tensors began to change.
        """
        if self.in_place:
            return super().install(fetched)
        tensors: list[torch.Tensor]
        result: RunResult
        tensors, result, extra = fetched
        live = replace(self, requests=tuple(replace(each, existing=True) for each in self.requests))
        touched, finished = set[int](), set[int]()
        with naming_partial(lambda: partial_load(live, touched, finished)), _whole(self.lock):
            for locks, positions in self._groups():
                with ExitStack() as held:
                    for lock in locks:
                        held.enter_context(lock)
                    for position in positions:
                        touched.add(position)
                        self._copy(self.match.slots[position], tensors[position])
                        finished.add(position)
            tensors.clear()
            missing, unexpected = finish_loading(
                self.state, self.match, extra, strict=self.strict, receivers=self.receivers
            )
        return Loaded(result=result, missing=missing, unexpected=unexpected)

    def _groups(self) -> Iterable[_Group]:
        """Return the locks of modules, and the positions of the tensors that change while they are held.

        A tied tensor needs the locks of all its modules. Modules with one lock, such as those of a block, change
        together.
        """
        if not _is_function(self.lock):
            return [((), range(len(self.requests)))]
        locks: dict[str, AbstractContextManager[object]] = {}
        groups: dict[tuple[int, ...], _Group] = {}
        for position, slot in enumerate(self.match.slots):
            paths = dict.fromkeys(name.rpartition(".")[0] for name in self.state.outline.slots[slot].names)
            locks.update({path: self.lock(path) for path in paths if path not in locks})
            own = {id(locks[path]): locks[path] for path in paths}
            groups.setdefault(tuple(own), (tuple(own.values()), []))[1].append(position)  # type: ignore[attr-defined]
        return groups.values()

    def _copy(self, slot: int, tensor: torch.Tensor) -> None:
        target = local_of(self.state.tensors[slot])
        with torch.inference_mode(mode=target.is_inference()), torch.no_grad():
            target.copy_(tensor)
            for holding in self.state.holdings(slot):
                note_written(holding.tensor)

    def changed_by(self, fetched: Any) -> Any:
        """See ``LoadJob.changed_by``; nothing has changed if the tensors have memory of their own."""
        return super().changed_by(fetched) if self.in_place else None


def _is_function(lock: Lock) -> TypeGuard[Callable[[str], AbstractContextManager[object]]]:
    """Return whether it makes locks; what ``contextlib.contextmanager`` makes is callable, and a lock itself."""
    return callable(lock) and not hasattr(lock, "__enter__")


def _whole(lock: Lock) -> AbstractContextManager[object]:
    """Return what is held during the whole change."""
    return nullcontext() if lock is None or _is_function(lock) else cast("AbstractContextManager[object]", lock)
