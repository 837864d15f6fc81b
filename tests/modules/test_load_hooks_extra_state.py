"""Extra state, and tensors of lazy modules, when ``load_state_dict`` runs."""

from __future__ import annotations

import re
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import sluice
from support.module_zoo import Extra
from support.oracles import same
from support.trained_net import empty, load, problem

pytestmark = pytest.mark.filterwarnings("ignore:.*Lazy modules.*")


class Custom:
    """A value that can only be unpickled by running code."""


def build() -> Any:
    return nn.Sequential(Extra(), nn.Linear(4, 4))


def state_of(value: Any, prefix: str = "") -> dict[str, Any]:
    """Return the state dict of the module with a value as its extra state."""
    model = build()
    model[0].extra = value
    return {prefix + name: held for name, held in model.state_dict().items()}


@pytest.mark.parametrize(
    "value",
    [
        None,
        3,
        torch.arange(3),
        torch.randn(2, 3).t(),
        {"p": nn.Parameter(torch.ones(2)), "frozen": nn.Parameter(torch.ones(2), requires_grad=False)},
        {"a": [1, (2.5, "x")], "t": torch.ones(2, dtype=torch.complex64)},
        {},
        [torch.zeros(0)],
    ],
    ids=lambda value: type(value).__name__,
)
@pytest.mark.parametrize("prefix", ["", "model.", "module."])
def test_values_come_back_as_torch_loads_them(value: Any, prefix: str, tmp_path: Path) -> None:
    torch.save(state_of(value, prefix), tmp_path / "f.pth")
    model = empty(build)
    report = sluice.load_into(model, tmp_path / "f.pth")
    assert (report.missing, report.unexpected) == ((), ())
    assert same(model[0].extra, torch.load(tmp_path / "f.pth")[f"{prefix}0._extra_state"])


def test_extra_state_without_tensors_is_the_modules_own(tmp_path: Path) -> None:
    torch.save(state_of({"steps": [1], "dtype": torch.float16, "size": torch.Size([2, 3])}), tmp_path / "f.pth")
    with sluice.open(tmp_path / "f.pth") as checkpoint:
        for _ in range(2):
            model = empty(build)
            sluice.load_into(model, checkpoint)
            assert model[0].extra == {"steps": [1], "dtype": torch.float16, "size": torch.Size([2, 3])}
            assert isinstance(model[0].extra["dtype"], torch.dtype)
            model[0].extra["steps"].append(2)


@pytest.mark.parametrize("value", [{}, [3], {"a": 1, "t": torch.ones(2)}])
def test_rules_leave_extra_state_whole(value: Any, tmp_path: Path) -> None:
    torch.save(state_of(value), tmp_path / "f.pth")
    scaled = [sluice.rules.scale("1.bias", 1.0)]
    sluice.convert(tmp_path / "f.pth", tmp_path / "g.pth", rules=scaled)
    for found in (torch.load(tmp_path / "g.pth"), sluice.load_state_dict(tmp_path / "f.pth", rules=scaled)):
        assert same(found["0._extra_state"], value)
        empty(build).load_state_dict(found, assign=True)


@pytest.mark.parametrize(
    ("tree", "expected"),
    [
        ({"m.w": torch.ones(1), "m._extra_state.t": torch.ones(2)}, ["n.w", "n._extra_state.t"]),
        ({"m.w": torch.ones(1), "m._extra_state": torch.ones(2)}, ["n.w", "n._extra_state"]),
        ({"m._extra_state": torch.ones(2)}, ["n._extra_state"]),
        ({"m.w": torch.ones(9), "m._extra_state": {"t": torch.ones(2)}}, ["n.w", "n._extra_state"]),
    ],
)
def test_names_of_extra_state_are_renamed(tree: dict[str, Any], expected: list[str], tmp_path: Path) -> None:
    torch.save(tree, tmp_path / "f.pth")
    sluice.convert(tmp_path / "f.pth", tmp_path / "g.pth", rename=lambda name: name.replace("m.", "n."))
    assert same(torch.load(tmp_path / "g.pth"), OrderedDict(zip(expected, tree.values(), strict=True)))


def test_shared_tensors_of_extra_state_stay_shared() -> None:
    table = torch.arange(6.0)
    model = empty(build)
    load(model, state_of({"whole": table, "part": table[2:4]}), dtype=torch.bfloat16)
    whole, part = model[0].extra["whole"], model[0].extra["part"]
    assert whole.dtype == torch.float32
    whole[2] = 9
    assert part[0] == 9


