"""State by name, with different names in checkpoint and model, and arbitrary content in place of a state."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict

import sluice
from sluice import MismatchError
from sluice.matching.optimizer_states import OptimizerOutline, ParameterOutline, find_state
from sluice.matching.renaming import Rename
from support.distributed import save as save_distributed
from support.plans import entry
from support.training_runs import Net, differences, grouped, net, states_by_name, train
from support.work import at_most

RENAMES: dict[str, Rename] = {
    "mapping": {f"old.{name}": name for name, _ in net().named_parameters()},
    "expressions": [(r"^old\.", "")],
    "function": lambda name: name.removeprefix("old."),
}


Run = tuple[Net, torch.optim.Optimizer]


@pytest.fixture
def run() -> Run:
    model = net()
    optimizer = torch.optim.AdamW(grouped(model))
    train(model, optimizer, 3)
    return model, optimizer


def under(prefix: str, module: nn.Module) -> nn.Module:
    """Return a module that holds another one below a prefix of names."""
    for name in reversed(prefix.split(".")[:-1]):
        module = nn.ModuleDict({name: module})
    return module


def full_state_dict(run: Run, prefix: str = "") -> Any:
    """Return a state of FSDP's FULL_STATE_DICT: one entry per parameter name, and groups of names."""
    return get_optimizer_state_dict(under(prefix, run[0]), run[1])


def fill(path: Path, **how: Any) -> tuple[nn.Module, torch.optim.Optimizer, sluice.LoadReport]:
    again = net(seed=1)
    ours = torch.optim.AdamW(grouped(again), lr=0.5)
    return again, ours, sluice.load_optimizer(ours, path, model=again, **how)


@pytest.mark.parametrize("prefix", ["", "module.", "module._orig_mod.", "_orig_mod."])
def test_full_state_dicts_of_fsdp_also_under_wrappers(tmp_path: Path, run: Run, prefix: str) -> None:
    torch.save({"optim": full_state_dict(run, prefix)}, tmp_path / "f.pt")
    again, ours, report = fill(tmp_path / "f.pt")
    assert report.key == "optim"
    assert not differences(states_by_name(again, ours), states_by_name(*run))
    again.load_state_dict(run[0].state_dict())
    for one, other in (run, (again, ours)):
        train(one, other, 20, first=3)
    assert not differences(again.state_dict(), run[0].state_dict())
    assert not differences(states_by_name(again, ours), states_by_name(*run))


def test_a_wrapped_model_takes_plain_names(tmp_path: Path, run: Run) -> None:
    torch.save(full_state_dict(run), tmp_path / "f.pt")
    again = net(seed=1)
    ours = torch.optim.AdamW(grouped(again))
    sluice.load_optimizer(ours, tmp_path / "f.pt", model=under("module._orig_mod.", again))
    assert not differences(states_by_name(again, ours), states_by_name(*run))


@pytest.mark.parametrize("rename", RENAMES.values(), ids=RENAMES)
@pytest.mark.parametrize("form", ["nested", "flat"])
def test_rename(tmp_path: Path, run: Run, form: str, rename: Rename) -> None:
    options = StateDictOptions(flatten_optimizer_state_dict=form == "flat")
    state = get_optimizer_state_dict(under("old.", run[0]), run[1], options=options)
    path = save_distributed(tmp_path / "d", {"optim": state})
    with pytest.raises(MismatchError):
        fill(path)
    again, ours, report = fill(path, rename=rename)
    assert not differences(states_by_name(again, ours), states_by_name(*run))
    assert not report.unexpected


def test_dropped_names_are_not_unexpected(tmp_path: Path, run: Run) -> None:
    state = full_state_dict(run, "old.")
    state["state"]["old.more"] = {"exp_avg": torch.ones(2)}
    torch.save(state, tmp_path / "f.pt")
    assert fill(tmp_path / "f.pt", rename=[("^old[.]", "")])[2].unexpected == ("old.more",)

    def without(name: str) -> str | None:
        return None if name == "old.more" else name.removeprefix("old.")

    again, ours, report = fill(tmp_path / "f.pt", rename=without)
    assert report.unexpected == ()
    assert not differences(states_by_name(again, ours), states_by_name(*run))


def test_two_names_that_become_one_are_refused(tmp_path: Path, run: Run) -> None:
    torch.save(full_state_dict(run, "old."), tmp_path / "f.pt")
    with pytest.raises(MismatchError, match=r"rename gives 'old\.up\.weight' and 'old\.down\.weight' the same"):
        fill(tmp_path / "f.pt", rename={"old.up.weight": "up.weight", "old.down.weight": "up.weight"})


def test_param_names_are_renamed_too(tmp_path: Path) -> None:
    model = net()
    optimizer = torch.optim.AdamW([(f"old.{name}", p) for name, p in model.named_parameters()])
    train(model, optimizer, 2)
    torch.save(optimizer.state_dict(), tmp_path / "f.pt")
    again = net(seed=1)
    ours = torch.optim.AdamW(reversed(list(again.named_parameters())))
    report = sluice.load_optimizer(ours, tmp_path / "f.pt", rename=lambda name: name.removeprefix("old."))
    assert not differences(states_by_name(again, ours), states_by_name(model, optimizer))
    assert ours.param_groups[0]["param_names"] == [f"old.{name}" for name, _ in again.named_parameters()][::-1]
    assert any("param_names" in note for note in report.notes)


