"""Refresh live weights in place: only what changed is read, and it is installed as a whole or not at all.

A refresh is a load into a module whose requests are those of changed tensors. They are read into memory of their own
first, so that nothing that can fail happens while the live tensors change: then each is copied into place, under the
lock of the caller. ``torn="allow"`` reads straight into the live tensors, without that memory.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, ClassVar, Literal, TypeAlias

import torch
from msgspec.structs import asdict, replace

from sluice._errors import MismatchError, UnsupportedError
from sluice._progress import Progress
from sluice.checkpoint.open_checkpoint import OpenCheckpoint
from sluice.engine.running_plan import RunResult
from sluice.formats.manifest import Manifest
from sluice.loading.contents import request_contents, version_of
from sluice.loading.job import Loaded
from sluice.loading.module_fill import read_tree
from sluice.loading.module_job import ModuleJob
from sluice.loading.module_request import ModuleRequest
from sluice.modules.install import finish_loading
from sluice.reports.refresh import RefreshState
from sluice.sharding.dtensors import local_of

__all__ = ["Lock", "RefreshRequest", "Torn"]

#: What may be left of a refresh that fails.
Torn: TypeAlias = Literal["never", "undo", "allow"]

#: A lock, or a function that returns the lock of a module by its path.
Lock: TypeAlias = "AbstractContextManager[object] | Callable[[str], AbstractContextManager[object]] | None"


class RefreshRequest(ModuleRequest, frozen=True, kw_only=True):
    """Arguments of ``sluice.refresh``."""

    verb: ClassVar[str] = "refresh"
    can_map: ClassVar[bool] = False

    #: Digests of what the model holds, by name; None if that is unknown.
    since: Mapping[str, str] | None = None
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
        """
        whole = super().job(checkpoint)
        _check_live(whole)
        contents = request_contents(checkpoint.index, whole.requests, self.manifest)
        since = self.since or {}
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

    #: What the model holds afterwards.
    new: RefreshState
    #: Held while live tensors change.
    lock: Lock

    def state_maker(self) -> Callable[[], RefreshState]:
        """See ``LoadJob.state_maker``."""
        new = self.new
        return lambda: new

    def fetch(self, progress: Progress) -> Any:
        """See ``LoadJob.fetch``; with ``torn="allow"``, live tensors change here."""
        if self.requests and self.requests[0].existing:
            with _held(self.lock, ""):
                return super().fetch(progress)
        extra = {name: read_tree(self.checkpoint, value) for name, value in self.extra_state.items()}
        return *self.read(progress), extra

    def install(self, fetched: Any) -> Loaded:
        """See ``LoadJob.install``: copy what was read into the live tensors."""
        if self.requests and self.requests[0].existing:
            return super().install(fetched)
        tensors: list[torch.Tensor]
        result: RunResult
        tensors, result, extra = fetched
        modules = defaultdict(list)
        for slot, tensor in zip(self.match.slots, tensors, strict=True):
            modules[self.state.outline.slots[slot].names[0].rpartition(".")[0]].append((slot, tensor))
        tensors.clear()
        by_module = callable(self.lock)
        with nullcontext() if by_module else _held(self.lock, ""), torch.no_grad():
            for path in list(modules):
                with _held(self.lock, path) if by_module else nullcontext():
                    for slot, tensor in modules.pop(path):
                        local_of(self.state.tensors[slot]).copy_(tensor)
        missing, unexpected = finish_loading(
            self.state, self.match, extra, strict=self.strict, receivers=self.receivers
        )
        return Loaded(result=result, missing=missing, unexpected=unexpected)

    def changed_by(self, fetched: Any) -> Any:
        """See ``LoadJob.changed_by``; nothing has changed if the tensors have memory of their own."""
        return super().changed_by(fetched) if self.requests and self.requests[0].existing else None


@contextmanager
def _held(lock: Lock, path: str) -> Iterator[None]:
    if lock is None:
        yield
        return
    with lock(path) if callable(lock) else lock:
        yield
