"""Streamed models: the same outputs as loaded ones, from the memory that was allowed."""

from __future__ import annotations

import copy
import gc
import os
import queue
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import sluice
from sluice import _defaults as defaults
from sluice._errors import BudgetError, MismatchError, ReadError, SluiceError, SourceChangedError, StreamError
from sluice._options import MemoryLimits
from sluice.benchmark.machine import make_cold
from sluice.engine import session as sessions
from sluice.modules.unloaded import Guard, ParkedParameter
from sluice.records import DeviceFacts, collector_paused
from sluice.streaming.stream import Stream
from support.fake_accelerator import FakeAccelerator
from support.sources import record_reads
from support.streamed_models import WIDTH, Experts, Layers, Repeated, block_bytes, empty, saved
from support.watching import watch

MIB = 1 << 20
IDS = torch.tensor([[1, 2, 3, 999]])


@pytest.fixture(autouse=True)
def _no_gradients() -> object:
    with torch.inference_mode():
        yield


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "model.pth"


@pytest.fixture
def model(file: Path) -> Layers:
    """Return a model that is saved in the file."""
    return saved(Layers, file)


@pytest.fixture
def running(model: Layers) -> Layers:
    """Return the same without memory."""
    return empty(Layers)


def _call(model: nn.Module, times: int) -> None:
    for _ in range(times):
        model(IDS)


@pytest.mark.parametrize("memory", [0.3, 0.5, 0.75, 1.5])
@pytest.mark.parametrize("tied", [False, True])
def test_outputs_are_those_of_the_loaded_model(file: Path, memory: float, *, tied: bool) -> None:
    model = saved(lambda: Layers(tied=tied), file)
    want = model(IDS)
    nbytes = sum(parameter.nbytes for parameter in model.parameters())
    running = empty(lambda: Layers(tied=tied))
    with sluice.stream(running, file, memory=int(nbytes * memory)) as stream:
        for _ in range(3):
            assert torch.equal(running(IDS), want)
        report = stream.report
    assert report.memory_bytes <= max(nbytes * memory, nbytes)
    assert (report.calls, report.call_bytes == 0) == (3, memory > 1)


def test_a_tied_weight_is_read_once_for_a_call(file: Path) -> None:
    saved(lambda: Layers(tied=True), file)
    running = empty(lambda: Layers(tied=True))
    with sluice.stream(running, file, memory=3 * MIB + (512 << 10)) as stream:
        first = running(IDS)
        assert torch.equal(running(IDS), first)
        assert isinstance(running.embedding.weight, ParkedParameter)
        assert running.embedding.weight is running.head.weight
    assert running.embedding.weight is running.head.weight
    assert stream.report.call_bytes <= 6 * MIB + 1000 * WIDTH * 4 + (64 << 10)


def test_only_rows_of_an_embedding_are_read(file: Path) -> None:
    def words() -> nn.Sequential:
        return nn.Sequential(nn.Embedding(50_000, 64, padding_idx=49_999))

    model = saved(words, file)
    running = empty(words)
    ids = torch.tensor([[7, 7, 49_999], [40_000, 8, 7]])
    with sluice.stream(running, file, memory=1 * MIB) as stream:
        assert torch.equal(running(ids), model(ids))
        assert stream.report.read_bytes <= 6 * 256 + 3 * (64 << 10)
        everything = torch.arange(50_000).flip(0)
        assert torch.equal(running(everything), model(everything))
        with pytest.raises(IndexError, match="out of range"):
            running(torch.tensor([50_000]))
        for wrong in (torch.ones(2, dtype=torch.bool), torch.ones(2, dtype=torch.uint8), torch.ones(2)):
            with pytest.raises(RuntimeError, match="Expected tensor for argument #1 'indices' to have one of"):
                running(wrong)
        with pytest.raises(TypeError, match="must be Tensor, not list"):
            running([1, 2])
        assert running(torch.empty(0, 2, dtype=torch.long)).shape == (0, 2, 64)