def test_extra_state_and_attributes_count_towards_the_limits_of_memory(tmp_path: Path) -> None:
    torch.save(state_of({"t": torch.ones(12 << 20)}), tmp_path / "f.pth")
    model = empty(build)
    assert sluice.plan(model, tmp_path / "f.pth", memory="40MiB").shortages
    with pytest.raises(sluice.BudgetError, match="host memory"):
        sluice.load_into(model, tmp_path / "f.pth", memory="40MiB")
    report = sluice.load_into(model, tmp_path / "f.pth")
    assert report.predicted.total_bytes >= 48 << 20
    with pytest.raises(sluice.BudgetError, match="host memory"):
        sluice.refresh(model, tmp_path / "f.pth", memory="40MiB")


def test_what_only_code_could_build_is_refused_by_name() -> None:
    state, model = state_of({"config": Custom()}), empty(build)
    with pytest.raises(sluice.UnsafeContentError, match=r"0\._extra_state"):
        load(model, state)
    assert model[0].weight.is_meta
    report = load(model, state, strict=False)
    assert any("0._extra_state" in note for note in report.notes)
    assert not model[0].weight.is_meta
    assert model[0].extra["steps"] == 0


def test_extra_state_is_missing_and_unexpected_like_a_tensor() -> None:
    plain = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    without = plain.state_dict()
    assert re.search(r"not in the checkpoint \(1\):\n    '0\._extra_state'", problem(empty(build), without))
    assert re.search(r"not in the module \(1\):\n    '0\._extra_state'", problem(plain, state_of({"a": 1})))
    assert load(empty(build), without, strict=False).missing == ("0._extra_state",)


def test_a_key_and_new_names_apply_to_it() -> None:
    model, nested = empty(build), dict[str, Any](ema=state_of({"a": 5}))
    load(model[0], nested, key="ema.0")
    assert model[0].extra == {"a": 5}
    load(model, state_of({"a": 6}, "x"), rename=[("^x", "")])
    assert model[0].extra == {"a": 6}


def test_a_failing_set_extra_state_leaves_a_complete_module_and_is_reported() -> None:
    class Failing(Extra):
        def set_extra_state(self, _: Any) -> None:
            raise ValueError("too old")

    state, model = state_of({}), empty(lambda: nn.Sequential(Failing(), nn.Linear(4, 4)))
    with pytest.raises(sluice.PartialLoadError, match="every tensor was loaded, but set_extra_state") as caught:
        load(model, state)
    assert isinstance(caught.value.__cause__, ValueError)
    assert set(caught.value.done) == {"0.weight", "0.bias", "1.weight", "1.bias"}
    assert torch.equal(model.get_parameter("1.weight"), state["1.weight"])


def lazy() -> Any:
    return nn.Sequential(nn.LazyLinear(3), nn.LazyBatchNorm1d(), nn.LazyLinear(2, bias=False))


def called() -> nn.Sequential:
    """Return the lazy modules after a call."""
    model: nn.Sequential = lazy()
    model(torch.randn(4, 5))
    return model


@pytest.mark.parametrize("where", ["live", "meta"])
@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_lazy_modules_are_materialised_and_stay_the_same_objects(where: str, dtype: torch.dtype | None) -> None:
    expected = called()
    with torch.device("meta" if where == "meta" else "cpu"):
        model = lazy()
    held = [*model.parameters()]
    optimizer = torch.optim.SGD(held, lr=0.1) if where == "live" else None
    load(model, expected.state_dict(), dtype=dtype)
    assert all(one is other for one, other in zip(held, model.parameters(), strict=True))
    assert {type(parameter) for parameter in held} == {nn.Parameter}
    for name, tensor in model.state_dict().items():
        other = expected.state_dict()[name]
        assert torch.equal(tensor, other.to(tensor.dtype)), name
    x = torch.randn(4, 5, dtype=dtype)
    model(x).sum().backward()
    assert type(model[0]) is nn.Linear
    theirs = lazy()
    theirs.load_state_dict(expected.state_dict())
    theirs(x.float())
    assert model[0].in_features == theirs[0].in_features  # 0 in torch 2.6
    assert held[0].grad is not None
    if optimizer is not None:
        optimizer.step()


def test_what_the_checkpoint_lacks_is_missing_or_stays_lazy() -> None:
    state = {name: tensor for name, tensor in called().state_dict().items() if name != "0.weight"}
    model = lazy()
    with pytest.raises(sluice.MismatchError, match=r"not in the checkpoint \(1\):\n    '0\.weight'\n"):
        load(model, state)
    assert nn.parameter.is_lazy(model[0].weight)
    assert nn.parameter.is_lazy(model[2].weight)
    assert load(model, state, strict=False).missing == ("0.weight",)
    assert nn.parameter.is_lazy(model[0].weight)
    assert tuple(model[2].weight.shape) == (2, 3)
