"""``ignore_mismatched``: names of a different shape keep the module's values, and the report lists them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import sluice
from support.oracles import same
from support.trained_net import empty


class Net(nn.Module):
    def __init__(self, classes: int) -> None:
        super().__init__()
        self.body = nn.Linear(4, 8)
        self.head = nn.Linear(8, classes)


class Loading(Net):
    """A module with a ``load_state_dict`` of its own."""

    def load_state_dict(self, state_dict: Any, strict: bool = True, assign: bool = False) -> Any:
        renamed = {name.removeprefix("old."): value for name, value in state_dict.items()}
        return super().load_state_dict(renamed, strict=strict, assign=assign)


MISMATCHED = {"head.weight": ((3, 8), (10, 8)), "head.bias": ((3,), (10,))}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    torch.save(Net(10).state_dict(), tmp_path / "f.pth")
    return tmp_path / "f.pth"


@pytest.mark.parametrize("kind", [Net, Loading])
def test_a_new_head_keeps_its_values(file: Path, kind: type[Net]) -> None:
    model = kind(3)
    head = {name: tensor.clone() for name, tensor in model.head.state_dict().items()}
    report = sluice.load_into(model, file, ignore_mismatched=True)
    saved = torch.load(file)
    assert same(model.body.state_dict(), {"weight": saved["body.weight"], "bias": saved["body.bias"]})
    assert same(model.head.state_dict(), head)
    assert (report.loaded, report.total) == (2, 4)
    assert report.mismatched == MISMATCHED
    assert not report.missing
    assert "of a different shape, not loaded (2): head.weight [3, 8], [10, 8] in the checkpoint" in str(report)


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_a_new_head_on_meta_is_initialised_and_cast(file: Path, dtype: torch.dtype | None) -> None:
    with sluice.empty_init():
        model = Net(3)
    assert sluice.plan(model, file, ignore_mismatched=True).mismatched == MISMATCHED
    torch.manual_seed(0)
    report = sluice.load_into(model, file, ignore_mismatched=True, dtype=dtype)
    torch.manual_seed(0)
    expected = nn.Linear(8, 3).to(dtype=dtype)
    assert same(model.head.state_dict(), expected.state_dict())
    assert report.initialised == ("head.weight", "head.bias")


@pytest.mark.parametrize("strict", [True, False])
def test_the_error_prints_the_argument_that_works(file: Path, *, strict: bool) -> None:
    with pytest.raises(sluice.MismatchError, match=r"(?s)a different shape.*ignore_mismatched=True\) \(--ignore-mis"):
        sluice.load_into(Net(3), file, strict=strict)


def test_other_problems_are_errors(file: Path) -> None:
    with pytest.raises(sluice.MismatchError, match=r"(?s)not in the module.*'body\.weight'") as caught:
        sluice.load_into(nn.ModuleDict({"head": nn.Linear(8, 3), "x": nn.Linear(1, 1)}), file, ignore_mismatched=True)
    assert caught.value.missing == ("x.weight", "x.bias")
    with pytest.raises(sluice.MismatchError, match="0 of 2 tensors"):
        sluice.load_into(nn.ModuleDict({"head": nn.Linear(8, 3)}), file, strict=False, ignore_mismatched=True)

    class NoReset(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Linear(4, 8)
            self.head = nn.ParameterDict({"weight": torch.zeros(3, 8), "bias": torch.zeros(3)})

    model = empty(NoReset)
    with pytest.raises(sluice.MismatchError, match="not in the checkpoint in this shape, and none of its modules"):
        sluice.load_into(model, file, ignore_mismatched=True)


def test_a_tied_tensor_takes_the_name_of_its_shape(tmp_path: Path) -> None:
    model = nn.ModuleDict({"a": nn.Linear(2, 2, bias=False), "b": nn.Linear(2, 2, bias=False)})
    model["b"].weight = weight = model["a"].weight
    saved = {"a.weight": torch.ones(3, 2), "b.weight": torch.ones(2, 2)}
    torch.save(saved, tmp_path / "f.pth")
    report = sluice.load_into(model, tmp_path / "f.pth", ignore_mismatched=True)
    assert torch.equal(weight, saved["b.weight"])  # type: ignore[arg-type]  # a parameter
    assert report.mismatched == {"a.weight": ((2, 2), (3, 2))}
