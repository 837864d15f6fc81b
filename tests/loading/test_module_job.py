"""Random modules and random damage to their state dicts: ``load_into`` behaves as ``load_state_dict``.

Tensors of quantized files in modules: packed ones of GGUF files are decoded, cast and changed; others are plain.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import nn

import sluice
from sluice import rules
from sluice.checkpoint.open_checkpoint import OpenCheckpoint
from sluice.engine.targets import Targets
from sluice.reading import transfer
from sluice.records import DeviceFacts, Request
from support.fake_accelerator import FakeAccelerator
from support.gguf_files import packed, plain, write
from support.oracles import bits
from support.trained_net import empty, load, problem

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.uint8, torch.bool]


class Odds(nn.Module):
    """A module with a scalar, an empty tensor, and buffers of several dtypes and layouts."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.nothing = nn.Parameter(torch.empty(0, 3))
        self.frozen = nn.Parameter(torch.randn(3, 5).t(), requires_grad=False)
        self.register_buffer("counts", torch.arange(4))
        self.register_buffer("mask", torch.eye(3, dtype=torch.bool))
        self.register_buffer("small", torch.randn(2, 2, dtype=torch.float16))
        self.register_buffer("computed", torch.arange(3.0), persistent=False)


PARTS: list[Callable[[], nn.Module]] = [
    lambda: nn.Linear(3, 3),
    lambda: nn.Linear(3, 3, bias=False),
    lambda: nn.Embedding(3, 3, padding_idx=0),
    lambda: nn.BatchNorm1d(3),
    lambda: nn.GRU(3, 3),
    lambda: nn.Sequential(nn.Linear(3, 3), nn.Sequential(nn.PReLU(), nn.LayerNorm(3))),
    Odds,
]


@dataclass(frozen=True)
class Case:
    """A module and changes to its state dict."""

    parts: list[int]
    #: Pairs of parts that are the same module, or whose weights are the same parameter.
    shared: list[tuple[int, int]]
    tied: list[tuple[int, int]]
    #: Positions in the state dict of names that are dropped, renamed, reshaped and cast to a different dtype.
    dropped: set[int]
    renamed: set[int]
    reshaped: set[int]
    recast: dict[int, torch.dtype]
    strict: bool

    def build(self, seed: int) -> nn.Module:
        torch.manual_seed(seed)
        made = [PARTS[part]() for part in self.parts]
        for one, other in self.shared:
            made[other % len(made)] = made[one % len(made)]
        for one, other in self.tied:
            first, second = (made[i % len(made)] for i in (one, other))
            if all(tuple(getattr(part, "weight", torch.empty(0)).shape) == (3, 3) for part in (first, second)):
                second.weight = first.weight
        return nn.ModuleList(made)

    def damage(self, state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        damaged = {}
        for position, (name, tensor) in enumerate(state.items()):
            if position in self.dropped:
                continue
            value = tensor
            if position in self.recast and not tensor.is_complex():
                value = value.to(self.recast[position])
            if position in self.reshaped:
                value = torch.zeros(7, 2)
            damaged[f"{name}_old" if position in self.renamed else name] = value
        return damaged


positions = st.sets(st.integers(0, 30), max_size=2)
pairs = st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), max_size=2)
cases = st.builds(
    Case,
    parts=st.lists(st.integers(0, len(PARTS) - 1), min_size=1, max_size=4),
    shared=pairs,
    tied=pairs,
    dropped=positions,
    renamed=positions,
    reshaped=st.sets(st.integers(0, 60), max_size=1),
    recast=st.dictionaries(st.integers(0, 30), st.sampled_from(DTYPES), max_size=4),
    strict=st.booleans(),
)


def same_names(module: nn.Module) -> dict[str, list[str]]:
    """Return all names of the tensor of each name of the state dict."""
    found: dict[int, list[str]] = {}
    for name, tensor in module.state_dict(keep_vars=True).items():
        found.setdefault(id(tensor), []).append(name)
    return {name: names for names in found.values() for name in names}


def with_partners(state: dict[str, torch.Tensor], names: dict[str, list[str]]) -> dict[str, torch.Tensor]:
    """Return the state dict with its tensors under all their names, each with the value of the first."""
    complete = dict(state)
    for group in names.values():
        present = [name for name in group if name in state]
        if present:
            complete.update(dict.fromkeys(group, state[present[0]]))
    return complete


def conflicts(state: dict[str, torch.Tensor], module: nn.Module) -> bool:
    """Return whether two names of one tensor have different values, or one of them a different shape."""
    own = module.state_dict()
    for group in same_names(module).values():
        found = [state[name] for name in group if name in state]
        if any(tensor.shape != own[group[0]].shape for tensor in found):
            return True
        if len({bits(tensor.to(own[group[0]].dtype)) for tensor in found}) > 1:
            return True
    return False


