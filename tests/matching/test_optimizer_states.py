"""The state of a checkpoint that fits an optimizer, by number and by name, and errors if there is none."""

from __future__ import annotations

import argparse
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict

import sluice
from sluice import MismatchError, UnsafeContentError
from support.distributed import save as save_distributed
from support.training_runs import KINDS, Net, differences, grouped, net, states_by_name, stopped, train

FLAT = StateDictOptions(flatten_optimizer_state_dict=True)


def adamw(model: nn.Module, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(grouped(model), **options)


Run = tuple[Net, torch.optim.Optimizer]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    model = net()
    optimizer = adamw(model)
    train(model, optimizer, 3)
    return model, optimizer


def write(path: Path, content: object) -> Path:
    torch.save(content, path)
    return path


def refusal(path: Path, optimizer: torch.optim.Optimizer, **how: Any) -> str:
    """Return the error text of a refused load; check that the optimizer is unchanged."""
    before = repr(optimizer.state_dict())
    with pytest.raises(MismatchError) as caught:
        sluice.load_optimizer(optimizer, path, **how)
    assert repr(optimizer.state_dict()) == before
    assert caught.value.file == str(path)
    return str(caught.value)


@pytest.mark.parametrize("form", ["nested", "flat", "nested in a file", "flat in a file"])
def test_state_by_name_is_matched_by_name(tmp_path: Path, run: Run, form: str) -> None:
    model, optimizer = run
    state: Any = get_optimizer_state_dict(model, optimizer, options=FLAT if "flat" in form else None)
    if "file" in form:
        path = write(tmp_path / "o.pt", {"optim": state})
    else:
        path = save_distributed(tmp_path / "d", {"optim": state, "model": model.state_dict()})
    again = net(seed=1)
    ours = torch.optim.AdamW([{**group, "params": group["params"][::-1]} for group in grouped(again)], lr=0.5)
    report = sluice.load_optimizer(ours, path, model=again)
    assert report.key == "optim"
    assert not differences(states_by_name(again, ours), states_by_name(model, optimizer))
    for one, other in zip(ours.param_groups, optimizer.param_groups, strict=True):
        assert not differences({**one, "params": None}, {**other, "params": None})
    names = {row.name for row in report.table()}
    assert "state.up.weight.exp_avg" in names


def test_numbers_in_a_distributed_checkpoint(tmp_path: Path, run: Run) -> None:
    model, optimizer = run
    path = save_distributed(tmp_path / "d", {"optimizer": optimizer.state_dict(), "model": model.state_dict()})
    ours = adamw(net(seed=1))
    assert sluice.load_optimizer(ours, path).key == "optimizer"
    assert not differences(ours.state_dict(), optimizer.state_dict())


def test_wrapped_and_tied_names(tmp_path: Path) -> None:
    def tied() -> Any:
        made: Any = nn.Sequential(OrderedDict(wte=nn.Linear(6, 6, bias=False), head=nn.Linear(6, 6, bias=False)))
        made.head.weight = made.wte.weight
        return made

    model = tied()
    optimizer = torch.optim.AdamW(model.parameters())
    train(model, optimizer, 2)
    values = optimizer.state[model.wte.weight]
    group = {**optimizer.defaults, "lr": 0.5, "params": ["module._orig_mod.head.weight"]}
    path = write(tmp_path / "f.pt", {"state": {"module._orig_mod.head.weight": values}, "param_groups": [group]})
    again = tied()
    ours = torch.optim.AdamW(again.parameters())
    report = sluice.load_optimizer(ours, path, model=again)
    assert report.key is None
    assert not differences(ours.state[again.wte.weight], values)


def test_other_names_are_matched_by_position_as_torch_does(tmp_path: Path) -> None:
    model = net()
    optimizer = torch.optim.AdamW(model.named_parameters())
    train(model, optimizer, 2)
    path = write(tmp_path / "f.pt", optimizer.state_dict())
    ours, theirs = (torch.optim.AdamW([(f"new.{n}", p) for n, p in net().named_parameters()]) for _ in range(2))
    theirs.load_state_dict(torch.load(path))
    sluice.load_optimizer(ours, path)
    assert not differences(ours.state_dict(), theirs.state_dict())


def test_groups_that_differ_are_refused(tmp_path: Path, run: Run) -> None:
    path = write(tmp_path / "f.pt", {"optimizer": run[1].state_dict()})
    assert "2 in the checkpoint, 1 in the optimizer" in refusal(path, KINDS["AdamW"](net()))
    model = net()
    first, *rest = model.parameters()
    assert "group 0 has a different size: 3 in the checkpoint, 1 in the" in refusal(
        path, torch.optim.AdamW([{"params": [first]}, {"params": rest}])
    )


def test_state_of_a_different_shape_is_refused(tmp_path: Path) -> None:
    stopped(tmp_path / "run.pt", KINDS["SGD momentum"])
    model = net()
    ours = torch.optim.SGD(reversed(list(model.parameters())), lr=0.1, momentum=0.9)
    text = refusal(tmp_path / "run.pt", ours)
    assert "'momentum_buffer' of parameter 4 is [6, 10] in the checkpoint, the parameter is [3]" in text


def test_names_need_a_model(tmp_path: Path, run: Run) -> None:
    state = get_optimizer_state_dict(*run)
    path = write(tmp_path / "f.pt", state)
    assert "pass model=" in refusal(path, adamw(net()))
    again = net(seed=1)
    ours = torch.optim.AdamW([{**group, "params": named(again, group["params"])} for group in grouped(again)])
    sluice.load_optimizer(ours, path)  # its groups are named
    assert not differences(states_by_name(again, ours), states_by_name(*run))


def named(model: nn.Module, parameters: list[nn.Parameter]) -> list[tuple[str, nn.Parameter]]:
    names = {id(p): name for name, p in model.named_parameters()}
    return [(names[id(p)], p) for p in parameters]


@pytest.mark.parametrize("flat", [False, True])
def test_names_that_are_missing_are_refused_and_extra_ones_reported(tmp_path: Path, run: Run, flat: bool) -> None:
    model, optimizer = run
    path = write(tmp_path / "f.pt", get_optimizer_state_dict(model, optimizer, options=FLAT if flat else None))
    larger = nn.ModuleDict({"up": nn.Linear(6, 10), "new": nn.Linear(2, 2)})
    with pytest.raises(MismatchError, match=r"it has no state for 'new\.weight'") as caught:
        sluice.load_optimizer(torch.optim.AdamW(larger.parameters()), path, model=larger)
    assert caught.value.missing == ("'new.weight'", "'new.bias'")
    up = nn.Linear(6, 10)
    part = nn.ModuleDict({"up": up})
    groups: list[dict[str, Any]] = [{"params": [up.weight]}, {"params": [up.bias]}]
    ours = torch.optim.AdamW(groups)
    report = sluice.load_optimizer(ours, path, model=part)
    assert set(report.unexpected) == {name for name, _ in model.named_parameters()} - {"up.weight", "up.bias"}
    assert not differences(ours.state[up.bias], optimizer.state[model.up.bias])
    assert ours.param_groups[1]["lr"] == 0.03


def test_groups_of_names_have_to_be_the_same_sets(tmp_path: Path, run: Run) -> None:
    nested = write(tmp_path / "f.pt", get_optimizer_state_dict(*run))
    model = net()
    one = torch.optim.AdamW(model.parameters())
    assert "the parameters of group 0 " in refusal(nested, one, model=model)
    parameters = list(model.parameters())
    three = [{"params": grouped(model)[0]["params"][:1]}, {"params": grouped(model)[0]["params"][1:]}]
    rest = [p for p in parameters if p.dim() <= 1]
    split = torch.optim.AdamW([*three, {"params": rest}])
    assert "groups 0 and 1 are one group, 0, of the checkpoint" in refusal(nested, split, model=model)
    flat = write(tmp_path / "flat.pt", get_optimizer_state_dict(*run, options=FLAT))
    assert "differ in 'weight_decay'" in refusal(flat, one, model=model)


def test_candidates_are_listed(tmp_path: Path, run: Run) -> None:
    _, optimizer = run
    other = torch.optim.AdamW(adamw(net()).param_groups)
    content = {"opt": [optimizer.state_dict(), other.state_dict()], "small": KINDS["SGD"](net()).state_dict()}
    path = write(tmp_path / "f.pt", content)
    text = refusal(path, adamw(net()))
    assert "choose one (2)" in text
    assert "key='opt.0': 6 parameters in 2 groups, 12 tensors" in text
    assert "key='opt.1'" in text
    ours = adamw(net())
    assert sluice.load_optimizer(ours, path, key="opt.0").key == "opt.0"
    assert not differences(ours.state_dict(), optimizer.state_dict())
    assert sluice.load_optimizer(KINDS["SGD"](net()), path).key == "small"  # the only parameter of its size
    assert "none of these (3)" in refusal(path, torch.optim.SGD(net().up.parameters()))


def test_one_object_at_two_places_is_one_candidate(tmp_path: Path, run: Run) -> None:
    state = run[1].state_dict()
    path = write(tmp_path / "f.pt", {"optimizer": state, "best": {"optimizer": state}})
    assert sluice.load_optimizer(adamw(net()), path).key == "optimizer"


def test_values_that_are_not_an_optimizer(tmp_path: Path, run: Run) -> None:
    state = run[1].state_dict()["state"]  # without groups
    path = write(
        tmp_path / "f.pt", {"model": run[0].state_dict(), "state": {"x": {"y": 1}}, "optimizer": {"state": state}}
    )
    assert "holds no optimizer state" in refusal(path, adamw(net()))
    assert "not an optimizer state" in refusal(path, adamw(net()), key="model")
    with pytest.raises(MismatchError, match="nothing at key"):
        sluice.load_optimizer(adamw(net()), path, key="optim")


@pytest.mark.parametrize(
    "state",
    [
        {"state": {}, "param_groups": [{"params": [[0]]}]},
        {"state": {}, "param_groups": [{"params": {"a": 1}}, 3]},
        {"state": [], "param_groups": [{"params": [0]}]},
        {"state": {0: 3}, "param_groups": [{}]},
        {"state.": torch.ones(1), "param_groups.": torch.ones(1)},
        {"state.0.x": torch.ones(1), "param_groups.0.params.99999": 3},
        {"state.0.x": torch.ones(1), "param_groups.a.params": [1], "param_groups.0.params.0": "x"},
        {".state.0.x": torch.ones(1)},
        {"a..state.b.x": torch.ones(1), "a..param_groups.b.lr": 1},
        {"state": {(1, 2): {"x": torch.ones(1)}}, "param_groups": [{"params": [0]}]},
    ],
    ids=repr,
)
def test_odd_states_are_refused_with_a_mismatch(tmp_path: Path, state: Any) -> None:
    path = write(tmp_path / "f.pt", state)
    for kind in (adamw, KINDS["AdamW"]):
        with pytest.raises((MismatchError, sluice.CheckpointError)):
            sluice.load_optimizer(kind(net()), path, model=net())


def test_code_in_the_state_is_refused_but_elsewhere_it_is_not(tmp_path: Path, run: Run) -> None:
    state = run[1].state_dict()
    path = write(tmp_path / "f.pt", {"optimizer": state, "args": argparse.Namespace(lr=1)})
    assert sluice.load_optimizer(adamw(net()), path).tensors == 12
    state["param_groups"][0]["schedule"] = argparse.Namespace(lr=1)
    with pytest.raises(UnsafeContentError, match="only running code"):
        sluice.load_optimizer(adamw(net()), write(tmp_path / "g.pt", {"optimizer": state}))


def test_a_pre_hook_may_adapt_what_does_not_fit(tmp_path: Path, run: Run) -> None:
    _, optimizer = run
    path = write(tmp_path / "f.pt", optimizer.state_dict())
    ours = KINDS["AdamW"](net())
    with pytest.raises(MismatchError):
        sluice.load_optimizer(ours, path)

    def join(_: torch.optim.Optimizer, state: dict[str, Any]) -> dict[str, Any]:
        first, second = state["param_groups"]
        both = [*first["params"], *second["params"]]
        return {**state, "param_groups": [{**first, "params": [both[i] for i in (0, 3, 1, 4, 2, 5)]}]}

    handle = ours.register_load_state_dict_pre_hook(join)
    done: list[torch.optim.Optimizer] = []
    ours.register_load_state_dict_post_hook(done.append)
    sluice.load_optimizer(ours, path)
    assert done == [ours]
    assert len(ours.state) == 4
    handle.remove()
    ours.register_load_state_dict_pre_hook(lambda _, state: state)
    with pytest.raises(MismatchError, match="different number of parameter groups"):
        sluice.load_optimizer(ours, path)
    assert len(ours.state) == 4


def test_accelerates_wrapper_is_looked_through(tmp_path: Path, run: Run) -> None:
    accelerate = pytest.importorskip("accelerate", reason="accelerate is not installed")
    path = write(tmp_path / "f.pt", OrderedDict(run[1].state_dict()))
    inner = adamw(net())
    sluice.load_optimizer(accelerate.Accelerator(cpu=True).prepare_optimizer(inner), path)
    assert not differences(inner.state_dict(), run[1].state_dict())


def test_the_tensors_of_the_state_are_counted(tmp_path: Path, run: Run) -> None:
    path = write(tmp_path / "f.pt", {"optimizer": run[1].state_dict()})
    report = sluice.load_optimizer(adamw(net()), path)
    assert str(report).startswith(f"loaded 12 of 12 tensors of the optimizer state from {path} (torch-zip, key ")
    assert (report.subject, report.loaded, report.total) == ("optimizer state", 12, 12)
    names: dict[str, Any] = get_optimizer_state_dict(*run)
    names["state"]["gone"] = {"exp_avg": torch.ones(2)}
    model = net()
    report = sluice.load_optimizer(adamw(model), write(tmp_path / "g.pt", names), model=model)
    assert (report.loaded, report.total) == (12, 13)


def test_state_of_which_nothing_is_used_is_refused(tmp_path: Path, run: Run) -> None:
    state: dict[str, Any] = run[1].state_dict()
    state["state"] = {number + 100: values for number, values in state["state"].items()}
    text = refusal(write(tmp_path / "f.pt", state), adamw(net()))
    assert "none of its 12 tensors belongs to a parameter" in text


def test_state_without_tensors_is_complete(tmp_path: Path) -> None:
    model = net()
    plain = torch.optim.SGD(model.parameters(), lr=0.25)
    train(model, plain, 2)
    path = write(tmp_path / "f.pt", plain.state_dict())
    ours = torch.optim.SGD(net().parameters(), lr=1.0)
    report = sluice.load_optimizer(ours, path)
    assert (report.loaded, report.total) == (0, 0)
    assert ours.param_groups[0]["lr"] == 0.25
