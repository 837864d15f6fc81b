"""A model that runs from its checkpoint: weights are put into blocks when they are called, and taken out after."""

from __future__ import annotations

import functools
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from itertools import chain
from typing import Any, Self

import torch
from torch import nn

from sluice._errors import PartialLoadError, StreamError
from sluice._messages import listed
from sluice._private_torch import transforms_are_active
from sluice._progress import Progress
from sluice._public import public
from sluice._threads import close_dropped
from sluice.checkpoint.open_checkpoint import OpenCheckpoint
from sluice.engine.host_memory import RecycledMemory
from sluice.loading.module_fill import compare_tied, finish_module, install_tensors
from sluice.modules.collect import Owner
from sluice.modules.install import hold
from sluice.modules.unloaded import Guard, ParkedParameter, refuse_calls, refusing
from sluice.reading.reader import CheckpointReader, fill_caches
from sluice.records import collector_paused
from sluice.reports.stream import StreamReport
from sluice.streaming.backward import Backward, SavedWeight, saving
from sluice.streaming.calls import Calls
from sluice.streaming.host_weights import HostWeights
from sluice.streaming.job import StreamJob, StreamRequest, decide_stream, opened_request
from sluice.streaming.lookup import Lookup
from sluice.streaming.units import Unit
from sluice.streaming.window import Window

__all__ = ["Stream", "open_stream"]


@public()
class Stream:
    """A running stream; see ``sluice.stream``. A context manager that closes it."""

    def __init__(self, job: StreamJob, exits: ExitStack, reader: CheckpointReader, host: HostWeights) -> None:
        self._job, self._reader = job, reader
        self._lock = threading.RLock()
        most_bytes = job.decision.window_bytes
        memory = RecycledMemory(most_bytes, huge_pages=job.whole.plan.facts.huge_pages)
        self._units = [Unit(plan, reader, memory) for plan in job.units]
        self._window = Window(self._units, memory, host, most_bytes=most_bytes)
        self._window.kept.update(job.kept)
        self._calls = Calls(job)
        self._backward = Backward(self._units, self._window, self._calls, reads_ahead=job.decision.reads_ahead)
        self._model_calls = 0
        self._model_seconds = 0.0
        self._close_files = weakref.finalize(self, close_dropped, exits)
        self._guard = Guard(job.whole.state.module)
        #: Modules whose ``forward`` was replaced, and the attribute of this name that they had before.
        self._wrapped: list[tuple[nn.Module, dict[str, Any]]] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<sluice.Stream of {self._job.whole.checkpoint.path}{'' if self._close_files.alive else ', closed'}>"

    def __str__(self) -> str:
        return str(self.report)

    @property
    def model(self) -> nn.Module:
        """The model that is streamed."""
        return self._job.whole.state.module

    @property
    def report(self) -> StreamReport:
        """The figures so far."""
        job, window = self._job, self._window
        return StreamReport(
            source=job.whole.checkpoint.path,
            format=job.whole.checkpoint.format,
            device=job.device,
            blocks=sum(map(bool, job.uses)),
            weights_bytes=job.whole.plan.final_bytes,
            resident_bytes=job.decision.resident_bytes,
            window_bytes=job.decision.window_bytes,
            host_bytes=job.host_bytes,
            call_bytes=job.call_bytes,
            calls=self._model_calls,
            seconds=self._model_seconds,
            waited_seconds=window.waited_seconds,
            read_bytes=window.read_bytes,
            hits=window.hits,
            misses=window.misses,
            notes=(*job.whole.notes, *_notes(job)),
        )

    def close(self) -> None:
        """End the stream: its threads end, its files are closed, and the streamed weights are on meta again.

        What stayed in memory stays there, except quantized weights. Calls of the model are refused until its weights
        are loaded or it is streamed again. A second call does nothing.
        """
        with self._lock:
            if not self._close_files.alive:
                return
            self._backward.end()
            if self._window.used:
                raise StreamError("a block is running: close the stream after the call of the model")
            while self._wrapped:
                module, own = self._wrapped[-1]
                vars(module).pop("forward", None)
                vars(module).update(own)
                self._wrapped.pop()  # last, for the next call of ``close`` after an interrupt
            self._guard.remove()
            try:
                self._close_files()
            finally:  # an interrupt while threads are joined is raised after that
                self._window.clear()
                for unit in self._units:
                    unit.restore()
                for part in self.model.modules():  # hooks of the model may have kept others: detach() returns them
                    for name, kept in list(part.named_parameters(recurse=False, remove_duplicate=False)):
                        if type(kept) is ParkedParameter:
                            delattr(part, name)
                            setattr(part, name, None)
                for each in self._job.quantized:  # a weight with memory could be neither loaded nor streamed again
                    hold([Owner(module=module, name=name) for module, name in each.owners], each.weight)
                refuse_calls(self.model)

    def _attach(self) -> None:
        for number, unit in enumerate(self._units):
            unit.attach(functools.partial(self._lent, number))
        for number, block in enumerate(self._job.blocks):
            if self._job.uses[number] or number in self._calls.lists:
                self._wrap(block.module, functools.partial(self._running, number))
        for lookup in self._job.lookups:
            self._wrap_lookup(lookup)
        self._wrap(self._job.whole.state.module, self._timed)

    def _wrap(self, module: nn.Module, around: Callable[[], AbstractContextManager[None]]) -> None:
        forward: Callable[..., Any] = module.forward

        @functools.wraps(forward)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            with around():
                return forward(*args, **kwargs)

        self._replace_forward(module, wrapper)

    def _wrap_lookup(self, lookup: Lookup) -> None:
        module = self._job.blocks[lookup.block].module
        forward: Callable[..., Any] = module.forward

        @functools.wraps(forward)
        def wrapper(input: torch.Tensor) -> Any:  # noqa: A002  its name in torch
            with self._lock:
                self._check([lookup.unit])
                if module.weight is not self._units[lookup.unit].plan.weights[0].parked:
                    return forward(input)  # the caller replaced it, or it is in use
                if not self._units[lookup.unit].ready:
                    return lookup(input, self._reader, self._window)
                with self._window.holding(lookup.unit, install=True):
                    return forward(input)

        self._replace_forward(module, wrapper)

    def _replace_forward(self, module: nn.Module, forward: Callable[..., Any]) -> None:
        self._wrapped.append((module, {name: own for name, own in vars(module).items() if name == "forward"}))
        vars(module)["forward"] = forward

    @contextmanager
    def _lent(self, number: int, position: int) -> Iterator[torch.Tensor]:
        """Hold a unit in memory for one operation, and lend one of its weights."""
        with self._lock:
            self._check([number])
            self._backward.reach(number)
            with self._window.holding(number), self._saving(inside=False):
                yield self._units[number].parameter(position)

    @contextmanager
    def _timed(self) -> Iterator[None]:
        began = time.perf_counter()
        try:
            yield
        finally:
            self._model_calls += 1
            self._model_seconds += time.perf_counter() - began

    @contextmanager
    def _running(self, number: int) -> Iterator[None]:
        """Hold the weights of a block in the module; one thread at a time."""
        with self._lock, ExitStack() as held:
            self._check(self._job.uses[number])
            self._backward.end()
            self._window.kept.difference_update(self._calls.note(number))
            for unit in self._job.uses[number]:
                held.enter_context(self._window.holding(unit, install=True))
            if self._job.decision.reads_ahead:
                self._window.read_ahead(self._calls.upcoming())
            with self._saving():
                yield

    def _saving(self, *, inside: bool = True) -> AbstractContextManager[None]:
        """Save no weights for a backward pass, but what lends them again."""
        return saving(self._window.used, self._lent_again, inside=inside) if self._job.train else nullcontext()

    def _lent_again(self, saved: SavedWeight) -> torch.Tensor:
        with self._lock:
            if not self._close_files.alive:
                raise StreamError(
                    "the stream has ended: the backward pass needs its weights", advice="Close it after that."
                )
            return self._backward.lend(saved)

    def _check(self, units: Iterable[int]) -> None:
        """Refuse a call that uses these units if it could not be followed."""
        if torch.compiler.is_compiling():
            raise StreamError("a streamed model cannot be compiled", advice="Call the model without torch.compile.")
        if transforms_are_active():
            raise StreamError(
                "a streamed model cannot be transformed by torch.func", advice="Call it without transforms."
            )
        if not torch.is_grad_enabled():
            return
        if not self._job.train:
            raise StreamError(
                "a streamed model has no gradients: its weights are gone when the backward pass needs them",
                advice="Call it under torch.inference_mode() or torch.no_grad(), or stream it with train=True.",
            )
        for weight in chain.from_iterable(self._units[unit].plan.weights for unit in units):
            if weight.parked.requires_grad:
                raise StreamError(
                    "a weight that is streamed cannot be trained",
                    tensor=weight.parked.path,
                    advice="Freeze it with requires_grad_(False), or let it require gradients before the stream.",
                )


