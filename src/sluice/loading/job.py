"""The steps that every load shares: request, job, result, report.

    LoadRequest --decide--> LoadJob --run--> Loaded --load_report--> LoadReport

A request records the arguments of the caller. A job records the whole decision: nothing is touched before ``run``, and
``sluice.plan`` stops there. A kind of load (a module, a state dict, an optimizer) is one subclass of ``LoadRequest``,
which makes the job, and one of ``LoadJob``, which puts the tensors in their places. The budget check, the measurements
and the report are the same for all and are here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, ClassVar

import torch
from msgspec import Struct
from msgspec.structs import replace

from sluice._errors import PartialLoadError
from sluice._options import NO_LIMITS, MemoryLimits, TransferOptions
from sluice._progress import Progress, byte_progress
from sluice._units import format_bytes
from sluice.checkpoint.open_checkpoint import OpenCheckpoint
from sluice.engine.running_plan import RunResult, Surprise
from sluice.engine.targets import Targets
from sluice.entries.patterns import Placement
from sluice.planning.budget import Change, check_budget, for_whole_host
from sluice.reading import transfer
from sluice.reading.reader import fill_caches
from sluice.reading.transfer import Prepared
from sluice.records import DeviceMemory, LoadPlan, Peaks, RemoteReads, Request, collector_paused
from sluice.reports.load import LoadReport, MergedAdapter, RankReport, RefreshState, Subject
from sluice.reports.table import TensorRow, request_rows

__all__ = ["LoadJob", "LoadRequest", "Loaded", "decide", "figures", "load_report", "run"]


class LoadRequest(Struct, frozen=True, kw_only=True):
    """Arguments of a load, without the checkpoint."""

    #: How the bytes are moved.
    options: TransferOptions

    #: Whether ``place="map"`` is possible.
    can_map: ClassVar[bool] = False
    #: Name of the public function, for other ranks.
    verb: ClassVar[str] = "load_into"

    def job(self, checkpoint: OpenCheckpoint) -> LoadJob:
        """Decide the load and check everything but the memory limits. Nothing is touched."""
        raise NotImplementedError

    def changed(self, change: Change) -> LoadRequest:
        """Return the same request with other arguments, as far as it has them."""
        has = set(self.__struct_fields__).intersection({"dtype", "device"})
        own: dict[str, Any] = {name: value for name in has if (value := getattr(change, name))}
        return replace(self, options=transfer.changed(self.options, change), **own)

    def offers(self) -> Sequence[Change]:
        """Return the changes that the caller could make if the load does not fit, other than smaller staging."""
        return ()

    @property
    def memory(self) -> MemoryLimits:
        """Memory limits of the load."""
        return self.options.memory or NO_LIMITS

    def tensors(self) -> Iterable[torch.Tensor]:
        """Return the tensors of which this rank may hold parts; the ranks of their meshes load together."""
        return ()

    def arguments(self) -> dict[str, str]:
        """Return the arguments that must be equal on all ranks of a group, as text by name."""
        return {}

    def replan(self, checkpoint: OpenCheckpoint, change: Change) -> LoadPlan:
        """Return the plan of the same load with other arguments; the memory limits are not checked."""
        return self.changed(change).job(checkpoint).plan


class LoadJob(Struct, frozen=True, kw_only=True):
    """A load that is decided; nothing is touched yet."""

    #: The checkpoint to read.
    checkpoint: OpenCheckpoint
    #: Finished tensors to read.
    requests: tuple[Request, ...]
    #: The plan, and the view of each request.
    prepared: Prepared
    #: Dotted path of the part that is loaded; None for the whole checkpoint.
    key: str | None = None
    #: Prefix that is stripped from the names of the checkpoint, with its dot.
    prefix: str = ""
    #: Device by prefix of names, as requested or as chosen for ``device="auto"``.
    placement: Placement = {}
    #: Names of the model that the checkpoint does not have.
    missing: tuple[str, ...] = ()
    #: Names of the checkpoint that the model does not have.
    unexpected: tuple[str, ...] = ()
    #: Names of a different shape that are ignored: the shape in the model, and in the checkpoint.
    mismatched: Mapping[str, tuple[tuple[int, ...], tuple[int, ...]]] = {}
    #: Adapters that are merged.
    adapters: tuple[MergedAdapter, ...] = ()
    #: Groups of names that are one tensor.
    tied: tuple[tuple[str, ...], ...] = ()
    #: Missing names that ``reset_parameters`` of their modules fills.
    initialised: tuple[str, ...] = ()
    #: Notes for the report, one sentence each.
    notes: tuple[str, ...] = ()

    #: Whose tensors ``total`` counts.
    subject: ClassVar[Subject] = "model"

    @property
    def loaded(self) -> int:
        """Number of tensors that the checkpoint fills; tied names count once."""
        return len(self.requests)

    @property
    def total(self) -> int:
        """Number of tensors that it could fill."""
        return len(self.requests)

    @property
    def plan(self) -> LoadPlan:
        """Plan for the engine."""
        return self.prepared.plan

    @property
    def loaded_bytes(self) -> int:
        """Bytes of the finished tensors that the checkpoint fills."""
        return self.plan.final_bytes - sum(self.plan.targets[view.target].nbytes for view in self.prepared.computed)

    #: Called between two reads, in the thread of the caller; it may raise to end the load.
    look: Callable[[], None] | None = None

    def request_lines(self) -> Iterator[str]:
        """Yield a description of what is loaded that must be equal on all ranks of a group."""
        yield f"{self.key} {self.prefix} {self.missing} {self.unexpected}"

    def fetch(self, progress: Progress) -> Any:
        """Read the data; return what ``install`` needs. Only live tensors change."""
        return self.read(progress)

    def install(self, fetched: Any) -> Loaded:
        """Put every tensor in its place; what can fail has been done before."""
        raise NotImplementedError

    @property
    def reversible(self) -> bool:
        """Whether ``undo`` puts back what ``install`` changes, and a failed ``install`` has done so."""
        return False

    def undo(self) -> str | None:
        """Put back what ``install`` has changed, because a different rank failed in it; return what is left, if any."""

    def changed_by(self, fetched: Any) -> PartialLoadError | None:
        """Return an error that names the live tensors that ``fetch`` changed, if ``install`` will not be called."""
        del fetched
        return None

    def read(
        self, progress: Progress, targets: Targets | None = None, *, completed: Callable[[int], None] | None = None
    ) -> tuple[list[torch.Tensor], RunResult]:
        """Run the plan and return the tensor of each request.

        Args:
            progress: As in ``sluice.load_into``.
            targets: Final memory; None allocates all of it.
            completed: Called with the position of each target when it is complete.
        """
        plan = self.plan
        if plan.remote:
            fill_caches(self.checkpoint.sources, plan, progress=progress, look=self.look)
        targets = Targets(plan) if targets is None else targets
        shown = nullcontext() if progress is False else byte_progress(progress, self.checkpoint.path, plan.read_bytes)
        with shown as report:
            look = report if self.look is None else _with_look(report, self.look)
            return transfer.run(self.checkpoint, self.prepared, targets, progress=look, completed=completed)

    def state_maker(self) -> Callable[[], RefreshState] | None:
        """Return a function that makes the state of the report; None if it has none."""
        return None

    def row_maker(self) -> Callable[[], Iterable[TensorRow]]:
        """Return a function that makes the rows of the report's table; it keeps records alive, but no tensor."""
        targets = [view.target for view in self.prepared.views]
        return partial(request_rows, self.requests, targets, self.plan, self.checkpoint.index)


