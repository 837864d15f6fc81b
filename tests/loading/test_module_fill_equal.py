"""``load_into`` against ``load_state_dict(torch.load())`` for every kind of module; ties and shared memory are kept."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch
from torch import nn

import sluice
from support.module_zoo import ZOO, sample, trained
from support.oracles import bits, same
from support.trained_net import load, problem, unchanged


def build(name: str, how: str) -> nn.Module:
    torch.manual_seed(7)
    with nullcontext() if how == "live" else sluice.empty_init():
        return ZOO[name][0]()


def named(module: nn.Module) -> list[tuple[str, torch.Tensor]]:
    return [*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)]


def flags(module: nn.Module) -> list[tuple[str, str, torch.dtype, tuple[int, ...], bool]]:
    return [(name, type(t).__name__, t.dtype, t.stride(), t.requires_grad) for name, t in named(module)]


def groups(module: nn.Module) -> list[list[str]]:
    """Return the names of each tensor object."""
    found: dict[int, list[str]] = {}
    for name, tensor in named(module):
        found.setdefault(id(tensor), []).append(name)
    return list(found.values())


def compare_outputs(module: nn.Module, expected: nn.Module, name: str) -> None:
    outputs = []
    for one in (module, expected):
        torch.manual_seed(3)
        outputs.append(torch.utils._pytree.tree_leaves(one(sample(name))))
    assert same(*outputs)


#: Modules whose constructors read values of parameters; see ``empty_init``.
NEEDS_VALUES = {"orthogonal"}

CASES = [(name, how) for name in ZOO for how in ("live", "empty") if how == "live" or name not in NEEDS_VALUES]


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore:.*Lazy modules.*")
@pytest.mark.parametrize(("name", "how"), CASES)
def test_a_loaded_module_equals_that_of_load_state_dict(name: str, how: str) -> None:
    state = trained(name).state_dict()
    expected, module = build(name, "live"), build(name, how)
    expected.load_state_dict(state)
    held = [*module.parameters()]
    load(module, state)
    assert all(one is other for one, other in zip(held, module.parameters(), strict=True))
    assert flags(module) == flags(expected)
    assert groups(module) == groups(expected)
    ours, theirs = dict(module.state_dict()), dict(expected.state_dict())
    assert same(ours, theirs)
    for (key, one), (_, other) in zip(module.named_buffers(), expected.named_buffers(), strict=True):
        assert bits(one) == bits(other), key
    if "pruned" not in name:  # modules with pruning cannot be copied, with torch's load either
        compare_outputs(copy.deepcopy(module), copy.deepcopy(expected), name)
    compare_outputs(module, expected, name)


class Tied(nn.Module):
    """An embedding, and a head that is tied to it in one of several ways."""

    def __init__(self, tie: Callable[[nn.Embedding, nn.Linear], None]) -> None:
        super().__init__()
        self.embedding = nn.Embedding(6, 4)
        self.head = nn.Linear(4, 6, bias=False)
        tie(self.embedding, self.head)


def by_object(embedding: nn.Embedding, head: nn.Linear) -> None:
    head.weight = embedding.weight


def by_data(embedding: nn.Embedding, head: nn.Linear) -> None:
    head.weight = nn.Parameter(embedding.weight.data)


def by_setting_data(embedding: nn.Embedding, head: nn.Linear) -> None:
    head.weight.data = embedding.weight.data


def by_frozen_data(embedding: nn.Embedding, head: nn.Linear) -> None:
    head.weight = nn.Parameter(embedding.weight.data, requires_grad=False)


TIES = [by_object, by_data, by_setting_data, by_frozen_data]
EMBEDDING, HEAD = "embedding.weight", "head.weight"


def tied(tie: Callable[[nn.Embedding, nn.Linear], None], *, empty: bool) -> Tied:
    with sluice.empty_init() if empty else nullcontext():
        return Tied(tie)


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
@pytest.mark.parametrize("empty", [False, True])
@pytest.mark.parametrize("names", [(EMBEDDING,), (HEAD,), (EMBEDDING, HEAD)])
@pytest.mark.parametrize("tie", TIES)
def test_ties_survive_whichever_name_the_checkpoint_has(
    tie: Callable[[nn.Embedding, nn.Linear], None], names: tuple[str, ...], empty: bool, dtype: torch.dtype | None
) -> None:
    values = torch.randn(6, 4)
    model = tied(tie, empty=empty)
    one, other = model.embedding.weight, model.head.weight
    report = load(model, {name: values.clone() for name in names}, dtype=dtype)
    assert model.embedding.weight is one
    assert model.head.weight is other
    assert (one is other) is (tie is by_object)
    assert one.data_ptr() == other.data_ptr()
    assert torch.equal(other, values.to(other.dtype))
    assert (one.requires_grad, other.requires_grad) == (True, tie is not by_frozen_data)
    assert report.tied == ((EMBEDDING, HEAD),)
    assert (report.missing, report.tensors, report.final_bytes) == ((), 1, one.nbytes)


@pytest.mark.parametrize("tie", TIES)
@pytest.mark.parametrize("empty", [False, True])
def test_conflicting_values_are_an_error_before_anything_changes(
    tie: Callable[[nn.Embedding, nn.Linear], None], empty: bool
) -> None:
    values = torch.randn(6, 4)
    state = {EMBEDDING: values, HEAD: values + 1}
    model = tied(tie, empty=empty)
    with unchanged(model), pytest.raises(sluice.MismatchError, match=f"'{EMBEDDING}' and '{HEAD}' are tied"):
        load(model, state)
    report = load(model, state, strict=False)
    assert torch.equal(model.head.weight, values)
    assert any(EMBEDDING in note and HEAD in note for note in report.notes)


def test_names_of_one_storage_are_not_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    values = torch.randn(6, 4)
    monkeypatch.setattr("sluice.loading.module_fill.same_values", pytest.fail)
    report = load(tied(by_object, empty=True), {EMBEDDING: values, HEAD: values})
    assert report.read_bytes == values.nbytes


def test_a_conflict_is_found_at_any_position_and_in_any_layout() -> None:
    values = torch.randn(4, 6).t()
    for row in range(6):
        changed = values.contiguous()
        changed[row, 3] += 1
        assert "are tied" in problem(tied(by_object, empty=True), {EMBEDDING: values, HEAD: changed})


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_tensors_that_overlap_without_being_the_same_are_refused(device: str) -> None:
    flat = torch.zeros(24, device=device)
    model = nn.ParameterDict({"flat": flat, "part": flat[8:16].view(2, 4)})
    text = problem(model, {"flat": torch.ones(24), "part": torch.zeros(2, 4)})
    assert "'flat' and 'part' overlap in memory" in text