def _notes(job: StreamJob) -> Iterator[str]:
    """Yield notes on trained values that the checkpoint replaced, and names that ``strict=False`` leaves out."""
    whole = job.whole
    filled = zip(whole.requests, whole.match.slots, strict=True) if job.train else ()
    live = [each.name for each, i in filled if each.existing and whole.state.tensors[i].requires_grad]
    for title, names in (
        ("had values, and were filled from the checkpoint", live),
        ("initialised, not in the checkpoint", whole.initialised),
        ("not in the checkpoint", [name for name in whole.missing if name not in whole.initialised]),
        ("not in the model", whole.unexpected),
    ):
        if names:
            yield listed(title, names)


def open_stream(
    request: StreamRequest, opening: AbstractContextManager[OpenCheckpoint], *, progress: Progress
) -> Stream:
    """Open a checkpoint, decide a stream, load what stays in memory, and attach the rest.

    Args:
        request: Arguments of the stream.
        opening: Opens the checkpoint, and closes it unless the caller opened it.
        progress: Progress of loading what stays.
    """
    with refusing(request.load.model), ExitStack() as stack:
        checkpoint = stack.enter_context(opening)
        with opened_request(request, checkpoint) as (opened, plain):
            with collector_paused():
                job = decide_stream(opened, plain)
            if job.whole.adapters:
                checkpoint = job.whole.checkpoint  # with merged tensors
            compare_tied(job.whole)
            fill_caches(checkpoint.sources, progress=progress)
            fetched = job.resident.fetch(progress)
            install_tensors(job.resident, fetched)
        resting = (read for number in job.resting for read in job.units[number].prepared.plan.reads)
        host = HostWeights(checkpoint.sources, resting, huge_pages=job.whole.plan.facts.huge_pages)
        stack.callback(host.clear)
        reader = stack.enter_context(CheckpointReader(checkpoint, host.sources))
        stream = stack.enter_context(Stream(job, stack.pop_all(), reader, host))
        stream._attach()  # noqa: SLF001  one module; an interrupt in it closes the stream
        try:
            with torch.no_grad():  # hooks may compute from weights, which the stream reads for them
                finish_module(job.resident, fetched)
        except PartialLoadError as error:
            problem = f"a load hook of the model failed, so that the stream ended: {error.__cause__ or error}"
            raise StreamError(problem, advice="") from error
        stack.pop_all()
        return stream
    raise AssertionError("no exception is suppressed")
