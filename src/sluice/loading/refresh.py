"""Refresh live weights in place: only what changed is read, and it is installed as a whole or not at all.

A refresh is a load into a module whose requests are those of changed tensors. They are read into memory of their own
first; then the values are exchanged with those of the live tensors, under the lock of the caller. So what was read
holds the old values, which a failure or a different rank's puts back. ``torn="allow"`` reads straight into the live
tensors, without that memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import lru_cache, partial
from typing import Any, ClassVar, Literal, TypeAlias, TypeGuard, cast

import torch
from msgspec import field
from msgspec.structs import asdict, replace

from sluice._errors import MismatchError, PartialLoadError, UnsupportedError
from sluice._progress import Progress
from sluice.checkpoint.open_checkpoint import OpenCheckpoint
from sluice.entries.slicing import boxes
from sluice.formats.manifest import Manifest
from sluice.loading.contents import request_contents, version_of
from sluice.loading.job import Loaded
from sluice.loading.module_fill import compare_tied, naming_partial, partial_load, read_tree
from sluice.loading.module_job import ModuleJob
from sluice.loading.module_request import ModuleRequest
from sluice.modules.install import finish_loading, note_written
from sluice.modules.unloaded import is_partly_loaded, refuse_streamed
from sluice.records import Request
from sluice.records.geometry import contiguous_stride, is_dense
from sluice.reports.load import RefreshState
from sluice.sharding.dtensors import local_of

__all__ = ["Lock", "RefreshRequest", "Torn"]

#: Bytes that are exchanged at a time, and held once more in that time.
_PIECE_BYTES = 4 << 20

#: State in which a refresh that fails may leave a model.
Torn: TypeAlias = Literal["never", "undo", "allow"]

#: A lock, or a function that returns the lock of a module by its path.
Lock: TypeAlias = "AbstractContextManager[object] | Callable[[str], AbstractContextManager[object]] | None"


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
        refuse_streamed(self.model, "be refreshed", "End the stream, and open another.")
        whole = super().job(checkpoint)
        _check_live(whole)
        read = [*whole.requests, *(other for _, other in whole.match.comparisons)]
        contents = request_contents(checkpoint.index, read, self.manifest)
        since = {} if is_partly_loaded(self.model) else self.since or {}
        if isinstance(since, Manifest):
            since = request_contents(checkpoint.index, read, since, of_index=False)
        new = {name for name, content in contents.items() if since.get(name) != content}
        copied = {position for position, other in whole.match.comparisons if other.name in new}
        changed = [i for i, each in enumerate(whole.requests) if each.name in new or i in copied]
        if self.torn != "allow":
            whole = replace(whole, requests=tuple(map(_apart, whole.requests)))
        part = whole.part(changed, self.options)
        places = {position: place for place, position in enumerate(changed)}
        copies = tuple((places[i], other) for i, other in whole.match.comparisons if i in places)
        part = replace(part, match=replace(part.match, comparisons=copies))
        version = version_of(checkpoint.index, contents)
        state = RefreshState(
            version=version,
            contents=contents,
            changed=tuple(whole.requests[i].name for i in changed),
            unchanged=len(whole.requests) - len(changed),
        )
        return RefreshJob(**asdict(part), new=state, lock=self.lock)


def _apart(request: Request) -> Request:
    """Return a request for memory of its own, without gaps as those of a live tensor that is a view of others."""
    shape, stride = request.entry.shape, request.stride
    return replace(request, existing=False, stride=stride if is_dense(shape, stride) else contiguous_stride(shape))


def _check_live(job: ModuleJob) -> None:
    slots = job.state.outline.slots
    other = [
        slots[slot].names[0] for slot, each in zip(job.match.slots, job.requests, strict=True) if not each.existing
    ]
    other += [slots[slot].names[0] for slot in (*job.match.zeroed, *job.match.initialised)]
    if job.attributes:
        raise UnsupportedError("a refresh fills tensors, and not attributes of modules", advice="Load the model again.")
    if other:
        error = MismatchError(f"{len(other)} of {len(slots)} tensors cannot be filled in place", tensor=other[0])
        error.advice = "Load the model with sluice.load_into first, and refresh it with the same dtype and device."
        raise error


class _Exchange:
    """A group of live tensors that change together, by their positions.

    Their values are exchanged with new ones, so that they can be put back without other memory.
    """

    def __init__(self, positions: Sequence[int], scratch: dict[torch.device, torch.Tensor]) -> None:
        self.positions = positions
        #: Room for a piece on each device, shared by all groups: the heap would keep freed pieces between live objects.
        self._scratch = scratch
        #: Positions of the tensors that have begun to change, and of those that are complete.
        self.begun: set[int] = set()
        self.complete: set[int] = set()
        self._pieces: list[tuple[torch.Tensor, torch.Tensor]] = []

    def swap(self, position: int, live: torch.Tensor, new: torch.Tensor) -> None:
        """Exchange the values of two tensors of one shape and dtype."""
        self.begun.add(position)
        with torch.inference_mode(mode=live.is_inference()), torch.no_grad():
            scratch = self._scratch.get(live.device)
            if scratch is None:
                scratch = self._scratch[live.device] = torch.empty(_PIECE_BYTES, dtype=torch.uint8, device=live.device)
            for box in boxes(tuple(live.shape), _PIECE_BYTES // live.itemsize):
                target, source = live[box], new[box]
                old = scratch[: target.numel() * live.itemsize].view(live.dtype).view(target.shape)
                old.copy_(target)
                self._pieces.append((target, old))  # until the memory of the new values has them
                target.copy_(source)
                source.copy_(old)
                self._pieces[-1] = (target, source)
        self.complete.add(position)

    def undo(self) -> None:
        """Put the old values back, those first that were exchanged last: tensors may overlap."""
        self.complete.clear()
        while self._pieces:
            target, old = self._pieces[-1]
            with torch.inference_mode(mode=target.is_inference()), torch.no_grad():
                target.copy_(old)
            self._pieces.pop()
        self.begun.clear()


class RefreshJob(ModuleJob, frozen=True, kw_only=True):
    """A decided refresh."""

    #: Contents of the model afterwards.
    new: RefreshState
    #: Held while live tensors change.
    lock: Lock
    #: Changes of ``install``, with the old values.
    exchanges: list[_Exchange] = field(default_factory=list)

    @property
    def in_place(self) -> bool:
        """Whether live tensors are read into directly, so that a failure may leave a part of them changed."""
        return bool(self.requests) and self.requests[0].existing

    def state_maker(self) -> Callable[[], RefreshState]:
        """See ``LoadJob.state_maker``."""
        return partial(cast, RefreshState, self.new)

    def request_lines(self) -> Iterator[str]:
        """See ``LoadJob.request_lines``: what changed may differ between ranks, as each has a part."""
        return iter([f"{self.key} {self.prefix}", *(f"{slot.names} {slot.dtype}" for slot in self.state.outline.slots)])

    def fetch(self, progress: Progress) -> Any:
        """See ``LoadJob.fetch``; with ``torn="allow"``, live tensors change here."""
        if self.in_place:
            with self.lock("") if _is_function(self.lock) else _whole(self.lock):
                return super().fetch(progress)
        notes = tuple(compare_tied(self))
        extra = {name: read_tree(self.checkpoint, value) for name, value in self.extra_state.items()}
        return *self.read(progress), extra, notes

    def install(self, fetched: Any) -> Loaded:
        """See ``LoadJob.install``: copy what was read into the live tensors.

        Raises:
            PartialLoadError: A lock, or the code of the model, failed after tensors began to change.
        """
        if self.in_place:
            return super().install(fetched)
        tensors, result, extra, notes = fetched
        scratch: dict[torch.device, torch.Tensor] = {}
        with naming_partial(self._partial), _whole(self.lock):
            try:
                for positions in self._groups():
                    with self._held(positions):
                        self.exchanges.append(_Exchange(positions, scratch))
                        for position in positions:
                            live = local_of(self.state.tensors[self.match.slots[position]])
                            self.exchanges[-1].swap(position, live, tensors[position].view(live.shape))
                            self._note_written(position)
            except BaseException:
                self._put_back()
                raise
            missing, unexpected = finish_loading(
                self.state, self.match, extra, strict=self.strict, receivers=self.receivers
            )
        return Loaded(result=result, missing=missing, unexpected=unexpected, notes=notes)

    @property
    def reversible(self) -> bool:
        """See ``LoadJob.reversible``."""
        return not self.in_place

    def undo(self) -> str | None:
        """See ``LoadJob.undo``.

        Raises:
            PartialLoadError: The lock failed, or a post-hook.
        """
        if self.exchanges:
            with naming_partial(self._partial), _whole(self.lock):
                self._put_back()
                # What post-hooks compute from weights is that of the old ones again.
                finish_loading(self.state, self.match, {}, strict=False, receivers=self.receivers)
        return "no tensor was changed, but extra state may be new" if self.extra_state else None

    def _put_back(self) -> None:
        while self.exchanges:
            with self._held(self.exchanges[-1].positions):
                self.exchanges[-1].undo()
                for position in self.exchanges[-1].positions:
                    self._note_written(position)
            self.exchanges.pop()

    def _partial(self) -> PartialLoadError | None:
        """Return an error that names the tensors that have new values; None if there are none."""
        live = replace(self, requests=tuple(replace(each, existing=True) for each in self.requests))
        touched = {position for exchange in self.exchanges for position in exchange.begun}
        return partial_load(live, touched, {each for exchange in self.exchanges for each in exchange.complete})

    def _groups(self) -> Iterable[Sequence[int]]:
        """Return the positions of the tensors that change together: those whose modules have the same locks."""
        if not _is_function(self.lock):
            return [range(len(self.requests))]
        groups: dict[tuple[int, ...], list[int]] = {}
        lock = lru_cache(maxsize=None)(self.lock)
        for position in range(len(self.requests)):
            groups.setdefault(tuple(dict.fromkeys(id(lock(path)) for path in self._paths(position))), []).append(
                position
            )
        return groups.values()

    def _paths(self, position: int) -> Iterable[str]:
        """Return the paths of the modules of a tensor; a tied one has several."""
        names = self.state.outline.slots[self.match.slots[position]].names
        return dict.fromkeys(name.rpartition(".")[0] for name in names)

    @contextmanager
    def _held(self, positions: Sequence[int]) -> Iterator[None]:
        """Hold the locks of the modules of some tensors, each once."""
        with ExitStack() as held:
            if _is_function(self.lock):
                paths = dict.fromkeys(path for position in positions for path in self._paths(position))
                locks = [self.lock(path) for path in paths]
                for lock in {id(lock): lock for lock in locks}.values():
                    held.enter_context(lock)
            yield

    def _note_written(self, position: int) -> None:
        for holding in self.state.holdings(self.match.slots[position]):
            with torch.inference_mode(mode=holding.tensor.is_inference()), torch.no_grad():
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
