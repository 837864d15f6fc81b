"""Constructors that move, cast, copy, tie, initialise and read their parameters, under ``empty_init``."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import sluice
from sluice.loading import module_job
from sluice.modules import moves
from sluice.modules.moves import moved_to
from sluice.planning.memory_layout import Computed


class Moved(nn.Module):
    """Moves and casts itself, its layers and its buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.small = nn.Linear(3, 4).half()
        self.norm = nn.BatchNorm1d(4).bfloat16().to("cpu")
        self.large = nn.Linear(4, 4).to(torch.device("cpu"), torch.float64, non_blocking=True)
        self.back = nn.Linear(4, 4).double().float()
        self.image = nn.Conv2d(2, 4, 3).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.like = nn.Linear(2, 2).to(self.large.weight)
        self.frozen = nn.Linear(2, 2).requires_grad_(False)
        self.register_buffer("table", torch.arange(4.0), persistent=False)
        self.to("cpu")


class Copied(nn.Module):
    """Deep copies, also of buffers, and torch's own clones."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
        self.layers = nn.ModuleList([copy.deepcopy(layer) for _ in range(2)])
        self.transformer = nn.Transformer(8, 2, 1, 1, 8, batch_first=True)
        self.teacher = copy.deepcopy(layer).requires_grad_(False)
        self.weight = nn.Parameter(layer.get_parameter("0.weight").data.clone())


class Tied(nn.Module):
    """Every way to share a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5, 3)
        self.head, self.other, self.third = (nn.Linear(3, 5, bias=False) for _ in range(3))
        self.head.weight = self.embedding.weight
        self.other.weight.data = self.embedding.weight.data
        self.third.weight = nn.Parameter(self.embedding.weight.data)
        computed, constant = torch.randn(3) * 2, torch.zeros(3)
        self.first, self.second = nn.Parameter(computed), nn.Parameter(computed)
        self.zero, self.null = nn.Parameter(constant), nn.Parameter(constant)
        assert self.first.data_ptr() == self.second.data_ptr() != self.zero.data_ptr()


class Initialised(nn.Module):
    """Every way to initialise."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5, 4, padding_idx=0)
        self.linear = nn.Linear(4, 4)
        with torch.no_grad():
            self.embedding.weight[0].fill_(0)
            self.embedding.weight[1] = torch.arange(4.0)
            self.linear.weight.copy_(torch.eye(4))
            self.linear.weight.mul_(torch.full((4,), 2.0)).add_(1)
            self.linear.bias.data.uniform_(-0.1, 0.1)
            self.linear.bias[torch.tensor([True, False, True, False])] = 0
        nn.init.trunc_normal_(self.linear.weight, std=0.02)
        nn.init.orthogonal_(self.linear.weight)
        nn.init.eye_(self.linear.weight)
        nn.init.dirac_(nn.Conv1d(2, 2, 3).weight)
        self.linear.weight.data = torch.randn(4, 4)
        self.apply(self._init_weights)

    @staticmethod
    def _init_weights(module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.xavier_uniform_(module.weight)
            nn.init.zeros_(module.bias)


class Asking(nn.Module):
    """Asks for devices and dtypes, and makes tensors like its parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        weight = self.linear.weight
        assert weight.device == torch.device("cpu")
        assert weight.is_cpu
        assert not weight.is_cuda
        assert weight.dtype == torch.float32
        self.register_buffer("mask", torch.ones(4, 4, device=weight.device).tril(), persistent=False)
        self.register_buffer("like", torch.ones_like(weight), persistent=False)
        self.register_buffer("new", weight.new_tensor([1.0, 2.0]), persistent=False)
        self.register_buffer("zeros", weight.new_zeros(2, dtype=torch.int64), persistent=False)
        self.plain = torch.full((2, 2), 7).triu().view(4)
        with torch.no_grad():
            self.width = self.linear(torch.zeros(2, 4)).shape[1]


