"""Streams that end, fail or are refused: the model answers right afterwards, or not at all."""

from __future__ import annotations

import copy
import gc
import os
import queue
from itertools import chain, repeat
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import DEFAULT, Mock

import pytest
import torch
from torch import nn

import sluice
from sluice._errors import BudgetError, ReadError, SluiceError, SourceChangedError, StreamError
from sluice.engine import session as sessions
from sluice.engine.running_plan import RunningPlan, SessionEndedError
from sluice.modules.install import hold
from sluice.modules.unloaded import Guard
from sluice.records import collector_paused
from sluice.streaming.window import Window
from support.sources import record_reads
from support.streamed_models import IDS, WIDTH, Layers, block_bytes, empty, saved
from support.watching import raising, watch

pytestmark = pytest.mark.usefixtures("inference")


def _call(model: nn.Module, times: int) -> None:
    for _ in range(times):
        model(IDS)


def test_closing_restores_the_model(file: Path, model: Layers, running: Layers) -> None:
    originals = dict(running.named_parameters())
    stream = sluice.stream(running, file, memory=3 * block_bytes())
    running(IDS)
    taken = running.layers.pop(5)
    with torch.inference_mode(mode=False):
        stream.close()
    stream.close()
    running.layers.append(copy.deepcopy(taken) and taken)
    assert all(parameter is originals[name] for name, parameter in running.named_parameters())
    assert running.linear(1).weight.is_meta
    assert "forward" not in vars(running)
    sluice.load_into(running, file)
    assert torch.equal(running(IDS), model(IDS))
    assert "closed" in repr(stream)


