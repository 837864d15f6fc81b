"""Values that the module keeps and memory that it shares, under ``empty_init`` and after a load."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import sluice
from support.trained_net import empty, load, problem

#: The category depends on the version of torch.
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script` is (deprecated|not supported)")

_View = Callable[[torch.Tensor], torch.Tensor]


class Built(nn.Module):
    """A module that a function builds."""

    def __init__(self, build: Callable[[Any], object]) -> None:
        super().__init__()
        build(self)


def tensors_of(module: nn.Module) -> dict[str, torch.Tensor]:
    """Return parameters, buffers and attributes of a module and of its parts, also those in lists."""

    def found() -> Iterator[tuple[str, torch.Tensor]]:
        for path, part in module.named_modules():
            yield from (
                (f"{path}.{name}", tensor)
                for name, tensor in (part._parameters | part._buffers).items()
                if tensor is not None
            )
            for name, value in vars(part).items():
                members = value if isinstance(value, (list, tuple)) else [value]
                yield from ((f"{path}.{name}.{i}", t) for i, t in enumerate(members) if isinstance(t, torch.Tensor))

    return dict(found())


def addresses(tensor: torch.Tensor) -> set[int]:
    """Return the address of every element."""
    places = torch.zeros(tensor.shape, dtype=torch.int64)
    for dimension, (size, step) in enumerate(zip(tensor.shape, tensor.stride(), strict=True)):
        steps = torch.arange(size) * step * tensor.itemsize
        places += steps.view([-1 if d == dimension else 1 for d in range(tensor.dim())])
    return set((places + tensor.data_ptr()).flatten().tolist())


def sharing(module: nn.Module) -> set[tuple[str, str]]:
    """Return the pairs of tensors that have an element in common."""
    found = {name: addresses(tensor) for name, tensor in tensors_of(module).items()}
    return {(one, other) for one in found for other in found if one < other and found[one] & found[other]}


def loaded_both_ways(build: Callable[[Any], object]) -> tuple[nn.Module, nn.Module]:
    """Return the module of ordinary construction and that of ``empty_init``, loaded from the same state dict."""
    expected = Built(build)
    values = {n: torch.arange(t.numel()).view(t.shape).to(t.dtype) + 10 for n, t in expected.state_dict().items()}
    expected.load_state_dict(values)
    model = empty(lambda: Built(build))
    load(model, expected.state_dict())
    return expected, model


MADE: list[Callable[[], torch.Tensor]] = [
    lambda: torch.zeros(4, 6),
    lambda: torch.full((4, 6), 2.0),
    lambda: torch.randn(4, 6),
    lambda: torch.arange(24.0).view(4, 6),
    lambda: torch.empty(4, 6).normal_(),
]
VIEWS: list[_View] = [
    lambda t: t,
    lambda t: t.detach(),
    lambda t: t.data,
    lambda t: t.detach().view(6, 4),
    lambda t: t.detach().reshape(-1),
    lambda t: t.detach()[:2],
    lambda t: t.data[1:3, ::2],
    lambda t: t.detach().T,
    lambda t: t.data.narrow(0, 1, 2),
    lambda t: t.detach().unbind(0)[1],
    lambda t: t.detach().chunk(2)[1],
    lambda t: torch.split(t.detach(), 3, dim=1)[0],
    lambda t: t.detach().as_strided((2, 2), (6, 1), 3),
    lambda t: t.data[0].expand(3, 6),
    lambda t: t.detach().clone(),
    lambda t: t.detach() * 1,
    lambda t: t.detach().contiguous(),
    lambda t: t.detach().float(),
    lambda t: t.detach().to("cpu"),
    lambda t: t.detach().unsqueeze(0).squeeze(),
]


def keep_attribute(module: Any, name: str, tensor: torch.Tensor) -> None:
    setattr(module, name, tensor.detach())


def keep_same(module: Any, name: str, tensor: torch.Tensor) -> None:
    if not isinstance(tensor, nn.Parameter):
        setattr(module, name, tensor)


def keep_in_list(module: Any, name: str, tensor: torch.Tensor) -> None:
    setattr(module, name, [tensor.detach(), 1])


def keep_computed(module: Any, name: str, tensor: torch.Tensor) -> None:
    module.register_buffer(name, tensor.detach(), persistent=False)


def keep_buffer(module: Any, name: str, tensor: torch.Tensor) -> None:
    module.register_buffer(name, tensor.detach())


def keep_parameter(module: Any, name: str, tensor: torch.Tensor) -> None:
    setattr(module, name, nn.Parameter(tensor))


def keep_data(module: Any, name: str, tensor: torch.Tensor) -> None:
    setattr(module, name, nn.Parameter(torch.zeros(tensor.shape)))
    getattr(module, name).data = tensor.detach()


def keep_in_part(module: Any, name: str, tensor: torch.Tensor) -> None:
    part = nn.Module()
    part.table = tensor.detach()
    setattr(module, name, part)


KEEPS = [keep_attribute, keep_same, keep_in_list, keep_computed, keep_buffer, keep_parameter, keep_data, keep_in_part]


@given(
    make=st.sampled_from(MADE),
    steps=st.lists(st.tuples(st.sampled_from(KEEPS), st.sampled_from(VIEWS), st.booleans()), min_size=1, max_size=4),
)
def test_tensors_have_the_values_and_the_sharing_of_ordinary_construction_or_are_refused(
    make: Callable[[], torch.Tensor], steps: list[tuple[Callable[[Any, str, torch.Tensor], None], _View, bool]]
) -> None:
    def build(module: Any) -> None:
        torch.manual_seed(0)
        tensor = module.start = make()
        for number, (keep, view, of_start) in enumerate(steps):
            keep(module, f"kept{number}", view(module.start if of_start else tensor))
            if isinstance(getattr(module, f"kept{number}", None), nn.Parameter):
                tensor = getattr(module, f"kept{number}")
                if tensor.numel() != 24:
                    tensor = module.start
                tensor = tensor.detach().view(4, 6) if tensor.is_contiguous() else module.start

    try:
        expected, model = loaded_both_ways(build)
    except sluice.MismatchError as error:
        assert "memory" in str(error) or "meta device" in str(error)
        return
    except RuntimeError as error:  # ordinary loads refuse expanded parameters too
        assert "single memory location" in str(error)
        return
    ours, theirs = tensors_of(model), tensors_of(expected)
    assert ours.keys() == theirs.keys()
    for name, own in theirs.items():
        assert torch.equal(ours[name], own), name
        assert ours[name].stride() == own.stride()
    assert sharing(model) == sharing(expected)


class Weighted(nn.Module):
    """A module with one parameter, built by a function."""

    def __init__(self, build: Callable[[nn.Module], None]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))
        build(self)


class Scaled(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.cumsum(0) * 2


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Parameter(torch.ones(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.gate


def affine(x: torch.Tensor) -> torch.Tensor:
    return x * 2 + 1


def keep(module: nn.Module, value: torch.Tensor) -> None:
    module.register_buffer("kept", value, persistent=False)


def plus_one(x: torch.Tensor) -> torch.Tensor:
    return x + 1


KEPT = {
    "scripted function": lambda module: keep(module, torch.jit.script(affine)(torch.ones(3))),
    "scripted module": lambda module: keep(module, torch.jit.script(Scaled())(torch.ones(3))),
    "vmap": lambda module: keep(module, torch.func.vmap(plus_one)(torch.ones(3))),
    "vmap on meta": lambda module: keep(
        module, torch.zeros(torch.func.vmap(plus_one)(torch.ones(3, device="meta")).shape)
    ),
    "grad": lambda module: keep(module, torch.func.grad(lambda x: (x * x).sum())(torch.ones(3))),
}


@pytest.mark.parametrize("build", KEPT.values(), ids=KEPT)
def test_kept_tensors_have_the_values_of_ordinary_construction(build: Callable[[nn.Module], None]) -> None:
    expected = Weighted(build)
    with sluice.empty_init():
        model = Weighted(build)
    assert model.weight.is_meta
    assert torch.equal(model.get_buffer("kept"), expected.get_buffer("kept"))


def test_compiled_modules_with_weights_are_refused() -> None:
    with sluice.empty_init(), pytest.raises(sluice.EmptyInitError, match="needs the values of"):
        Weighted(lambda _: torch.jit.script(Gated())(torch.ones(3)))


COMPUTED = {
    "scripted": lambda module: keep(module, torch.jit.script(affine)(module.weight.detach())),
    "vmap": lambda module: keep(module, torch.func.vmap(plus_one)(module.weight.detach())),
    "like": lambda module: keep(module, torch.ones_like(module.weight)),
    "attribute": lambda module: setattr(module, "kept", [module.weight.detach() * 2]),
}


@pytest.mark.parametrize("build", COMPUTED.values(), ids=COMPUTED)
def test_tensors_computed_from_weights_are_named_by_a_load(build: Callable[[nn.Module], None]) -> None:
    text = problem(empty(lambda: Weighted(build)), {"weight": torch.ones(4)})
    assert re.search(r"'kept' .*compute it after loading", text)
