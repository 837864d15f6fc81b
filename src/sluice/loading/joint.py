"""Loads that several ranks make together: all of them succeed, or none of them changes a module on meta.

Every rank decides its own load and reads its own bytes. Ranks wait for each other three times: when all have planned,
when all have read, and when all have installed. See ``ranks.agreement``.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack

import msgspec
from msgspec.structs import replace

from sluice._progress import Progress
from sluice.checkpoint.open_checkpoint import OpenCheckpoint
from sluice.entries.tree import walk
from sluice.loading.job import Loaded, LoadJob, LoadRequest, decide, load_report
from sluice.machine.processes import PeakMeter, this_process
from sluice.planning.budget import HOST, find_limits, for_whole_host, plan_needs
from sluice.ranks.agreement import Agreement
from sluice.ranks.judgement import Proposal, StepOutcome, judge_proposals
from sluice.ranks.membership import meshes_of
from sluice.ranks.store_group import StoreGroup
from sluice.reading import transfer
from sluice.reports.load import LoadReport, RankReport

__all__ = ["load_together"]

_REPORTS = msgspec.json.Decoder(tuple[RankReport, ...])  # made when this is imported: see formats.strict_json
_PROPOSALS = msgspec.json.Decoder(Proposal)

#: Samples of all files together, but one of each file at least, and the bytes of one.
_SAMPLES, _SAMPLE_BYTES = 16, 4096

#: Most bytes at the end of a zip file that are compared: the directory of 10,000 records fits.
_DIRECTORY_BYTES = 1 << 20


def load_together(
    request: LoadRequest,
    opening: AbstractContextManager[OpenCheckpoint],
    group: StoreGroup,
    *,
    progress: Progress,
    started: float,
) -> LoadReport:
    """Open a checkpoint, decide a load, run it and report it, together with the other ranks of a group.

    Args:
        request: Arguments of the load on this rank.
        opening: Opens the checkpoint.
        group: The ranks.
        progress: As in ``sluice.load_into``; of this rank.
        started: When the verb was called, by ``time.perf_counter``.

    Raises:
        RankError: A rank failed. The same on every rank; its cause is the error of this rank.
    """
    with Agreement(group, verb=request.verb) as agreement, PeakMeter() as meter, ExitStack() as stack:
        neighbors = agreement.meet()
        request = replace(request, options=replace(request.options, host_ranks=len(neighbors)))
        job = agreement.attempt(lambda: decide(request, stack.enter_context(opening), whole_host=True))
        proposal = agreement.attempt(lambda: _proposal(job, request) if job else None)
        agreement.settle("plan", msgspec.json.encode(proposal), _judge)
        assert job is not None  # otherwise the step failed
        job = replace(job, look=agreement.look)
        if job.plan.readers:
            meter.sample()
        measured = transfer.meter(job.checkpoint, job.plan)
        fetched = agreement.attempt(job.fetch, progress)
        agreement.settle("read", changed=lambda: job.changed_by(fetched))
        loaded = agreement.attempt(job.install, fetched)
        own = agreement.attempt(lambda: _figures(group.rank, job, loaded, started) if loaded else None)
        unchanged = loaded is None and job.subject != "model"  # an optimizer that refuses its state keeps what it had
        ranks = agreement.settle(
            "done",
            msgspec.json.encode(own),
            _collect_figures,
            last=True,
            state=None if job.reversible or unchanged else "torn" if loaded is None else "changed",
            undo=job.undo if job.reversible else None,
        )
        assert loaded is not None
        memory, remote = measured()
        loaded = replace(loaded, device_memory=memory, remote=remote)
    return load_report(
        job,
        loaded,
        seconds=time.perf_counter() - started,
        measured=meter.peaks,
        ranks=_REPORTS.decode(ranks),
    )


def _proposal(job: LoadJob, request: LoadRequest) -> Proposal:
    """Return what this rank is about to do, for the others to compare."""
    process = this_process()
    limits = find_limits(for_whole_host(job.plan).facts, request.memory)
    limit = next(limit for limit in limits if limit.where == HOST)
    return Proposal(
        host=process.host,
        hostname=process.hostname,
        files=tuple(
            (file.path.encode(errors="backslashreplace").decode(), file.identity.nbytes, file.identity.version or "")
            for file in job.checkpoint.index.files
        ),
        index=_digest(_index_lines(job.checkpoint)),
        contents=_samples(job.checkpoint),
        arguments=request.arguments(),
        meshes=meshes_of(request.tensors()),
        requested=_digest(job.request_lines()),
        growth_bytes=plan_needs(job.plan)[HOST],
        limit_bytes=limit.nbytes,
        limit_origin=limit.origin,
    )


def _index_lines(checkpoint: OpenCheckpoint) -> Iterator[str]:
    """Yield a description of every file, storage and tensor, without what differs between hosts."""
    index = checkpoint.index
    yield f"{index.format} {[file.identity.nbytes for file in index.files]}"
    for storage in index.storages:
        yield f"{storage.file} {storage.offset} {storage.nbytes} {storage.key}"
    for name, entry in walk(index.tree):
        yield f"{name} {entry.elements} {entry.shape} {entry.stride} {entry.storage} {entry.storage_offset}"


def _samples(checkpoint: OpenCheckpoint) -> str:
    """Return a digest of samples of all files: copies of equal size and headers may be of different versions.

    Of a zip file also what follows the data is taken: its directory has the CRC-32 of every record.
    """
    ends = [0] * len(checkpoint.sources)  # of the last storage of each file
    for storage in checkpoint.index.storages:
        ends[storage.file] = max(ends[storage.file], storage.offset + storage.nbytes)
    digest = hashlib.blake2b(digest_size=16)
    count = max(1, _SAMPLES // len(checkpoint.sources))
    zipped = checkpoint.index.zipped
    for file, source, end in zip(checkpoint.index.files, checkpoint.sources, ends, strict=True):
        nbytes = file.identity.nbytes
        if file.identity.version is not None:  # compared by ``judge_proposals``
            continue
        ranges = [(nbytes * (2 * i + 1) // (2 * count), _SAMPLE_BYTES) for i in range(count)]
        if zipped:
            ranges.append((max(end, nbytes - _DIRECTORY_BYTES), _DIRECTORY_BYTES))
        for offset, length in ranges:
            digest.update(source.read_at(offset, min(length, nbytes - offset)))
    return digest.hexdigest()


def _digest(lines: Iterator[str]) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for line in lines:
        digest.update(line.encode(errors="surrogatepass"))
        digest.update(b"\n")
    return digest.hexdigest()


def _judge(answers: Mapping[int, bytes]) -> StepOutcome:
    proposals = {rank: _PROPOSALS.decode(answer) for rank, answer in answers.items()}
    return StepOutcome(failed=judge_proposals(proposals))


def _figures(rank: int, job: LoadJob, loaded: Loaded, started: float) -> RankReport:
    return RankReport(
        rank=rank,
        host=this_process().hostname,
        read_bytes=sum(loaded.result.read_bytes.values()),
        final_bytes=job.plan.final_bytes,
        predicted_bytes=plan_needs(job.plan)[HOST],
        seconds=time.perf_counter() - started,
    )


def _collect_figures(answers: Mapping[int, bytes]) -> StepOutcome:
    return StepOutcome(value=b"[" + b",".join(answers[rank] for rank in sorted(answers)) + b"]")