@pytest.mark.parametrize(("owner", "name"), [(Guard, "remove"), (sessions, "join_threads")])
def test_an_interrupt_while_it_closes_leaves_no_parked_weights(
    file: Path, model: Layers, running: Layers, owner: Any, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = sluice.stream(running, file, memory=3 * block_bytes())
    running(IDS)
    usual, interrupts = getattr(owner, name), [KeyboardInterrupt]

    def interrupted(*args: Any) -> None:
        usual(*args)
        if interrupts:
            raise interrupts.pop()

    monkeypatch.setattr(owner, name, interrupted)
    with pytest.raises(KeyboardInterrupt):
        stream.close()
    stream.close()
    assert running.linear(1).weight.is_meta
    sluice.load_into(running, file)
    assert torch.equal(running(IDS), model(IDS))


class _Patched(nn.Module):
    """Layers of which torch computes numbers from weights on meta."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(4, WIDTH, 16)
        self.blocks = nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(6)])

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.blocks(self.patches(images).flatten(2).mean(2))
        return result


@pytest.mark.parametrize(
    "end", ["closed", "not fitting", "load failed", "HostWeights", "Stream._wrap", "Unit.install", "Unit.park"]
)
def test_calls_are_refused_after_every_end_until_the_weights_are_there(
    file: Path, end: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, running, images = saved(_Patched, file), empty(_Patched), torch.randn(1, 4, 32, 32)
    if end == "closed":
        with sluice.stream(running, file, memory="5MiB"):
            assert torch.equal(running(images), model(images))
    elif end == "load failed":
        torch.save({"other": torch.ones(2)}, file.with_suffix(".other"))
        with pytest.raises(SluiceError):
            sluice.load_into(running, file.with_suffix(".other"))
    elif end == "not fitting":
        with pytest.raises(BudgetError):
            sluice.stream(running, file, memory="1MiB")
    else:  # what stays is in memory already
        error: type[BaseException] = MemoryError if end == "HostWeights" else KeyboardInterrupt
        with monkeypatch.context() as patched:
            patched.setattr(f"sluice.streaming.stream.{end}", Mock(side_effect=error))
            with pytest.raises(error), sluice.stream(running, file, memory="5MiB"):
                running(images)
    for part in (running, running.blocks, running.blocks[1]):
        with pytest.raises(StreamError, match="not in memory") as refused:
            part(torch.randn(1, WIDTH))
        assert refused.value.tensor is not None
    lent = torch.func.functional_call(running, dict(model.named_parameters()), (images,))
    assert torch.equal(lent, model(images))
    with pytest.raises(StreamError, match="not in memory"):
        running(images)
    with sluice.stream(running, file, memory="5MiB"):
        assert torch.equal(running(images), model(images))
    sluice.load_into(running, file)
    assert torch.equal(running(images), model(images))
    assert not any(part._forward_pre_hooks for part in running.modules())


def test_threads_end_when_a_model_is_dropped_without_closing(file: Path, model: Layers) -> None:
    running = empty(Layers)
    sluice.stream(running, file, memory=3 * block_bytes())
    running(IDS)
    del running
    gc.collect()  # the leak fixture looks for threads and descriptors


def test_a_dropped_stream_may_be_collected_in_its_own_reader(file: Path, model: Layers) -> None:
    running = empty(Layers)
    stream = sluice.stream(running, file, memory=3 * block_bytes())
    running(IDS)
    session = stream._reader._session
    assert session is not None
    plan: Any = SimpleNamespace(next_reads=lambda: [][: gc.collect()], results=queue.SimpleQueue())
    with collector_paused():
        del running, stream
        session._plans.put(plan)  # one of its readers takes it
        for reader in session._readers:
            reader.join(10)
    assert not any(reader.is_alive() for reader in session._readers)


def test_after_a_failed_read_or_an_interrupt_the_next_call_works(
    file: Path, model: Layers, running: Layers, monkeypatch: pytest.MonkeyPatch
) -> None:
    with sluice.open(file) as checkpoint:
        (recording,) = record_reads(checkpoint)
        with sluice.stream(running, checkpoint, memory=3 * block_bytes()) as stream:
            running(IDS)
            watch(monkeypatch, recording, "read_into", raising(4, ReadError("broken", file="f")))
            with pytest.raises(ReadError, match="broken"):
                _call(running, 3)
            assert torch.equal(running(IDS), model(IDS))
            assert stream._reader._session is not None
            stream._reader._session.close()  # as a failed read of a different unit does
            watch(monkeypatch, RunningPlan, "wait", raising(2, SessionEndedError()))  # after that of the embedding
            assert torch.equal(running(IDS), model(IDS))
            with monkeypatch.context() as patch:
                patch.setattr(running.get_submodule("layers.3.1"), "forward", Mock(side_effect=KeyboardInterrupt))
                with pytest.raises(KeyboardInterrupt):
                    running(IDS)
            assert torch.equal(running(IDS), model(IDS))


@pytest.mark.parametrize("exchanged", [1, 3])
def test_an_interrupt_between_two_weights_leaves_none_in_the_model(
    file: Path, running: Layers, monkeypatch: pytest.MonkeyPatch, exchanged: int
) -> None:
    originals = dict(running.named_parameters())
    with sluice.stream(running, file, memory=3 * block_bytes()), monkeypatch.context() as patch:
        interrupted = chain([DEFAULT] * exchanged, [KeyboardInterrupt], repeat(DEFAULT))
        patch.setattr("sluice.streaming.units.hold", Mock(wraps=hold, side_effect=interrupted))
        with pytest.raises(KeyboardInterrupt):
            running(IDS)
    assert all(parameter is originals[name] for name, parameter in running.named_parameters())


def test_a_changed_file_is_an_error(file: Path, running: Layers) -> None:
    with sluice.stream(running, file, memory=3 * block_bytes()):
        running(IDS)
        file.write_bytes(file.read_bytes() + b" ")
        with pytest.raises(SourceChangedError):
            _call(running, 2)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="the system has no fork")
def test_a_child_of_a_fork_reads_with_threads_of_its_own(file: Path, model: Layers, running: Layers) -> None:
    with sluice.stream(running, file, memory=3 * block_bytes()):
        running(IDS)
        child = os.fork()
        if not child:
            try:
                torch.set_num_threads(1)  # threads of torch are those of the parent
                os._exit(int(not torch.equal(running(IDS), model(IDS))))
            finally:
                os._exit(2)
        assert os.waitpid(child, 0)[1] == 0
        running(IDS)


@pytest.mark.parametrize(
    ("path", "name", "value", "reason"),
    [
        ("layers.0", "_compiled_call_impl", print, "torch.compile"),
        ("", "_orig_mod", object(), "torch.compile"),
        ("", "_hf_hook", object(), "accelerate"),
    ],
)
def test_models_whose_calls_cannot_be_followed_are_refused(
    file: Path, running: Layers, path: str, name: str, value: object, reason: str
) -> None:
    vars(running.get_submodule(path))[name] = value
    with pytest.raises(StreamError, match=reason):
        sluice.stream(running, file, memory=3 * block_bytes())


def test_a_streamed_model_is_not_streamed_again_or_loaded_into(file: Path, running: Layers) -> None:
    with sluice.stream(running, file, memory=3 * block_bytes()):
        with pytest.raises(StreamError, match="streamed already"):
            sluice.stream(running, file, memory=3 * block_bytes())
        for place in ("copy", "map", "shared"):
            with pytest.raises(StreamError, match="streamed model cannot be loaded into"):
                sluice.load_into(running, file, place=place)
        with pytest.raises(StreamError, match="streamed model cannot be saved"):
            sluice.save(running, file.with_name("saved.safetensors"))


def test_too_little_memory_touches_nothing(file: Path, running: Layers) -> None:
    with pytest.raises(BudgetError, match=r"too small for the largest block.*at least 2\.\d+ MiB"):
        sluice.stream(running, file, memory="1MiB")
    assert all(parameter.is_meta for parameter in running.parameters())
    assert not any("forward" in vars(part) or "_apply" in vars(part) for part in running.modules())


class _Unit:
    """A unit of one byte, whose reads never end."""

    nbytes, users, uses, ready = 1, 0, 0, False
    plan = SimpleNamespace(prepared=SimpleNamespace(plan=SimpleNamespace(reads=())))

    def __init__(self) -> None:
        self.started, self.looks = False, 0

    @property
    def held(self) -> bool:
        self.looks += 1
        return self.started

    def start(self, *_: object) -> None:
        self.started = True

    def settle(self) -> None:
        raise KeyboardInterrupt

    def drop(self) -> None:
        self.started = False


def test_an_interrupt_while_room_is_made_gives_the_memory_back_and_looks_at_units_in_memory_only() -> None:
    units, nothing = [_Unit() for _ in range(3)], SimpleNamespace(missing_bytes=len)
    window = Window(units, nothing, nothing, most_bytes=1)  # type: ignore[arg-type]
    window.read_ahead([0])
    with pytest.raises(KeyboardInterrupt):
        window.acquire(1)
    assert not units[0].started
    assert not window._held_bytes
    assert not units[2].looks