def test_a_parametrized_embedding_looks_up_rows_of_its_computed_weight(file: Path) -> None:
    def make() -> nn.Sequential:
        words = nn.utils.parametrizations.weight_norm(nn.Embedding(2000, WIDTH))
        return nn.Sequential(words, *(nn.Linear(WIDTH, WIDTH) for _ in range(4)))

    model = saved(make, file)
    with torch.no_grad():
        for parameter in model[0].parameters():
            parameter.mul_(2)
    torch.save(model.state_dict(), file)
    running = empty(make)
    ids = torch.tensor([3, 1999])
    with sluice.stream(running, file, memory=6 * MIB) as stream:
        assert torch.equal(running(ids), model(ids))
    assert stream.report.call_bytes


def test_experts_are_read_when_they_are_called_and_kept_by_frequency(file: Path) -> None:
    model = saved(Experts, file)
    x = torch.randn(2, WIDTH)
    running = empty(Experts)
    with sluice.stream(running, file, memory=5 * block_bytes()) as stream:
        before = stream.report.read_bytes
        assert torch.equal(running(x, 3), model(x, 3))
        one = stream.report.read_bytes - before
        assert one <= 2 * MIB + 2 * block_bytes()  # one expert and the rest of each block
        for chosen in (3, 3, 1, 3, 2, 3):
            assert torch.equal(running(x, chosen), model(x, chosen))
        before = stream.report.read_bytes
        running(x, 3)  # used most, so that it was kept
        assert stream.report.read_bytes == before


def test_a_block_that_is_called_again_is_not_read_again(file: Path) -> None:
    model = saved(Repeated, file)
    x = torch.randn(2, WIDTH)
    running = empty(Repeated)
    with sluice.stream(running, file, memory=2 * block_bytes()) as stream:
        for _ in range(3):
            assert torch.equal(running(x), model(x))
        report = stream.report
    assert report.read_bytes <= 3 * report.call_bytes + 2 * MIB  # and the beginning of a fourth call


def test_blocks_may_be_left_out_and_called_in_another_order(file: Path, model: Layers, running: Layers) -> None:
    with sluice.stream(running, file, memory=3 * block_bytes()):
        for skip in ({1, 2}, set(), {0, 5}, {3}):
            model.skip = running.skip = skip
            assert torch.equal(running(IDS), model(IDS))
        for number in (4, 2, 5, 0):
            x = torch.randn(3, WIDTH)
            assert torch.equal(running.layers[number](x), model.layers[number](x))


def test_weights_of_a_block_can_be_used_without_calling_it(file: Path, model: Layers, running: Layers) -> None:
    with sluice.stream(running, file, memory=3 * block_bytes()):
        row = running.linear(2).weight[5]
        running(IDS)  # other weights pass through the memory
        assert torch.equal(row, model.linear(2).weight[5])
        assert torch.equal(running.linear(0).weight @ row, model.linear(0).weight @ row)


def test_a_view_of_a_weight_that_a_block_returns_keeps_its_values(file: Path) -> None:
    class Positions(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH))

        def forward(self) -> torch.Tensor:
            return self.weight[:3]

    def make() -> nn.ModuleList:
        return nn.ModuleList(Positions() for _ in range(6))

    model = saved(make, file)
    running = empty(make)
    with sluice.stream(running, file, memory=2 * block_bytes()):
        found = [block() for block in running]
        for view, block in zip(found, model, strict=True):
            assert torch.equal(view, block())


def test_casts_rules_and_keys_are_those_of_a_load(file: Path) -> None:
    model = saved(lambda: Layers(count=3), file)
    torch.save({"model": {f"old.{name}": value for name, value in model.state_dict().items()}}, file)
    running = empty(lambda: Layers(count=3))
    with sluice.stream(
        running, file, memory=2 * MIB, dtype="bf16", key="model", rename=lambda name: name.removeprefix("old.")
    ):
        found = running(IDS)
        assert running.linear(0).weight.dtype == torch.bfloat16
    assert torch.equal(found, model.bfloat16()(IDS))


