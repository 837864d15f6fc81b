"""Modules after installing finished tensors and initial values, compared with load_state_dict."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable

import pytest
import torch
from torch import nn

from sluice.modules.empty_init import empty_init
from support.trained_net import TOKENS, Net, assert_equal, empty, load, problem, trained


def test_hooks_attributes_modes_and_subclasses_survive() -> None:
    class Marked(nn.Parameter):
        pass

    module = empty(lambda: nn.Linear(2, 2))
    with empty_init():
        module.bias = Marked(torch.empty(2))
    calls: list[str] = []
    weight = module.weight
    handle = weight.register_hook(lambda _: calls.append("gradient"))
    weight.register_post_accumulate_grad_hook(lambda _: calls.append("accumulated"))
    weight.no_decay = True
    module.register_forward_hook(lambda *_: calls.append("forward"))
    module.eval()
    load(module, nn.Linear(2, 2).state_dict())
    module(torch.ones(2)).sum().backward()
    assert calls == ["forward", "gradient", "accumulated"]
    assert module.weight is weight
    assert weight.no_decay
    assert weight.grad is not None
    assert type(module.bias) is Marked
    assert not module.training
    handle.remove()
    module(torch.ones(2)).sum().backward()
    assert calls[3:] == ["forward", "accumulated"]


def test_a_parameter_held_by_a_weak_reference_is_replaced_everywhere_and_named() -> None:
    module = empty()
    held = module.embedding.weight
    held.no_decay = True
    reference = weakref.ref(held)
    source = trained()
    replaced = load(module, source.state_dict()).replaced
    assert replaced == ("embedding.weight",)
    assert (held.is_meta, vars(held)) == (True, {"no_decay": True})  # unchanged
    assert reference() is held is not module.embedding.weight
    assert module.head.weight is module.embedding.weight
    assert module.head.weight.no_decay
    assert_equal(module, source)


def test_what_is_replaced_is_replaced_in_attributes_too() -> None:
    class Listing(nn.Linear):
        def __init__(self) -> None:
            super().__init__(2, 2)
            self.held = [self.weight, 1]
            self.named = {"w": self.weight}
            self.pair = (self.weight, self.bias)
            self._flat_weights_names = ["weight"]  # a name of torch's recurrent layers, without their list

    with empty_init():
        module = Listing()
    reference = weakref.ref(module.weight)
    replaced = load(module, nn.Linear(2, 2).state_dict()).replaced
    assert replaced == ("weight",)
    assert reference() is None  # there is no reference to the meta parameter left
    assert module.weight is module.held[0]
    assert module.weight is module.named["w"] is module.pair[0]
    assert module.pair[1] is module.bias


def test_a_buffer_with_a_view_is_replaced_everywhere_and_named() -> None:
    module = empty()
    view = module.first.mask[:2]
    replaced = load(module, trained().state_dict()).replaced
    assert replaced == ("first.mask",)
    assert module.again.mask is module.first.mask
    assert not module.first.mask.is_meta
    assert view.is_meta


@pytest.mark.parametrize("held", [False, True])
def test_recurrent_layers_keep_their_lists_of_weights(held: bool) -> None:
    torch.manual_seed(0)
    source = nn.LSTM(3, 4, num_layers=2)
    module = empty(lambda: nn.LSTM(3, 4, num_layers=2))
    weights = [*module.parameters()]
    references = [weakref.ref(weight) for weight in weights if held]
    replaced = load(module, source.state_dict()).replaced
    assert len(replaced) == len(references)  # hooks of torch's own layers do not count
    assert [one is other for one, other in zip(module.parameters(), weights, strict=True)] == [not held] * 8
    assert all(one is other for one, other in zip(module._flat_weights, module.parameters(), strict=True))
    assert not module._weights_have_changed()
    x = torch.randn(5, 1, 3)
    assert torch.equal(module(x)[0], source(x)[0])
    assert_equal(copy.deepcopy(module), source)


def test_autograd_notices_a_load_between_forward_and_backward_and_gradients_stay() -> None:
    module = nn.Linear(2, 2)
    module.weight.grad = gradient = torch.ones(2, 2)
    loss = module(torch.ones(2, requires_grad=True)).sum() * module.weight.prod()
    load(module, nn.Linear(2, 2).state_dict())
    assert module.weight.grad is gradient
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_loading_works_inside_inference_mode() -> None:
    module = empty()
    with torch.inference_mode():
        load(module, {n: t for n, t in trained().state_dict().items() if n != "layers.1.bias"}, strict=False)
    assert not any(t.is_inference() for t in (*module.parameters(), *module.buffers()))
    assert_equal(module, trained())


@pytest.mark.gpu
def test_a_device_is_given_to_everything_the_forward_pass_needs(device: str) -> None:
    module = Net()
    objects = [*module.parameters(), *module.buffers()]
    partial = {name: t for name, t in trained().state_dict().items() if not name.startswith("layers")}
    load(module, partial, device=device, strict=False)
    assert all(one is other for one, other in zip(objects, (*module.parameters(), *module.buffers()), strict=True))
    assert {t.device for t in objects} == {torch.device(device)}
    module(TOKENS.to(device))


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
    module.weight = nn.Parameter(torch.empty(3, device="meta"))  # the other one has values, which it might change
    assert "'weight'" in problem(module, {"forgotten": torch.ones(3)}, strict=False)


class FromValues(Odd):
    """Computes a tensor that the checkpoint lacks from one that it has."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("live", torch.ones(3), persistent=False)

    def reset_parameters(self) -> None:
        self.forgotten.data = self.weight.data * 2


class AsParameter(FromValues):
    def reset_parameters(self) -> None:
        self.forgotten = nn.Parameter(self.weight * 2)


class AsBuffer(FromValues):
    def reset_parameters(self) -> None:
        nn.init.ones_(self.forgotten)
        self.get_buffer("live").data = self.weight.data * 2


class OtherBuffer(FromValues):
    def reset_parameters(self) -> None:
        nn.init.ones_(self.forgotten)
        self.live = self.weight.data * 2


@pytest.mark.parametrize("build", [FromValues, AsParameter, AsBuffer, OtherBuffer])
def test_reset_parameters_that_needs_values_of_the_checkpoint_is_refused(build: Callable[[], FromValues]) -> None:
    module = empty(build)
    assert "reset_parameters()" in problem(module, {"weight": torch.ones(3)}, strict=False)
    assert torch.equal(module.get_buffer("live"), torch.ones(3))


def test_reset_parameters_is_not_run_if_it_would_overwrite_live_tensors() -> None:
    module = empty(lambda: nn.Linear(2, 2))
    module.weight = nn.Parameter(torch.full((2, 2), 7.0))
    assert "reset_parameters" in problem(module, {"weight": torch.zeros(2, 2)}, strict=False)
    assert torch.equal(module.weight, torch.full((2, 2), 7.0))