@settings(max_examples=60)
@given(case=cases)
def test_random_modules_load_as_load_state_dict_loads_them(case: Case) -> None:
    state = case.damage(dict(case.build(1).state_dict()))
    expected = case.build(2)
    conflict = conflicts(state, expected)
    try:
        expected.load_state_dict(with_partners(state, same_names(expected)), strict=case.strict)
        fits = not (conflict and case.strict)
    except RuntimeError:
        fits = False
    live, meta = case.build(2), empty(lambda: case.build(2))
    names = same_names(live)
    if not fits:
        for module in (live, meta):
            if state or names:
                problem(module, state, strict=case.strict)
        return
    if not any(name in names for name in state):
        return  # the part of the file is ambiguous
    load(live, state, strict=case.strict)
    assert same_names(live) == names
    for name, tensor in expected.state_dict().items():
        ours = live.state_dict()[name]
        assert (ours.dtype, ours.stride(), bits(ours)) == (tensor.dtype, tensor.stride(), bits(tensor)), name
    try:
        load(meta, state, strict=case.strict)
    except sluice.MismatchError as error:
        assert not case.strict
        assert "can initialise it with reset_parameters()" in str(error)
        assert all(tensor.is_meta for tensor in meta.state_dict().values())
        return
    assert same_names(meta) == names
    assert not any(tensor.is_meta for tensor in (*meta.parameters(), *meta.buffers()))
    for name, tensor in meta.state_dict().items():
        if any(other in state for other in names[name]):
            assert bits(tensor) == bits(expected.state_dict()[name]), name


UP, UP_VALUES = packed((96, 256), "Q4_0", seed=1)
DOWN, DOWN_VALUES = packed((96, 256), "Q8_0", seed=2)
BIAS = torch.randn(256)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(256, 96, bias=False)
        self.down = nn.Linear(96, 256)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    tensors = {"blk.0.ffn_up.weight": UP, "blk.0.ffn_down.weight": DOWN, "blk.0.ffn_down.bias": plain(BIAS)}
    return write(tmp_path / "model.gguf", tensors)


RENAME = [(r"blk\.0\.ffn_(\w+)\.(\w+)", r"\1.\2")]


@pytest.mark.parametrize("live", [False, True], ids=["meta", "live"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_modules_get_the_decoded_elements(file: Path, live: bool, dtype: torch.dtype) -> None:
    model = Net().to(dtype) if live else Net().to("meta", dtype)
    sluice.load_into(model, file, rename=RENAME, rules=[rules.transpose("down.weight")])
    assert bits(model.up.weight) == bits(UP_VALUES.to(dtype))
    assert bits(model.down.weight) == bits(DOWN_VALUES.T.to(dtype))
    assert bits(model.down.bias) == bits(BIAS.to(dtype))


def test_factors_and_joins_of_packed_tensors(file: Path) -> None:
    model = nn.Linear(256, 192, bias=False, device="meta")
    joined = rules.concatenate(("up.weight", "down.weight"), "weight")
    changed = [rules.scale("up.weight", 0.5), joined]
    sluice.load_into(model, file, rename=RENAME, rules=changed, strict=False)
    assert bits(model.weight) == bits(torch.cat([UP_VALUES * 0.5, DOWN_VALUES]))


def test_on_the_way_to_an_accelerator(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sluice.reading.transfer.device_facts", lambda name: DeviceFacts(device=name))
    device = FakeAccelerator()
    with OpenCheckpoint.open(file) as checkpoint:
        entry = checkpoint.entries["blk.0.ffn_up.weight"]
        prepared = transfer.prepare(checkpoint, [Request(name="w", entry=entry, dtype="bfloat16", device="fake:0")])
        targets = Targets(prepared.plan, accelerators={"fake:0": device})
        (found,) = transfer.run(checkpoint, prepared, targets)[0]
    device.assert_filled_once()
    assert bits(found) == bits(UP_VALUES.bfloat16())


#: Tensors of a layer as GPTQ stores it, and of one in float8 as llm-compressor does.
QUANTIZED = {
    "qweight": torch.arange(8 * 32, dtype=torch.int32).mul(0x01234567).view(8, 32),
    "scales": torch.linspace(0.01, 1, 64).half().view(2, 32),
    "weight": torch.linspace(-3, 3, 32 * 64).view(32, 64).to(torch.float8_e4m3fn),
    "input_scale": torch.tensor(0.5),
}


def test_files_of_gptq_awq_and_llm_compressor_hold_plain_tensors(tmp_path: Path) -> None:
    save_file(QUANTIZED, tmp_path / "model.safetensors", metadata={"format": "pt"})
    model = nn.Module()
    for name, tensor in QUANTIZED.items():
        model.register_buffer(name, torch.empty_like(tensor, device="meta"))
    sluice.load_into(model, tmp_path / "model.safetensors")
    state = sluice.load_state_dict(tmp_path / "model.safetensors")
    for name, tensor in QUANTIZED.items():
        assert bits(model.get_buffer(name)) == bits(state[name]) == bits(tensor), name
