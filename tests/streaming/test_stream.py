"""Streamed models: the same outputs as loaded ones, from the memory that was allowed."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import sluice
from sluice._errors import StreamError
from sluice.modules.unloaded import ParkedParameter
from support.streamed_models import IDS, WIDTH, Experts, Layers, Repeated, block_bytes, empty, saved

MIB = 1 << 20

pytestmark = pytest.mark.usefixtures("inference")


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


def test_experts_are_read_when_they_are_called_and_kept_by_frequency(file: Path) -> None:
    model, running, x = saved(Experts, file), empty(Experts), torch.randn(2, WIDTH)
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
    model, running, x = saved(Repeated, file), empty(Repeated), torch.randn(2, WIDTH)
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

    model, running = saved(make, file), empty(make)
    with sluice.stream(running, file, memory=2 * block_bytes()):
        found = [block() for block in running]
        for view, block in zip(found, model, strict=True):
            assert torch.equal(view, block())


def test_casts_rules_and_keys_are_those_of_a_load(file: Path) -> None:
    model = saved(lambda: Layers(count=3), file)
    torch.save({"model": {f"old.{name}": value for name, value in model.state_dict().items()}}, file)
    running = empty(lambda: Layers(count=3))
    with sluice.stream(running, file, memory=2 * MIB, dtype="bf16", key="model", rename={"old.**": "**"}):
        found = running(IDS)
        assert running.linear(0).weight.dtype == torch.bfloat16
    assert torch.equal(found, model.bfloat16()(IDS))


@pytest.mark.parametrize(
    ("name", "options"), [("m.safetensors", {}), ("old.pth", {}), ("shards", {"max_shard_size": "3MB"}), ("dcp", {})]
)
def test_every_format_can_be_streamed(
    tmp_path: Path, model: Layers, running: Layers, name: str, options: dict[str, Any]
) -> None:
    source = tmp_path / name
    if name == "old.pth":
        torch.save(model.state_dict(), source, _use_new_zipfile_serialization=False)
    else:
        with torch.inference_mode(mode=False):
            sluice.save(model.state_dict(), source, format="dcp" if name == "dcp" else None, **options)
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
    for part in (model, model.embedding, running, running.embedding):
        vars(part)["forward"] = partial(lambda usual, ids: 2 * usual(ids), part.forward)
    with sluice.stream(running, file, memory=3 * block_bytes()):
        assert torch.equal(running(IDS), model(IDS))
    assert type(vars(running)["forward"]) is partial


def test_recurrent_layers_hold_no_weights_between_calls_and_may_be_moved(file: Path) -> None:
    def make() -> nn.ModuleList:
        return nn.ModuleList(nn.GRU(256, 256) for _ in range(5))

    model, running, x = saved(make, file), empty(make), torch.randn(3, 1, 256)
    with sluice.stream(running, file, memory=4 * MIB) as stream:
        for one, other in zip(running.to("cpu"), model, strict=True):
            assert torch.equal(one(x)[0], other(x)[0])
            assert [*map(id, vars(one)["_flat_weights"])] == [*map(id, one.parameters())]
        assert stream.report.call_bytes


def test_two_threads_and_two_models_at_once(file: Path, model: Layers, running: Layers) -> None:
    want, other = model(IDS), empty(Layers)

    def work(running: nn.Module) -> list[bool]:
        with torch.inference_mode():
            return [torch.equal(running(IDS), want) for _ in range(3)]

    with (
        sluice.stream(running, file, memory=3 * block_bytes()),
        sluice.stream(other, file, memory=4 * block_bytes()),
        ThreadPoolExecutor(3) as pool,
    ):
        assert [*pool.map(work, (running, other, running))] == [[True] * 3] * 3


def test_autocast_holds_no_copies_of_weights(file: Path, model: Layers, running: Layers) -> None:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        want = model(IDS)
        with sluice.stream(running, file, memory=3 * block_bytes()):
            assert torch.equal(running(IDS), want)
            assert torch.equal(running(IDS), want)


def test_blocks_that_are_too_large_are_divided(file: Path) -> None:
    def make() -> nn.Sequential:
        return nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)) for _ in range(3)))

    model, running, x = saved(make, file), empty(make), torch.randn(2, WIDTH)
    with sluice.stream(running, file, memory=2 * block_bytes(), blocks=None):
        assert torch.equal(running(x), model(x))


def test_the_memory_that_the_limits_leave_is_the_default(file: Path, model: Layers, running: Layers) -> None:
    with sluice.stream(running, file) as stream:
        assert torch.equal(running(IDS), model(IDS))
        with pytest.raises(StreamError, match="streamed already"):
            sluice.stream(running, file)
    assert stream.report.call_bytes == 0  # all of it fits


def test_plan_and_report_tell_what_stays_and_what_is_read(file: Path, running: Layers) -> None:
    plan = sluice.plan(running, file, memory=4 * block_bytes(), stream=True).stream
    assert plan is not None
    with sluice.stream(running, file, memory=4 * block_bytes()) as stream:
        assert "calls" not in str(stream)
        running(IDS)
    text, report = str(stream), stream.report
    assert "on cpu" in text
    assert "1 call of" in text
    assert report.to_json()["misses"] == report.misses
    assert (plan.resident_bytes, plan.window_bytes) == (report.resident_bytes, report.window_bytes)
    assert (plan.call_bytes, plan.blocks) == (report.call_bytes, report.blocks)
    mapped = sluice.plan(
        empty(Layers), file, memory=4 * block_bytes(), stream=True, place="map", device={"": "cpu"}
    ).stream
    assert mapped == plan
    small = sluice.plan(empty(Layers), file, memory="1MiB", stream=True)
    assert small.stream is not None
    assert not small.stream.fits
    assert ["as a stream: at least" in str(each) for each in (plan, small)] == [False, True]
    with pytest.raises(ValueError, match="needs a model"):
        sluice.plan(None, file, stream=True)


def test_only_rows_of_an_embedding_are_read(file: Path) -> None:
    def words() -> nn.Sequential:
        return nn.Sequential(nn.Embedding(50_000, 64, padding_idx=49_999))

    model, running = saved(words, file), empty(words)
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
