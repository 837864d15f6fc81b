"""Real models: tensors are filled in place, and failures name what they changed.

``load_into`` against ``load_state_dict(torch.load())`` for every kind of module; ties and shared memory are kept.
"""

from __future__ import annotations

import copy
import errno
from collections.abc import Callable
from contextlib import nullcontext
from itertools import chain, repeat
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

import sluice
from sluice.engine import targets as engine_targets
from sluice.engine.host_memory import HostMemory
from sluice.loading.module_fill import partial_load
from support.module_zoo import ZOO, sample, trained
from support.oracles import bits, same
from support.system_calls import Injection, failing
from support.trained_net import empty, load, problem, unchanged


def holds(tensor: torch.Tensor) -> nn.Module:
    """Return a module with the tensor as its only parameter."""
    module = nn.Module()
    module.weight = nn.Parameter(tensor, requires_grad=tensor.is_floating_point())
    return module


LAYOUTS: dict[str, Callable[[], torch.Tensor]] = {
    "contiguous": lambda: torch.zeros(6, 4),
    "transposed": lambda: torch.zeros(4, 6).t(),
    "channels last": lambda: torch.zeros(6, 4, 2, 2).to(memory_format=torch.channels_last),
    "every second column": lambda: torch.zeros(6, 8)[:, ::2],
    "a slice with an offset": lambda: torch.zeros(10, 4)[2:8],
    "permuted with a gap": lambda: torch.zeros(4, 9, 6)[:, 1:3].permute(2, 0, 1),
    "a scalar": lambda: torch.zeros(()),
    "empty": lambda: torch.zeros(0, 4),
    "one row of many": lambda: torch.zeros(5, 24)[3].view(6, 4),
    "integers": lambda: torch.zeros(6, 4, dtype=torch.int16).t(),
}


@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_is_filled_in_place(layout: str, dtype: torch.dtype, inference: bool) -> None:
    with torch.inference_mode(inference):
        module = holds(LAYOUTS[layout]())
    weight = module.get_parameter("weight")
    before = (id(weight), weight.data_ptr(), weight.stride(), weight.is_inference())
    values = torch.randn(weight.shape)
    values = values.to(dtype) if weight.is_floating_point() else (values * 100).to(weight.dtype)
    load(module, {"weight": values})
    weight = module.get_parameter("weight")
    assert (id(weight), weight.data_ptr(), weight.stride(), weight.is_inference()) == before
    assert bits(weight) == bits(values.to(weight.dtype))


def test_bytes_next_to_a_view_are_not_changed() -> None:
    base = torch.full((6, 8), 7.0)
    load(holds(base[:, ::2]), {"weight": torch.randn(6, 4)})
    assert bool((base[:, 1::2] == 7).all())
    assert not bool((base[:, ::2] == 7).any())


def test_a_parameter_of_a_different_dtype_trains_without_its_old_gradient() -> None:
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.ones(2, 4)).sum().backward()
    load(model, model.state_dict(), dtype=torch.bfloat16)
    assert model.weight.grad is None
    model(torch.ones(2, 4, dtype=torch.bfloat16)).sum().backward()
    optimizer.step()
    assert model.weight.dtype == torch.bfloat16


def test_frozen_parameters_and_inference_tensors_of_a_different_dtype() -> None:
    source = nn.Linear(4, 4)
    for inference in (False, True):
        with torch.inference_mode(inference):
            model = nn.Linear(4, 4).requires_grad_(False)
        weight = model.weight
        load(model, source.state_dict(), dtype=torch.bfloat16)
        assert model.weight is weight
        assert not weight.requires_grad
        assert bits(weight) == bits(source.weight.bfloat16())


def many(count: int = 6) -> nn.Module:
    """Return a module with small and large tensors, several in each of several blocks."""
    return nn.Sequential(*(nn.Linear(600, 600) for _ in range(count)))


REFUSED = sluice.BudgetError("the operating system refuses memory", found="1 GiB")


def plant(patch: pytest.MonkeyPatch, fault: str, k: int) -> Callable[[], bool]:
    """Let the k-th read or allocation fail; return what tells whether there was one."""
    if fault == "read":
        injection = Injection(patch, failing(errno.EIO), k)
        return lambda: injection.hits > 0
    effects = chain(repeat(mock.DEFAULT, k - 1), [REFUSED], repeat(mock.DEFAULT))
    patch.setattr(engine_targets, "HostMemory", planted := mock.Mock(wraps=HostMemory, side_effect=effects))
    return lambda: planted.call_count >= k


@pytest.mark.parametrize("live", [False, True], ids=["meta", "live"])
@pytest.mark.parametrize("fault", ["allocation", "read"])
def test_whatever_fails_meta_models_stay_on_meta_and_live_ones_are_described(
    live: bool, fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = many()
    torch.save(source.state_dict(), tmp_path / "f.pth")
    state = {name: tensor.bfloat16() for name, tensor in source.state_dict().items()}
    partial = 0
    for k in range(1, 100):
        model = many() if live else empty(many)
        before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        with monkeypatch.context() as patch:
            planted = plant(patch, fault, k)
            try:
                sluice.load_into(model, tmp_path / "f.pth", dtype=torch.bfloat16)
            except (sluice.BudgetError, sluice.ReadError):
                assert all(tensor.is_meta != live for tensor in model.state_dict().values())
                if live:
                    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
                continue
            except sluice.PartialLoadError as error:
                assert live
                assert isinstance(error.__cause__, sluice.BudgetError if fault == "allocation" else sluice.ReadError)
                ours: dict[str, Any] = dict(model.state_dict())
                assert error.torn == ()
                assert all(torch.equal(ours[name], state[name]) for name in error.done)
                assert all(torch.equal(ours[name], before[name]) for name in error.untouched)
                assert {*error.done, *error.untouched} == before.keys()
                partial += 1
                continue
        assert not planted()
        assert k > 6
        assert bool(partial) == live
        assert all(torch.equal(tensor, state[name]) for name, tensor in model.state_dict().items())
        return
    pytest.fail("the load never succeeded")


def test_when_memory_for_staging_is_refused_nothing_is_touched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sluice.engine.running_plan.HostMemory", mock.Mock(side_effect=REFUSED))
    monkeypatch.setattr("sluice.engine.running_plan._HEAP_BYTES", 0)
    model = many(1)
    with unchanged(model), pytest.raises(sluice.BudgetError):
        load(model, many(1).state_dict(), dtype=torch.bfloat16)


class _Name(str):
    """A name that counts how often it is hashed."""

    __slots__ = ()
    hashed = 0

    def __hash__(self) -> int:
        _Name.hashed += 1
        return super().__hash__()


def test_work_to_name_what_changed_is_proportional_to_the_names() -> None:
    slots = [SimpleNamespace(names=[_Name(number)]) for number in range(100)]
    job: Any = SimpleNamespace(
        match=SimpleNamespace(slots=range(100)),
        requests=[SimpleNamespace(existing=True)] * 100,
        state=SimpleNamespace(outline=SimpleNamespace(slots=slots), tensors=[torch.zeros(1)] * 100),
    )
    error = partial_load(job, range(50, 60), range(50))
    assert error is not None
    assert error.untouched == tuple(map(str, range(60, 100)))
    assert _Name.hashed <= 200


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
