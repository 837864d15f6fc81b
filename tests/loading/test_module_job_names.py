"""Names that are missing, unexpected or with a different shape: reported together, kept, or initialised.

How many tensors came from the file: to have none, or names with a different shape, has to be allowed by name.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import sluice
from support.oracles import same
from support.trained_net import empty, load, problem, unchanged


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 4)
        self.body = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
        self.lm_head = nn.Linear(4, 7, bias=False)
        self.register_buffer("mask", torch.ones(3, 3).tril())


def test_every_kind_of_problem_is_in_one_error_with_close_matches() -> None:
    state = Model().state_dict()
    state["output.weight"] = state.pop("lm_head.weight")
    state["body.0.biases"] = state.pop("body.0.bias")
    state["body.1.weight"] = torch.ones(2, 2)
    state["embedding.weight"] = torch.ones(4, 7)
    state["mask"] = torch.ones(3, 3, dtype=torch.complex64)
    state["extra"] = torch.ones(2)
    for model in (Model(), empty(Model)):
        text = problem(model, state)
        assert "'lm_head.weight' [7, 4]; the checkpoint has 'output.weight' of the same shape" in text
        assert "'body.0.bias' [4]; the checkpoint has 'body.0.biases' of the same shape" in text
        assert "'body.1.weight' is [4] in the module, [2, 2] in the checkpoint" in text
        assert "'embedding.weight' is [7, 4] in the module, [4, 7] in the checkpoint" in text
        assert "'mask': complex64 cannot become float32" in text
        assert "'extra' [2]" in text


def test_without_strict_live_values_stay_and_meta_modules_are_initialised() -> None:
    state = Model().state_dict()
    lacking = {"lm_head.weight", "body.0.bias", "body.1.running_var"}
    for name in lacking:
        del state[name]
    state["spare"] = torch.ones(1)
    live, model = Model(), empty(Model)
    kept = live.lm_head.weight.clone()
    report = load(live, state, strict=False)
    assert torch.equal(live.lm_head.weight, kept)
    assert set(report.missing) == lacking
    assert (report.unexpected, report.initialised) == (("spare",), ())
    report = load(model, state, strict=False)
    assert set(report.initialised) == set(report.missing) == lacking
    assert torch.equal(model.get_parameter("body.0.weight"), state["body.0.weight"])
    assert torch.equal(model.get_buffer("body.1.running_var"), torch.ones(4))
    assert not any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))
    assert report.final_bytes == sum(tensor.nbytes for tensor in model.state_dict().values())
    assert report.tensors == len(model.state_dict())


@pytest.mark.parametrize("name", ["in_proj_weight", "bias_k", "out_proj.weight", "out_proj.bias"])
def test_attention_initialises_itself(name: str) -> None:
    def build() -> nn.Module:
        return nn.MultiheadAttention(8, 2, add_bias_kv=True)

    state = {key: tensor for key, tensor in build().state_dict().items() if key != name}
    model = empty(build)
    assert load(model, state, strict=False).initialised == (name,)
    assert bool(model.get_parameter(name).isfinite().all())
    assert all(torch.equal(tensor, state[key]) for key, tensor in model.state_dict().items() if key != name)


def test_tensors_to_initialise_count_towards_the_limit() -> None:
    model = empty(lambda: nn.Sequential(nn.Embedding(16384, 1024), nn.Linear(8, 8, bias=False)))
    memory = sluice.MemoryLimits(host=16384 * 1024 * 4, staging="4MiB")
    with pytest.raises(sluice.BudgetError):
        load(model, {"1.weight": torch.ones(8, 8)}, strict=False, memory=memory)


def test_post_hooks_may_change_the_lists_as_in_load_state_dict() -> None:
    model = nn.Linear(2, 2)
    model.register_load_state_dict_post_hook(lambda _, keys: keys.unexpected_keys.clear())  # type: ignore[no-untyped-call]
    report = load(model, {"weight": torch.ones(2, 2), "spare": torch.ones(1)}, strict=False)
    assert (report.missing, report.unexpected) == (("bias",), ())
    model.register_load_state_dict_post_hook(lambda _, keys: keys.missing_keys.append("imaginary"))  # type: ignore[no-untyped-call]
    with pytest.raises(sluice.PartialLoadError, match=r"a load_state_dict post-hook reports .*imaginary"):
        load(model, nn.Linear(2, 2).state_dict())


def test_a_failing_post_hook_leaves_a_complete_module_and_is_reported() -> None:
    source, model = nn.Linear(2, 2), empty(lambda: nn.Linear(2, 2))
    model.register_load_state_dict_post_hook(lambda *_: 1 / 0)
    with pytest.raises(sluice.PartialLoadError, match="every tensor was loaded, but a load_state_dict post-hook"):
        load(model, source.state_dict())
    assert torch.equal(model.weight, source.weight)


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
    torch.save({"old.one.weight": torch.ones(3, 3), "old.one.bias": torch.ones(3)}, tmp_path / "other.pth")
    return tmp_path / "other.pth"


@pytest.mark.parametrize("build", [Net, lambda: empty(Net)], ids=["live", "meta"])
@pytest.mark.parametrize("verb", [sluice.load_into, sluice.plan])
@pytest.mark.parametrize("strict", [True, False])
def test_nothing_in_common_is_an_error_before_anything_is_touched(
    other: Path, build: Callable[[], nn.Module], verb: Any, strict: bool
) -> None:
    model = build()
    with unchanged(model), pytest.raises(sluice.MismatchError, match="it has 0 of 4 tensors") as caught:
        verb(model, other, strict=strict)
    text = str(caught.value)
    assert "'first.bias' [3]; the checkpoint has 'old.one.bias' of the same shape" in text
    assert ("allow_empty=True (--allow-empty)" in text) is not strict
    assert caught.value.missing == ("first.weight", "first.bias", "second.weight", "second.bias")
    assert set(caught.value.unexpected) == {"old.one.weight", "old.one.bias"}


def test_the_parts_to_choose_from_are_listed() -> None:
    state: Any = {"a": {"x": torch.ones(2)}, "b": {"y": torch.ones(3)}}
    for strict in (True, False):
        with pytest.raises(sluice.MismatchError, match=r"key='b': 0 names match(.|\n)*key='a': 0 names match"):
            load(Net(), state, strict=strict)
    report = load(Net(), state, strict=False, allow_empty=True)
    assert (report.loaded, report.total, report.key) == (0, 4, "b")


def test_nothing_can_be_allowed_by_name(other: Path) -> None:
    model = Net()
    with unchanged(model):
        report = sluice.load_into(model, other, strict=False, allow_empty=True)
    assert str(report).startswith(f"loaded 0 of 4 tensors of the model from {other} (torch-zip), 0 B\n")
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
def test_a_module_that_needs_nothing_is_loaded(build: Callable[[], nn.Module]) -> None:
    report = load(build(), {"old.weight": torch.ones(3)}, strict=False)
    assert str(report).startswith("loaded 0 of 0 tensors of the model")
    assert load(build(), {}).total == 0


def test_tensors_that_older_files_lack_are_not_required() -> None:
    model = nn.BatchNorm1d(2, affine=False)
    del model.running_mean, model.running_var
    assert load(model, {"x": torch.ones(1)}, strict=False).loaded == 0


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
    with unchanged(model.head):
        report = sluice.load_into(model, file, ignore_mismatched=True)
    saved = torch.load(file)
    assert same(model.body.state_dict(), {"weight": saved["body.weight"], "bias": saved["body.bias"]})
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


def test_a_tied_tensor_takes_the_name_of_its_shape() -> None:
    model = nn.ModuleDict({"a": nn.Linear(2, 2, bias=False), "b": nn.Linear(2, 2, bias=False)})
    model["b"].weight = weight = model["a"].weight
    saved = {"a.weight": torch.ones(3, 2), "b.weight": torch.ones(2, 2)}
    report = load(model, saved, ignore_mismatched=True)
    assert torch.equal(weight, saved["b.weight"])  # type: ignore[arg-type]  # a parameter
    assert report.mismatched == {"a.weight": ((2, 2), (3, 2))}