@pytest.mark.parametrize("name", ["m.safetensors", "old.pth", "shards", "distributed"])
def test_every_format_can_be_streamed(tmp_path: Path, name: str) -> None:
    model = saved(Layers, tmp_path / "model.pth")
    source = tmp_path / name
    if name == "old.pth":
        torch.save(model.state_dict(), source, _use_new_zipfile_serialization=False)
    elif name == "distributed":
        with torch.inference_mode(mode=False):
            sluice.save(model.state_dict(), source, format="dcp")
    elif name == "shards":
        sluice.save(model, source, format="huggingface", max_shard_size="3MB")
    else:
        sluice.save(model, source)
    running = empty(Layers)
    with sluice.stream(running, source, memory=3 * block_bytes()):
        assert torch.equal(running(IDS), model(IDS))
    if name == "shards":
        fsspec = pytest.importorskip("fsspec", reason="fsspec is not installed")
        fsspec.filesystem("memory").put(f"{source}/", "/streamed/", recursive=True)
        with sluice.stream(running, "memory://streamed", memory=3 * block_bytes()):
            assert torch.equal(running(IDS), model(IDS))


def test_a_call_that_needs_gradients_is_refused(file: Path, running: Layers) -> None:
    with sluice.stream(running, file, memory=3 * block_bytes()):
        with torch.inference_mode(mode=False), torch.enable_grad(), pytest.raises(StreamError, match="no gradients"):
            running(IDS)
        running(IDS)


class _Prepared(nn.Module):
    """Layers that compute from their weights after a load."""

    def __init__(self, prepare: Callable[[torch.Tensor], Any]) -> None:
        super().__init__()
        self.a, self.prepare = nn.Linear(WIDTH, WIDTH), prepare
        self.prepared: Any = None
        self.scale: Any = None
        self.register_load_state_dict_post_hook(lambda *_: setattr(self, "prepared", prepare(self.a.weight)))  # type: ignore[no-untyped-call]

    def get_extra_state(self) -> float:
        return 2.0

    def set_extra_state(self, state: float) -> None:
        self.scale = state * self.a.weight.abs().max()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = self.prepared if isinstance(self.prepared, torch.Tensor) else self.prepared * self.a.weight
        result: torch.Tensor = self.scale * nn.functional.linear(x, weight, self.a.bias)
        return result


@pytest.mark.parametrize(
    "prepare", [lambda weight: 2 * weight, torch.Tensor.detach, lambda weight: weight[0, 0].item()]
)
def test_what_a_model_computes_from_weights_after_a_load_is_right(
    file: Path, prepare: Callable[[torch.Tensor], Any]
) -> None:
    def make() -> nn.Sequential:
        return nn.Sequential(*[_Prepared(prepare) for _ in range(6)])

    model, running, x = saved(make, file), empty(make), torch.randn(2, WIDTH)
    sluice.load_into(model, file)
    with sluice.stream(running, file, memory=3 * block_bytes()) as stream:
        assert torch.equal(running(x), model(x))
        assert stream.report.call_bytes
    sluice.load_into(running, file)
    assert torch.equal(running(x), model(x))
    assert running.state_dict().keys() == model.state_dict().keys()


def test_a_hook_that_ties_weights_keeps_none_of_the_stream(file: Path) -> None:
    def make() -> nn.Sequential:
        model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(6)))
        model.register_load_state_dict_post_hook(lambda *_: setattr(model[3], "weight", model[2].weight))  # type: ignore[no-untyped-call]
        return model

    model, x = make(), torch.randn(2, WIDTH)
    model.load_state_dict(model.state_dict())
    torch.save(model.state_dict(), file)
    running = empty(make)
    for _ in range(2):
        with sluice.stream(running, file, memory=3 * block_bytes()), torch.no_grad():
            assert torch.equal(running(x), model(x))
    sluice.load_into(running, file)
    assert torch.equal(running(x), model(x))


def test_a_failure_of_what_a_model_does_after_a_load_ends_the_stream(
    file: Path, model: Layers, running: Layers
) -> None:
    hook = running.register_load_state_dict_post_hook(lambda *_: running.linear(1).weight.zero_())  # type: ignore[no-untyped-call]
    with pytest.raises(StreamError, match=r"the stream ended: .*cannot change its weights"):
        sluice.stream(running, file, memory=3 * block_bytes())
    with pytest.raises(StreamError, match="not in memory"):
        running(IDS)
    hook.remove()
    sluice.load_into(running, file)
    assert torch.equal(running(IDS), model(IDS))