def test_param_names_that_are_not_one_for_each_parameter_do_not_count(tmp_path: Path) -> None:
    model, again = net(), net(seed=1)
    optimizer = torch.optim.AdamW(model.named_parameters())
    train(model, optimizer, 2)
    state = optimizer.state_dict()
    state["param_groups"][0]["param_names"] = [5, *reversed(state["param_groups"][0]["param_names"])]
    torch.save(state, tmp_path / "f.pt")
    ours = torch.optim.AdamW(again.named_parameters())
    sluice.load_optimizer(ours, tmp_path / "f.pt")
    assert not differences(states_by_name(again, ours), states_by_name(model, optimizer))


def test_numbers_have_nothing_to_rename(tmp_path: Path, run: Run) -> None:
    torch.save(run[1].state_dict(), tmp_path / "f.pt")
    with pytest.raises(MismatchError, match=re.escape("numbered, so rename= does not apply")):
        fill(tmp_path / "f.pt", rename={"a": "b"})


@pytest.mark.parametrize("missing", [0, 1, 2], ids=["both fit", "one fits", "none fits"])
def test_of_several_optimizers_the_one_that_fits(tmp_path: Path, run: Run, missing: int) -> None:
    other = torch.optim.SGD(run[0].up.parameters(), lr=0.1)
    for number, name in enumerate(("optimizer.bin", "optimizer_1.bin")):
        torch.save((other if number < missing else run[1]).state_dict(), tmp_path / name)
    if missing == 1:
        again, ours, report = fill(tmp_path)
        assert report.source == str(tmp_path / "optimizer_1.bin")
        assert not differences(states_by_name(again, ours), states_by_name(*run))
        return
    fit = "none of them fits" if missing else "several of them fit"
    with pytest.raises(MismatchError, match=f"more than one optimizer, and {fit}") as caught:
        fill(tmp_path)
    assert "optimizer_1.bin: " in str(caught.value)


KEYS = [
    *("state", "param_groups", "params", "param_names", "lr", "step", "exp_avg", "w", "b", "0", "1", 0, 1),
    *("state.w.exp_avg", "state.0.step", "state.", "state", "param_groups.0.params", "param_groups.0.params.1"),
    *("param_groups.w.lr", "param_groups.0.lr", "o.state.w.step", "o.param_groups.w.lr", ".state.0.x", "a.state"),
]

LEAVES = st.one_of(
    st.sampled_from([entry(()), entry((2,)), entry((3,))]),
    st.sampled_from([None, 0, 1, True, 0.5, "w", "b", "0", "", (), float("nan")]),
)

TREES = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.dictionaries(st.sampled_from(KEYS), inner, max_size=5),
        st.lists(inner, max_size=3),
        st.builds(lambda w, g: {"state": w, "param_groups": g}, inner, st.lists(inner, max_size=2)),
        st.builds(lambda p, n: {"params": p, "param_names": n}, inner, inner),
    ),
    max_leaves=12,
)


def outline(*, names: bool, groups: int, adapts: bool) -> OptimizerOutline:
    parameters = [ParameterOutline(names=(name,) if names else (), shape=(2,)) for name in ("w", "b")]
    together = (tuple(parameters),) if groups == 1 else ((parameters[0],), (parameters[1],))
    return OptimizerOutline(groups=together, kind="Own", adapts=adapts)


@given(tree=TREES, names=st.booleans(), groups=st.sampled_from([1, 2]), adapts=st.booleans())
@example(tree={"state": {}, "param_groups": [{"params": ["w", "w"]}]}, names=True, groups=1, adapts=False)
@example(tree={"state": {}, "param_groups": [{"params": [0, 0]}]}, names=False, groups=1, adapts=False)
def test_a_match_or_a_mismatch(tree: Any, names: bool, groups: int, adapts: bool) -> None:
    own = outline(names=names, groups=groups, adapts=adapts)
    for key in (None, "state", "param_groups"):
        try:
            found = find_state(tree, own, key=key, file="f")
        except MismatchError as error:
            assert str(error)
            assert error.file in {"f", None}
        else:
            assert adapts or [len(ids) for ids in found.ids] == [len(group) for group in own.groups]
            assert len(found.options) == len(found.ids)


@pytest.mark.parametrize(
    "tree",
    [
        {f"blocks.{i}.state.x{i}.w": entry(()) for i in range(20_000)},
        {"state." + "." * 4000 + str(i): 1 for i in range(50)},
        {f"state.{i}.exp_avg": 1 for i in range(20_000)},
        {"a": {f"o{i}": {"state": {}, "param_groups": [{"params": []}]} for i in range(10_000)}},
    ],
    ids=["prefixes", "dots", "numbers", "candidates"],
)
def test_large_trees_are_answered_in_bounded_work(tree: Any) -> None:
    with at_most(6_000_000), pytest.raises(MismatchError) as caught:
        find_state(tree, outline(names=True, groups=1, adapts=False), key=None, file="f")
    assert len(str(caught.value)) < 100_000