class Loaded(Struct, frozen=True, kw_only=True):
    """The result of running a job."""

    #: Methods and times of the reads.
    result: RunResult
    #: The return value of a verb that does not return a report.
    value: Any = None
    #: Names of the model that the checkpoint does not have; hooks of the model may have changed the job's.
    missing: tuple[str, ...] = ()
    #: Names of the checkpoint that the model does not have; hooks of the model may have changed the job's.
    unexpected: tuple[str, ...] = ()
    #: Names of tensors that became new objects.
    replaced: tuple[str, ...] = ()
    #: Growth of each accelerator's memory.
    device_memory: tuple[DeviceMemory, ...] = ()
    #: Requests for remote files; None if there are none.
    remote: RemoteReads | None = None
    #: Notes for the report in addition to the job's, one sentence each.
    notes: tuple[str, ...] = ()


def decide(request: LoadRequest, checkpoint: OpenCheckpoint, *, whole_host: bool = False) -> LoadJob:
    """Decide a load and check that it keeps the memory limits, or those of all ranks of a host. Nothing is touched.

    Raises:
        BudgetError: It does not; the error lists the changes with which it would.
    """
    with collector_paused():
        job = request.job(checkpoint)
    plan = for_whole_host(job.plan) if whole_host else job.plan
    replan = partial(request.replan, checkpoint)
    check_budget(plan, request.memory, replan, file=checkpoint.path, offer=request.offers)
    return job