def test_closing_restores_the_model(file: Path, model: Layers, running: Layers) -> None:
    originals = dict(running.named_parameters())
    stream = sluice.stream(running, file, memory=3 * block_bytes())
    running(IDS)
    taken = running.layers.pop(5)
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


@pytest.mark.parametrize("end", ["closed", "failed", "interrupted", "not fitting", "load failed"])
def test_calls_are_refused_after_every_end_until_the_weights_are_there(
    file: Path, end: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    images = torch.randn(1, 4, 32, 32)
    model = saved(_Patched, file)
    running = empty(_Patched)
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
    else:
        error: type[BaseException] = KeyboardInterrupt if end == "interrupted" else MemoryError
        with monkeypatch.context() as patched:
            patched.setattr("sluice.streaming.stream.HostWeights", _raising(error))  # what stays is in memory already
            with pytest.raises(error):
                sluice.stream(running, file, memory="5MiB")
    for part in (running, running.blocks, running.blocks[0]):
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


def _raising(error: type[BaseException]) -> Callable[..., None]:
    def fail(*_: object, **__: object) -> None:
        raise error

    return fail


def test_weights_that_the_caller_replaces_are_used_and_kept(file: Path, model: Layers, running: Layers) -> None:
    zeros = {name: torch.zeros_like(parameter) for name, parameter in model.named_parameters()}
    given = dict(zeros)
    with sluice.stream(running, file, memory=3 * block_bytes()):
        running(IDS)
        assert not torch.func.functional_call(running, given, (IDS,)).any()
        assert all(given[name] is zero for name, zero in zeros.items())
        assert torch.equal(running(IDS), model(IDS))
        own = nn.Parameter(torch.randn(WIDTH, WIDTH))
        running.linear(1).weight = model.linear(1).weight = own
        running.linear(3).weight = running.linear(2).weight  # tied now
        model.linear(3).weight = model.linear(2).weight
        running.embedding.weight = model.embedding.weight
        torch.utils.swap_tensors(running.linear(4).weight, nn.Parameter(torch.zeros(WIDTH, WIDTH)))  # type: ignore[no-untyped-call]
        model.linear(4).weight.data.zero_()
        for _ in range(2):
            assert torch.equal(running(IDS), model(IDS))
    assert running.linear(1).weight is own
    assert not running.linear(4).weight.any()


def test_freezing_and_loading_other_weights_while_it_is_streamed(file: Path, model: Layers, running: Layers) -> None:
    with sluice.stream(running, file, memory=3 * block_bytes()):
        for parameter in running.parameters():
            parameter.requires_grad = False
        running.add_module("adapter", nn.Linear(2, 2))
        running.load_state_dict({"adapter.bias": torch.ones(2)}, strict=False)
        assert torch.equal(running(IDS), model(IDS))
        assert not any(parameter.requires_grad for parameter in running.layers.parameters())
    assert not any(parameter.requires_grad for parameter in running.layers.parameters())


def test_parameters_that_the_checkpoint_does_not_have_stay_in_memory(
    file: Path, model: Layers, running: Layers
) -> None:
    running.add_module("adapter", nn.Linear(WIDTH, WIDTH))
    with pytest.raises(MismatchError, match=r"adapter\.weight"):
        sluice.stream(running, file, memory=3 * block_bytes())
    own = running.get_parameter("adapter.weight").clone()
    with sluice.stream(running, file, memory=3 * block_bytes(), strict=False) as stream:
        assert "not in the checkpoint (2): adapter.weight, adapter.bias" in str(stream)
        state = running.state_dict()
        running.load_state_dict({"adapter.bias": torch.ones(WIDTH)}, strict=False)
        assert torch.equal(running(IDS), model(IDS))
    assert torch.equal(running.get_parameter("adapter.weight"), own)
    assert torch.equal(state["adapter.weight"], own)
    with pytest.raises(StreamError, match="any more"):
        state["layers.1.0.weight"].sum()


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_an_encoder_of_torch_takes_its_fast_path(file: Path) -> None:
    def make() -> nn.TransformerEncoder:
        layer = nn.TransformerEncoderLayer(256, 4, 1024, batch_first=True)
        return nn.TransformerEncoder(layer, 4)

    model, running = saved(make, file), empty(make)
    x, mask = torch.randn(2, 6, 256), torch.arange(6).expand(2, 6) > torch.tensor([[2], [5]])
    with sluice.stream(running, file, memory="10MiB") as stream:
        found = running(x, src_key_padding_mask=mask)
        assert stream.report.call_bytes
    assert torch.equal(found, model(x, src_key_padding_mask=mask))
    assert not found[0, 3:].any()


def test_an_own_forward_of_a_module_is_called_and_restored(file: Path, model: Layers, running: Layers) -> None:
    usual = running.forward

    def doubled(ids: torch.Tensor) -> torch.Tensor:
        return 2 * usual(ids)

    vars(running)["forward"] = doubled
    with sluice.stream(running, file, memory=3 * block_bytes()):
        assert torch.equal(running(IDS), 2 * model(IDS))
    assert vars(running)["forward"] is doubled


def test_threads_end_when_a_model_is_dropped_without_closing(file: Path) -> None:
    saved(Layers, file)
    running = empty(Layers)
    sluice.stream(running, file, memory=3 * block_bytes())
    running(IDS)
    del running
    gc.collect()  # the leak fixture looks for threads and descriptors


def test_a_dropped_stream_may_be_collected_in_its_own_reader(file: Path) -> None:
    saved(Layers, file)
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
        with sluice.stream(running, checkpoint, memory=3 * block_bytes()):
            running(IDS)
            reads = iter(range(100))

            def fail(offset: int, *_: object, **__: object) -> None:
                if next(reads) == 3:
                    raise ReadError("broken", file="f", offset=offset)

            watch(monkeypatch, recording, "read_into", fail)
            with pytest.raises(ReadError, match="broken"):
                _call(running, 3)
            assert torch.equal(running(IDS), model(IDS))
            with monkeypatch.context() as patch:
                patch.setattr(running.get_submodule("layers.3.1"), "forward", _raising(KeyboardInterrupt))
                with pytest.raises(KeyboardInterrupt):
                    running(IDS)
            assert torch.equal(running(IDS), model(IDS))


def test_a_changed_file_is_an_error(file: Path, running: Layers) -> None:
    with sluice.stream(running, file, memory=3 * block_bytes()):
        running(IDS)
        file.write_bytes(file.read_bytes() + b" ")
        with pytest.raises(SourceChangedError):
            _call(running, 2)


def test_two_threads_and_two_models_at_once(file: Path) -> None:
    model = saved(Layers, file)
    want = model(IDS)
    models = [empty(Layers), empty(Layers)]
    results: list[bool] = []

    def work(running: nn.Module) -> None:
        with torch.inference_mode():
            results.extend(torch.equal(running(IDS), want) for _ in range(3))

    with (
        sluice.stream(models[0], file, memory=3 * block_bytes()),
        sluice.stream(models[1], file, memory=4 * block_bytes()),
    ):
        threads = [threading.Thread(target=work, args=(each,)) for each in (*models, models[0])]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert results == [True] * 9


def test_autocast_holds_no_copies_of_weights(file: Path, model: Layers, running: Layers) -> None:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        want = model(IDS)
        with sluice.stream(running, file, memory=3 * block_bytes()):
            assert torch.equal(running(IDS), want)
            assert torch.equal(running(IDS), want)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="the system has no fork")
