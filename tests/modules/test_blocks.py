"""The blocks of modules, found by their structure."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

from sluice.modules.blocks import find_blocks, smallest_blocks
from support.streamed_models import Experts, Layers


def _paths(module: nn.Module, patterns: list[str] | None = None) -> list[str]:
    return [block.path for block in find_blocks(module, patterns)]


def test_members_of_lists_and_other_modules_with_parameters_are_blocks() -> None:
    assert _paths(Layers(count=2)) == ["embedding", "layers.0", "layers.1", "head"]


def test_lists_inside_a_block_have_blocks_of_their_own_but_not_a_sequential() -> None:
    model = nn.Sequential(nn.Sequential(nn.Linear(2, 2)), Experts())
    found = {block.path: block for block in find_blocks(model)}
    assert [*found][:3] == ["0.0", "1", "1.layers.0"]
    assert "1.layers.0.experts.3" in found
    nested = found["1.layers.0.experts.3"]
    assert nested.optional
    assert nested.group == "1.layers.0.experts"
    linear = nn.Linear(2, 2)
    assert _paths(nn.ModuleList([nn.Sequential(nn.Sequential(linear))])) == ["0"]
    assert _paths(nn.Sequential(nn.Sequential(linear, nn.Linear(2, 2)))) == ["0.0", "0.1"]


def test_blocks_can_be_named() -> None:
    assert _paths(Layers(count=2), ["layers.*"])[1:3] == ["layers.0", "layers.1"]
    assert [block.path for block in find_blocks(Layers(count=2), ["layers"])] == ["embedding", "layers", "head"]
    with pytest.raises(ValueError, match=r"no module 'blocks.\*'"):
        find_blocks(Layers(count=2), ["blocks.*"])


def test_parts_whose_weights_are_used_without_a_call_stay_together() -> None:
    model = nn.Module()
    model.attention = nn.MultiheadAttention(4, 2)
    model.normed = parametrizations.weight_norm(nn.Linear(2, 2))
    model.rnn = nn.LSTM(2, 2)
    assert [block.path for block in smallest_blocks(model)] == ["attention", "normed", "rnn"]


def test_a_module_that_occurs_twice_is_one_block() -> None:
    shared = nn.Linear(2, 2)
    assert _paths(nn.ModuleList([shared, nn.Linear(2, 2), shared])) == ["0", "1"]


def test_own_parameters_of_an_outer_module_make_it_a_block() -> None:
    model = Layers(count=1)
    model.scale = nn.Parameter(torch.ones(3))
    found = find_blocks(model)
    assert [block.path for block in found] == ["", "embedding", "layers.0", "head"]
    assert not any(block.optional for block in found)
