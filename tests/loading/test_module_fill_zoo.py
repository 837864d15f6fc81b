"""``load_into`` against ``load_state_dict(torch.load())``, for every kind of module."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

import sluice
from support.module_zoo import ZOO, sample, trained
from support.oracles import bits, same


@pytest.fixture(autouse=True)
def _old_functions() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        warnings.filterwarnings("ignore", message=".*Lazy modules.*")
        yield


def build(name: str, how: str) -> nn.Module:
    torch.manual_seed(7)
    if how == "live":
        return ZOO[name][0]()
    with sluice.empty_init():
        return ZOO[name][0]()


def reference(name: str, file: Path) -> nn.Module:
    torch.manual_seed(7)
    module = ZOO[name][0]()
    module.load_state_dict(torch.load(file))
    return module


def flags(module: nn.Module) -> list[tuple[str, str, torch.dtype, tuple[int, ...], bool]]:
    tensors = [*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)]
    return [(name, type(t).__name__, t.dtype, t.stride(), t.requires_grad) for name, t in tensors]


def groups(module: nn.Module) -> list[list[str]]:
    """Return the names of each tensor object."""
    found: dict[int, list[str]] = {}
    for name, tensor in (
        *module.named_parameters(remove_duplicate=False),
        *module.named_buffers(remove_duplicate=False),
    ):
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


@pytest.mark.parametrize(("name", "how"), CASES)
def test_a_loaded_module_equals_that_of_load_state_dict(name: str, how: str, tmp_path: Path) -> None:
    torch.save(trained(name).state_dict(), tmp_path / "f.pth")
    expected = reference(name, tmp_path / "f.pth")
    module = build(name, how)
    held = [*module.parameters()]
    sluice.load_into(module, tmp_path / "f.pth")
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