def test_a_fork_is_refused_by_name(file: Path, running: Layers) -> None:
    with sluice.stream(running, file, memory=3 * block_bytes()):
        running(IDS)
        child = os.fork()
        if not child:
            try:
                _call(running, 2)
            except ReadError as error:
                os._exit(0 if "fork" in str(error) else 2)
            os._exit(3)
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


def test_blocks_that_are_too_large_are_divided(file: Path) -> None:
    def make() -> nn.Sequential:
        return nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)) for _ in range(3)))

    model = saved(make, file)
    running = empty(make)
    x = torch.randn(2, WIDTH)
    with sluice.stream(running, file, memory=2 * block_bytes(), blocks=None):
        assert torch.equal(running(x), model(x))


def test_the_memory_that_the_limits_leave_is_the_default(file: Path, model: Layers, running: Layers) -> None:
    with sluice.stream(running, file) as stream:
        assert torch.equal(running(IDS), model(IDS))
    assert stream.report.call_bytes == 0  # all of it fits


def test_a_report_tells_what_stays_and_what_is_read(file: Path, running: Layers) -> None:
    stream: Stream
    with sluice.stream(running, file, memory=4 * block_bytes()) as stream:
        assert "calls" not in str(stream)
        running(IDS)
    text = str(stream)
    assert "on cpu" in text
    assert "1 call of" in text
    assert stream.report.to_json()["misses"] == stream.report.misses


