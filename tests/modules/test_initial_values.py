"""Tensors that are missing in the checkpoint, and refused swaps."""

from __future__ import annotations

import weakref

import torch
from torch import nn

from sluice.modules.swap import swap_data
from support.trained_net import empty, load, problem

# Missing tensors


def test_missing_tensors_on_meta_are_initialised_by_their_module() -> None:
    def build() -> nn.Module:
        return nn.Sequential(nn.Linear(30, 40), nn.BatchNorm1d(40), nn.Linear(40, 5))

    source = build()
    state_dict = {n: t for n, t in source.state_dict().items() if n not in {"0.bias", "1.weight", "1.running_var"}}
    module = empty(build)
    found = load(module, state_dict, strict=False, dtype="bfloat16")
    assert found.missing == ("0.bias", "1.weight", "1.running_var")
    assert torch.equal(module[0].weight, source.get_parameter("0.weight").bfloat16())
    assert 0 < module[0].bias.abs().max() <= 1 / 30**0.5
    assert torch.equal(module[1].running_var, torch.ones(40, dtype=torch.bfloat16))
    assert {t.dtype for t in module.parameters()} == {torch.bfloat16}
    assert all(p.requires_grad for p in module.parameters())


class Odd(nn.Module):
    """A module whose ``reset_parameters`` omits one tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(3))
        self.forgotten = nn.Parameter(torch.zeros(3))

    def reset_parameters(self) -> None:
        nn.init.ones_(self.weight)


class Failing(Odd):
    def reset_parameters(self) -> None:
        raise ValueError("no data")


def test_what_reset_parameters_leaves_out_or_fails_on_is_named_and_nothing_changes() -> None:
    assert "'forgotten'" in problem(empty(Odd), {"weight": torch.ones(3)}, strict=False)
    assert "Failing" in problem(empty(Failing), {"weight": torch.ones(3)}, strict=False)
    module = empty(Odd)
    load(module, {"forgotten": torch.ones(3)}, strict=False)
    assert torch.equal(module.weight, torch.ones(3))


def test_reset_parameters_is_not_run_if_it_would_overwrite_live_tensors() -> None:
    module = empty(lambda: nn.Linear(2, 2))
    module.weight = nn.Parameter(torch.full((2, 2), 7.0))
    assert "reset_parameters" in problem(module, {"weight": torch.zeros(2, 2)}, strict=False)
    assert torch.equal(module.weight, torch.full((2, 2), 7.0))


# Swapping


def test_a_swap_is_refused_without_a_trace() -> None:
    parameter = nn.Parameter(torch.empty(2, device="meta"))
    parameter.mark = 1  # type: ignore[attr-defined]
    reference = weakref.ref(parameter)
    assert not swap_data(parameter, torch.ones(2))
    assert parameter.is_meta
    assert vars(parameter) == {"mark": 1}
    assert reference() is parameter
    del reference
    assert swap_data(parameter, torch.ones(2))
    assert torch.equal(parameter.detach(), torch.ones(2))
    assert vars(parameter) == {"mark": 1}
