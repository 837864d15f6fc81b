"""How many tensors came from the file: to have none, or names with a different shape, has to be allowed by name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import sluice
from support.oracles import same
from support.trained_net import empty


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 3)
        self.second = nn.Linear(3, 3)


class Computed(nn.Module):
    """A module whose only tensor is computed by its constructor."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.arange(4.0), persistent=False)


@pytest.fixture
def other(tmp_path: Path) -> Path:
    """Return a checkpoint of which no name is a name of ``Net``."""
    torch.save(
        {f"old.{name}": tensor for name, tensor in nn.ModuleDict({"one": Net().first}).state_dict().items()},
        tmp_path / "other.pth",
    )
    return tmp_path / "other.pth"


@pytest.mark.parametrize("build", [Net, lambda: empty(Net)], ids=["live", "meta"])
@pytest.mark.parametrize("verb", [sluice.load_into, sluice.plan])
@pytest.mark.parametrize("strict", [True, False])
def test_nothing_in_common_is_an_error_before_anything_is_touched(
    other: Path, build: Callable[[], nn.Module], verb: Any, strict: bool
) -> None:
    model = build()
    before = {name: (id(tensor), tensor._version) for name, tensor in model.named_parameters() if not tensor.is_meta}
    with pytest.raises(sluice.MismatchError, match="it has 0 of 4 tensors") as caught:
        verb(model, other, strict=strict)
    text = str(caught.value)
    assert "'first.bias' [3]; the checkpoint has 'old.one.bias' of the same shape" in text
    assert ("allow_empty=True (--allow-empty)" in text) is not strict
    assert caught.value.missing == ("first.weight", "first.bias", "second.weight", "second.bias")
    assert set(caught.value.unexpected) == {"old.one.weight", "old.one.bias"}
    after = {name: (id(tensor), tensor._version) for name, tensor in model.named_parameters() if not tensor.is_meta}
    assert after == before


def test_the_parts_to_choose_from_are_listed(tmp_path: Path) -> None:
    torch.save({"a": {"x": torch.ones(2)}, "b": {"y": torch.ones(3)}}, tmp_path / "f.pt")
    for strict in (True, False):
        with pytest.raises(sluice.MismatchError, match=r"key='b': 0 names match(.|\n)*key='a': 0 names match"):
            sluice.load_into(Net(), tmp_path / "f.pt", strict=strict)
    report = sluice.load_into(Net(), tmp_path / "f.pt", strict=False, allow_empty=True)
    assert (report.loaded, report.total, report.key) == (0, 4, "b")


def test_nothing_can_be_allowed_by_name(other: Path) -> None:
    model = Net()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    report = sluice.load_into(model, other, strict=False, allow_empty=True)
    assert str(report).startswith(f"loaded 0 of 4 tensors of the model from {other} (torch-zip), 0 B\n")
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    built = empty(Net)
    report = sluice.load_into(built, other, strict=False, allow_empty=True)
    assert (report.loaded, report.loaded_bytes, report.tensors) == (0, 0, 4)
    assert not any(tensor.is_meta for tensor in built.state_dict().values())


def test_a_part_of_a_model_counts(tmp_path: Path) -> None:
    torch.save({f"first.{name}": tensor for name, tensor in Net().first.state_dict().items()}, tmp_path / "f.pth")
    planned = sluice.plan(Net(), tmp_path / "f.pth", strict=False)
    report = sluice.load_into(empty(Net), tmp_path / "f.pth", strict=False)
    for each, verb in ((planned, "would load"), (report, "loaded")):
        assert str(each).startswith(f"{verb} 2 of 4 tensors of the model from {tmp_path / 'f.pth'} (torch-zip), 48 B ")
        record = each.to_json()
        assert (record["subject"], record["loaded"], record["total"], record["loaded_bytes"]) == ("model", 2, 4, 48)
        assert (each.tensors, each.final_bytes) == ((4, 96) if each is report else (2, 48))


@pytest.mark.parametrize("build", [nn.Identity, nn.ReLU, Computed, lambda: empty(Computed)])
def test_a_module_that_needs_nothing_is_loaded(other: Path, build: Callable[[], nn.Module], tmp_path: Path) -> None:
    report = sluice.load_into(build(), other, strict=False)
    assert str(report).startswith("loaded 0 of 0 tensors of the model")
    torch.save({}, tmp_path / "empty.pth")
    assert sluice.load_into(build(), tmp_path / "empty.pth").total == 0


def test_tensors_that_older_files_lack_are_not_required(tmp_path: Path) -> None:
    class Counter(nn.BatchNorm1d):
        def __init__(self) -> None:
            super().__init__(2, affine=False)
            del self.running_mean, self.running_var

    torch.save({"x": torch.ones(1)}, tmp_path / "f.pth")
    assert sluice.load_into(Counter(), tmp_path / "f.pth", strict=False).loaded == 0


def test_without_a_model_the_tensors_of_the_file_are_counted(tmp_path: Path) -> None:
    torch.save({"model": Net().state_dict(), "step": {"n": torch.ones(())}}, tmp_path / "run.pt")
    planned = sluice.plan(None, tmp_path / "run.pt")
    assert str(planned).startswith(f"would load 4 of 5 tensors of {tmp_path / 'run.pt'} (torch-zip, key 'model'), 96 B")
    assert (planned.subject, planned.key) == ("checkpoint", "model")


class Classes(nn.Module):
    def __init__(self, classes: int) -> None:
        super().__init__()
        self.body = nn.Linear(4, 8)
        self.head = nn.Linear(8, classes)


class Loading(Classes):
    """A module with a ``load_state_dict`` of its own."""

    def load_state_dict(self, state_dict: Any, strict: bool = True, assign: bool = False) -> Any:
        renamed = {name.removeprefix("old."): value for name, value in state_dict.items()}
        return super().load_state_dict(renamed, strict=strict, assign=assign)


MISMATCHED = {"head.weight": ((3, 8), (10, 8)), "head.bias": ((3,), (10,))}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    torch.save(Classes(10).state_dict(), tmp_path / "f.pth")
    return tmp_path / "f.pth"


@pytest.mark.parametrize("kind", [Classes, Loading])
def test_a_new_head_keeps_its_values(file: Path, kind: type[Classes]) -> None:
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
    model = empty(lambda: Classes(3))
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
        sluice.load_into(Classes(3), file, strict=strict)


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