def run(job: LoadJob, *, progress: Progress) -> Loaded:
    """Run a job; measure how the memory of accelerators grows, and the requests for remote files."""
    if not job.plan.devices and all(file.identity.inode for file in job.checkpoint.index.files):
        return job.install(job.fetch(progress))
    measured = transfer.meter(job.checkpoint, job.plan)
    loaded = job.install(job.fetch(progress))
    memory, remote = measured()
    return replace(loaded, device_memory=memory, remote=remote)


def _with_look(report: Callable[[int], None] | None, look: Callable[[], None]) -> Callable[[int], None]:
    """Return a callback that also looks."""

    def both(nbytes: int) -> None:
        look()
        if report is not None:
            report(nbytes)

    return both


def figures(job: LoadJob) -> dict[str, Any]:
    """Return the fields of ``LoadFigures`` that a decision determines, for the reports of loads and of dry runs."""
    checkpoint, plan = job.checkpoint, job.plan
    casts = Counter(f"{each.entry.dtype}->{each.dtype}" for each in job.requests if each.entry.dtype != each.dtype)
    return {
        "source": checkpoint.path,
        "format": checkpoint.index.format,
        "files": checkpoint.files,
        "devices": tuple(sorted({target.device for target in plan.targets})),
        "tensors": len(plan.targets),
        "final_bytes": plan.final_bytes,
        "read_bytes": plan.read_bytes,
        "mapped_bytes": plan.mapped_bytes,
        "predicted": plan.predicted,
        "cast": dict(casts),
        **{name: getattr(job, name) for name in _OF_JOB},
    }


#: Fields of ``LoadFigures`` that a job has by the same names.
_OF_JOB = (
    *("key", "prefix", "placement", "subject", "loaded", "total", "loaded_bytes"),
    *("missing", "unexpected", "mismatched", "adapters", "tied", "initialised"),
)


def load_report(
    job: LoadJob, loaded: Loaded, *, seconds: float, measured: Peaks, ranks: tuple[RankReport, ...] = ()
) -> LoadReport:
    """Return the report of a finished load, whose prediction is the plan's.

    Args:
        job: The decision.
        loaded: The result.
        seconds: Time since the call of the verb.
        measured: Peak growth of host memory since then, in bytes.
        ranks: Figures of all ranks that loaded together.
    """
    of_result = ("missing", "unexpected", "replaced", "device_memory", "remote")
    return LoadReport(
        **figures(job) | {name: getattr(loaded, name) for name in of_result},
        seconds=seconds,
        measured=measured,
        ranks=ranks,
        reads=loaded.result.read_bytes,
        stepped_down=loaded.result.stepped_down,
        origins={request.name: request.entry.origin for request in job.requests if request.entry.origin},
        notes=(
            *job.checkpoint.index.notes,
            *job.notes,
            *loaded.notes,
            *job.plan.reasons,
            *(
                f"{format_bytes(nbytes)} read through the page cache, because {_SURPRISES[why]}"
                for why, nbytes in loaded.result.surprises.items()
            ),
            *job.checkpoint.source_notes,
        ),
        state_maker=job.state_maker(),
        rows=job.row_maker(),
    )


#: Reasons for which data is read through the page cache, though the plan prefers direct reads.
_SURPRISES: Mapping[Surprise, str] = {
    "shared": "another process read the same file, which direct reads would fetch from the disk for each of them",
    "cached": "another process had cached this data since the plan was made",
}
