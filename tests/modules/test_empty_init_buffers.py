"""Non-persistent buffers keep the values of the constructor after ``empty_init`` and ``load_into``."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

import sluice


class Rotary(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        frequencies = 1.0 / 10000 ** (torch.arange(0, width, 2, dtype=torch.float64) / width)
        angles = torch.outer(torch.arange(16, dtype=torch.float64), frequencies)
        self.register_buffer("frequencies", frequencies.float(), persistent=False)
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("rotation", torch.polar(torch.ones_like(angles), angles), persistent=False)


class Windowed(nn.Module):
    """Relative positions of windowed attention."""

    def __init__(self, size: int = 3) -> None:
        super().__init__()
        grid = torch.stack(torch.meshgrid(torch.arange(size), torch.arange(size), indexing="ij")).flatten(1)
        distance = (grid[:, :, None] - grid[:, None, :]).permute(1, 2, 0) + size - 1
        self.table = nn.Parameter(torch.zeros((2 * size - 1) ** 2, 2))
        self.register_buffer("index", distance[..., 0] * (2 * size - 1) + distance[..., 1], persistent=False)
        self.register_buffer("nothing", None, persistent=False)


class Masked(nn.Module):
    """Masks of each kind: saved, computed, shared by two modules, a view of a mask, in half precision."""

    def __init__(self) -> None:
        super().__init__()
        mask = torch.full((6, 6), float("-inf")).triu(1)
        self.register_buffer("computed", mask, persistent=False)
        self.register_buffer("part", mask[:3, :3], persistent=False)
        self.register_buffer("saved", mask.clone())
        self.register_buffer("small", mask.bfloat16(), persistent=False)
        self.other = nn.Linear(2, 2)
        self.other.register_buffer("shared", mask, persistent=False)
        self.other.late = nn.Buffer(torch.tensor(True), persistent=False)


class Late(nn.Module):
    """Recomputes its buffer in ``reset_parameters`` from values that are not tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(4))
        self.register_buffer("slopes", torch.empty(4), persistent=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.ones_(self.weight)
        self.get_buffer("slopes").copy_(torch.tensor([2.0**-i for i in range(4)]))


BUILDS = [Rotary, Windowed, Masked, Late, lambda: nn.Sequential(Rotary(), Masked(), Windowed(), Rotary(4))]


@pytest.mark.parametrize("dtype", [None, torch.bfloat16, "auto"])
@pytest.mark.parametrize("build", BUILDS)
def test_computed_buffers_are_those_of_the_constructor(
    build: Callable[[], nn.Module], dtype: torch.dtype | None, tmp_path: Path
) -> None:
    expected = build()
    torch.save(expected.state_dict(), tmp_path / "f.pth")
    with sluice.empty_init():
        model = build()
    sluice.load_into(model, tmp_path / "f.pth", dtype=dtype)
    saved = expected.state_dict().keys()
    theirs = dict(expected.named_buffers())
    assert [name for name, _ in model.named_buffers()] == list(theirs)
    for name, buffer in model.named_buffers():
        cast = dtype is torch.bfloat16 and name in saved and buffer.is_floating_point()
        assert buffer.device.type == "cpu"
        assert buffer.dtype == (torch.bfloat16 if cast else theirs[name].dtype)
        assert torch.equal(buffer, theirs[name].to(buffer.dtype)), name


def test_a_model_built_on_meta_has_lost_them_and_every_one_is_named(tmp_path: Path) -> None:
    def build() -> nn.Module:
        return nn.Sequential(Rotary(), Masked())

    torch.save(build().state_dict(), tmp_path / "f.pth")
    with torch.device("meta"):
        model = build()
    for strict in (True, False):
        with pytest.raises(sluice.MismatchError, match=r"under sluice\.empty_init\(\)") as caught:
            sluice.load_into(model, tmp_path / "f.pth", strict=strict)
        for name in ("0.frequencies", "0.cos", "0.rotation", "1.computed", "1.part", "1.small", "1.other.late"):
            assert f"'{name}'" in str(caught.value)
        assert "saved" not in str(caught.value)
    assert all(tensor.is_meta for tensor in model.state_dict().values())


def test_buffers_computed_from_parameters_are_refused_by_name_or_follow(tmp_path: Path) -> None:
    class FromParameter(nn.Linear):
        def __init__(self, *, persistent: bool) -> None:
            super().__init__(3, 3)
            self.register_buffer("norm", self.weight.norm(dim=1).detach(), persistent=persistent)

    torch.save(FromParameter(persistent=True).state_dict(), tmp_path / "f.pth")
    with sluice.empty_init():
        saved, computed = FromParameter(persistent=True), FromParameter(persistent=False)
    sluice.load_into(saved, tmp_path / "f.pth")
    assert torch.equal(saved.get_buffer("norm"), torch.load(tmp_path / "f.pth")["norm"])
    with pytest.raises(sluice.MismatchError, match=r"'norm' .* computed from parameters"):
        sluice.load_into(computed, tmp_path / "f.pth", strict=False)
    live = FromParameter(persistent=False)
    kept = live.get_buffer("norm").clone()
    sluice.load_into(live, tmp_path / "f.pth", strict=False)
    assert torch.equal(live.get_buffer("norm"), kept)
