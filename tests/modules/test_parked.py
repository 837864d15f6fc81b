"""Parameters that are not in memory."""

from __future__ import annotations

import copy
import pickle
from contextlib import nullcontext

import pytest
import safetensors.torch
import torch
from torch import nn

from sluice._errors import StreamError
from sluice.modules.unloaded import Guard, ParkedParameter


def _parked() -> ParkedParameter:
    return ParkedParameter.of(nn.Parameter(torch.empty(3, 2, dtype=torch.bfloat16, device="meta")), "a.weight", "cpu")


def test_it_answers_what_it_is() -> None:
    parked = _parked()
    assert isinstance(parked, nn.Parameter)
    assert (parked.shape, parked.dtype, parked.device) == ((3, 2), torch.bfloat16, torch.device("cpu"))
    assert (parked.numel(), parked.element_size(), parked.nbytes, parked.requires_grad) == (6, 2, 12, True)
    assert parked.is_floating_point()
    assert not parked.is_meta
    assert "a.weight" in repr(parked)
    assert hash(parked) == hash(parked)


def test_operations_borrow_the_weights() -> None:
    parked, weights = _parked(), torch.ones(3, 2, dtype=torch.bfloat16)
    parked.lend = lambda: nullcontext(weights)
    assert torch.equal(torch.stack([parked, parked])[1] + parked, 2 * weights)
    assert parked[1:].shape == (2, 2)
    assert torch.equal(parked.detach() + 0, weights)
    assert isinstance(parked.detach(), ParkedParameter)  # as in state dicts


@pytest.mark.parametrize(
    "change",
    [
        lambda parked: parked.detach_(),
        lambda parked: parked.__setitem__(0, 1),
        lambda parked: parked.__iadd__(1),
        lambda parked: setattr(parked, "data", torch.ones(3, 2)),
        lambda parked: torch.add(1, 1, out=parked),
    ],
)
def test_it_cannot_be_changed(change: object) -> None:
    parked = _parked()
    with pytest.raises(StreamError, match="change its weights"):
        change(parked)  # type: ignore[operator]


def test_it_is_neither_copied_nor_pickled_nor_used_later() -> None:
    parked = _parked()
    for use in (copy.deepcopy, pickle.dumps, torch.Tensor.sum):
        with pytest.raises(StreamError, match=r"a\.weight"):
            use(parked)


def test_a_guarded_module_refuses_what_needs_all_weights_and_keeps_the_rest() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    original = model[1].weight
    model[1].weight = ParkedParameter.of(nn.Parameter(torch.empty(2, 2, device="meta")), "1.weight", "cpu")
    guard = Guard(model)
    for refused in (
        model.half,
        lambda: model.load_state_dict({"1.weight": torch.ones(2, 2)}),
        lambda: pickle.dumps(model.state_dict()),
        lambda: copy.deepcopy(model[1].state_dict()),
        lambda: safetensors.torch.save(model.state_dict()),
        lambda: model.to("meta"),
        lambda: copy.deepcopy(model),
        lambda: pickle.dumps(model),
    ):
        with pytest.raises(StreamError):
            refused()
    assert model.to("cpu", torch.float32) is model  # as training loops do
    model.load_state_dict({"0.bias": torch.ones(2)}, strict=False)  # weights that are in memory
    assert model[0].weight.dtype == torch.float32
    assert model[0].double().weight.dtype == torch.float64  # its weights are in memory
    guard.remove()
    model[1].weight = original
    assert copy.deepcopy(model).half().state_dict()["1.weight"].dtype == torch.float16