def test_a_plan_tells_what_a_stream_would_hold_and_read(file: Path, running: Layers) -> None:
    plan = sluice.plan(running, file, memory=4 * block_bytes(), stream=True).stream
    assert plan is not None
    with sluice.stream(running, file, memory=4 * block_bytes()) as stream:
        report = stream.report
    assert (plan.resident_bytes, plan.window_bytes) == (report.resident_bytes, report.window_bytes)
    assert (plan.call_bytes, plan.blocks) == (report.call_bytes, report.blocks)
    mapped = sluice.plan(
        empty(Layers), file, memory=4 * block_bytes(), stream=True, place="map", device={"": "cpu"}
    ).stream
    assert mapped == plan
    small = sluice.plan(empty(Layers), file, memory="1MiB", stream=True)
    assert small.stream is not None
    assert not small.stream.fits
    assert "as a stream: at least" in str(small)
    with pytest.raises(ValueError, match="needs a model"):
        sluice.plan(None, file, stream=True)


@pytest.fixture
def fake_device(monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr("sluice.loading.devices.device_name", str)
    monkeypatch.setattr("sluice.reading.transfer.device_facts", lambda device: DeviceFacts(device=device))
    monkeypatch.setattr("sluice.engine.targets.accelerator", lambda _: FakeAccelerator())
    return "fake:0"


@pytest.mark.parametrize("page_cache", ["cold", "cached"])
def test_weights_of_an_accelerator_rest_in_host_memory(
    file: Path, model: Layers, running: Layers, fake_device: str, page_cache: str
) -> None:
    """The second call reads from the file only what has no room, and the same bits."""
    memory = MemoryLimits(
        device=3 * block_bytes(), host=(64 << 20) + defaults.OVERHEAD_BYTES + 2 * block_bytes() + 8192
    )
    planned = sluice.plan(running, file, memory=memory, device=fake_device, stream=True).stream
    if page_cache == "cold":
        make_cold(file)
    calls: list[int] = []
    with sluice.open(file) as checkpoint:
        (recorded,) = record_reads(checkpoint)
        with sluice.stream(running, checkpoint, memory=memory, device=fake_device) as stream:
            for _ in range(5):
                recorded.reads.clear()
                assert torch.equal(running(IDS), model(IDS))
                calls.append(sum(read.nbytes for read in recorded.reads))
            report = stream.report
    assert planned is not None
    assert (planned.host_bytes, planned.call_bytes) == (report.host_bytes, report.call_bytes)
    assert 0 < report.host_bytes <= 2 * block_bytes()
    # Direct reads are of whole blocks, and up to two weights are read ahead for the next call.
    assert sum(calls[1:]) <= 4 * (report.call_bytes + 16 * defaults.BLOCK_BYTES) + 2 * MIB
    assert calls[0] >= report.call_bytes + report.host_bytes
    assert "rest in host memory" in str(report)
    assert report.device == fake_device
    with pytest.raises(BudgetError, match="free memory of fake:0 is unknown"):
        sluice.stream(running, file, device=fake_device)