class Reading(nn.Module):
    """Reads values for log lines and assertions; they are those of the initialisers."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()) * np.log(1 / 0.07))
        self.linear = nn.Linear(40, 50)
        self.norm = nn.LayerNorm(6)
        nn.init.normal_(self.linear.weight, mean=3, std=0.1)
        mean, again = self.linear.weight.mean().item(), float(self.linear.weight.detach().mean())
        assert mean == again
        assert 2.9 < mean < 3.1
        assert f"{self.scale.exp():.2f}" == "14.29"
        assert (self.norm.weight == 1).all()
        assert self.norm.bias.sum() == 0
        assert torch.isfinite(self.linear.weight).all()
        assert torch.equal(self.norm.weight, torch.ones(6))
        assert self.norm.weight.tolist() == [1.0] * 6
        assert np.asarray(self.norm.bias.detach()).sum() == 0
        self.norm.weight.data[2:4] = 5
        assert self.norm.weight.detach().cpu().numpy().tolist() == [1.0, 1.0, 5.0, 5.0, 1.0, 1.0]
        print(self.linear.weight, f"{self.linear.weight}", self)
        self.register_buffer("initial", self.norm.bias.detach().clone(), persistent=False)
        self.start = self.scale.detach() * 2
        self.register_buffer("table", torch.zeros(3), persistent=False)
        self.get_buffer("table").copy_(self.norm.bias[:3])


BUILDS: list[Callable[[], nn.Module]] = [Moved, Copied, Tied, Initialised, Asking, Reading]


def describe(module: nn.Module) -> object:
    tensors = module.state_dict(keep_vars=True)
    storages = [t.untyped_storage()._cdata for t in tensors.values()]
    return [
        (name, t.shape, t.stride(), t.dtype, type(t), t.requires_grad, storages.index(t.untyped_storage()._cdata))
        for name, t in tensors.items()
    ]


@pytest.mark.parametrize("build", BUILDS)
def test_constructors_build_the_same_module_and_the_checkpoint_fills_it(
    build: Callable[[], nn.Module], tmp_path: Path
) -> None:
    expected = build()
    torch.save(expected.state_dict(), tmp_path / "f.pth")
    before = torch.get_rng_state()
    with sluice.empty_init():
        model = build()
    assert all(t.is_meta for t in model.state_dict().values())
    assert describe(model) == describe(expected)
    assert build in {Tied, Initialised} or torch.equal(torch.get_rng_state(), before)
    sluice.load_into(model, tmp_path / "f.pth")
    assert describe(model) == describe(expected)
    for name, tensor in expected.state_dict().items():
        assert torch.equal(model.state_dict()[name], tensor), name
    for name, buffer in expected.named_buffers():
        assert torch.equal(model.get_buffer(name), buffer), name
    for name, value in vars(expected).items():
        if isinstance(value, torch.Tensor):
            assert torch.equal(getattr(model, name), value)


class Wide(nn.Module):
    """Reads a parameter whose values are too large to keep."""

    def __init__(self, read: Callable[[torch.Tensor], object]) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(600, 600) * 0.02)
        read(self.table)


def overwrite(table: torch.Tensor) -> None:
    nn.init.ones_(table)
    assert table.sum() == 360_000


def test_values_that_are_not_kept_are_refused_with_the_line_of_the_constructor() -> None:
    with sluice.empty_init():
        Wide(lambda table: table.mean())
        Wide(overwrite)
    with (
        sluice.empty_init(),
        pytest.raises(sluice.EmptyInitError, match=r"constructors.py, line \d+\).*Wide\.table.*outside"),
    ):
        Wide(lambda table: table.mean().item())


def test_errors_of_the_constructor_are_its_own() -> None:
    with sluice.empty_init(), pytest.raises(RuntimeError, match="must have same reduction dim") as caught:
        Wide(lambda table: table @ torch.ones(3, 4))
    assert not isinstance(caught.value, sluice.EmptyInitError)


def test_state_computed_from_random_values_is_refused() -> None:
    class Normed(nn.Linear):
        def __init__(self) -> None:
            super().__init__(3, 3)
            self.register_buffer("norm", torch.zeros(3), persistent=False)
            self.get_buffer("norm").copy_(self.weight.norm(dim=1))

    with sluice.empty_init(), pytest.raises(sluice.EmptyInitError, match=r"Normed\.__init__ .* random"):
        Normed()


def test_moves_are_remembered_and_followed_by_a_load(tmp_path: Path) -> None:
    class OnDevice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.head = nn.Linear(3, 3), nn.Linear(3, 3)
            self.head.cuda().half()
            self.norm = nn.BatchNorm1d(3).to("cuda:1")
            assert self.head.weight.is_cuda
            assert self.norm.running_mean is not None
            assert self.norm.running_mean.device == torch.device("cuda:1")

    with sluice.empty_init():
        model = OnDevice()
    assert str(moved_to(model.head.weight)) == f"cuda:{torch.cuda.current_device() if torch.cuda.is_available() else 0}"
    assert moved_to(model.body.weight) is None
    if torch.cuda.is_available():
        return
    torch.save({name: torch.ones(t.shape, dtype=t.dtype) for name, t in model.state_dict().items()}, tmp_path / "f.pth")
    plan = sluice.plan(model, tmp_path / "f.pth")
    report = sluice.load_into(model, tmp_path / "f.pth")
    assert model.head.weight.dtype == torch.float16
    assert all(t.device.type == "cpu" for t in model.state_dict().values())
    for notes in (plan.notes, report.notes):
        assert any("moved 2 tensors to cuda:0" in note and "not available" in note for note in notes)


class _PlannedError(Exception):
    """The transfer is planned; this machine may not have the device."""


def test_initialised_tensors_are_planned_where_the_constructor_moved_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with sluice.empty_init():
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)).cuda()
    torch.save({"0.weight": torch.ones(2, 2), "0.bias": torch.ones(2)}, tmp_path / "f.pth")
    devices: list[str] = []

    def plan_transfer(*_: object, computed: list[Computed], **__: object) -> None:
        devices.extend(str(torch.device(each.device).type) for each in computed)
        raise _PlannedError

    monkeypatch.setattr(moves, "_is_available", lambda _: True)
    monkeypatch.setattr(module_job, "plan_transfer", plan_transfer)
    with pytest.raises(_PlannedError):
        sluice.load_into(model, tmp_path / "f.pth", strict=False)
    assert devices == ["cuda", "cuda"]
