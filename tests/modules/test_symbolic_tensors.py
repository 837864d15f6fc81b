"""Symbolic tensors: chains of operations that move elements, applied to them and to real tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sluice.modules.symbolic_tensors import CannotFollow, SymbolicTensor
from support.plans import entry_of, load, request

Operation = Callable[[Any], Any]


def _check(path: Path, tensors: Sequence[torch.Tensor], operation: Operation) -> None:
    """Compare the result of an operation on tensors with that on their symbols."""
    expected = operation(list(tensors))
    found = operation([SymbolicTensor(entry_of(tensor, i)) for i, tensor in enumerate(tensors)])
    assert isinstance(found, SymbolicTensor)
    assert found.shape == expected.shape
    [loaded] = load(path, list(tensors), [request("t", found.entry)])
    assert torch.equal(loaded, expected)


def _grid(*shape: int, start: int = 0) -> torch.Tensor:
    return torch.arange(torch.Size(shape).numel()).view(shape).float() + start


@pytest.mark.parametrize(
    "operation",
    [
        lambda t: torch.cat(t, dim=1),
        lambda t: torch.cat(t, dim=-1).transpose(0, 1).contiguous(),
        torch.stack,
        lambda t: torch.stack(t, dim=-1),
        lambda t: torch.cat([torch.stack(t), torch.stack(t[::-1])], dim=1),
        lambda t: torch.stack(t).chunk(2, dim=1)[1].squeeze(0),
        lambda t: torch.split(torch.cat(t), [3, 5], dim=0)[1],
        lambda t: torch.stack(t).unbind(dim=2)[1],
        lambda t: torch.cat(t, dim=1).reshape(2, 2, -1, 3).permute(2, 0, 1, 3).flatten(1),
        lambda t: t[0].view(2, 2, 6).transpose(1, 2).reshape(4, 6),
        lambda t: t[0].t()[2:, None, 1].clone(),
        lambda t: torch.cat(t).T.unsqueeze(-1).squeeze().detach(),
        lambda t: torch.cat(t).to(torch.float32).narrow(0, 2, 4),
        lambda t: torch.cat([torch.empty(0, 6), t[0], torch.ones(2, 6)]),
    ],
)
def test_contents_of_conversions(tmp_path: Path, operation: Operation) -> None:
    _check(tmp_path / "f", [_grid(4, 6), _grid(4, 6, start=100)], operation)


@st.composite
def chains(draw: st.DrawFn) -> list[Operation]:
    """Draw a chain of operations, each valid for the shape that precedes it."""

    def one() -> Operation:
        kind = draw(st.sampled_from(["cat", "permute", "reshape", "split", "interleave"]))
        number = draw(st.integers(0, 5))
        return lambda tensor: _apply(kind, number, tensor)

    return [one() for _ in range(draw(st.integers(1, 5)))]


def _apply(kind: str, number: int, tensor: torch.Tensor) -> torch.Tensor:
    dim = number % tensor.dim()
    size = tensor.shape[dim]
    if kind == "cat":
        return torch.cat([tensor, tensor.narrow(dim, 0, max(1, size // 2))], dim)
    if kind == "permute":
        return tensor.movedim(dim, -1)
    if kind == "split":
        return torch.split(tensor, [size - size // 3, size // 3], dim)[0]
    factor = next(factor for factor in (3, 2, 1) if size % factor == 0)
    inner = tensor.reshape(*tensor.shape[:dim], factor, size // factor, *tensor.shape[dim + 1 :])
    return inner if kind == "reshape" else inner.transpose(dim, dim + 1).reshape(tensor.shape)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(chain=chains(), shape=st.lists(st.integers(1, 6), min_size=1, max_size=3))
def test_chains_of_operations(tmp_path: Path, chain: list[Operation], shape: list[int]) -> None:
    def run(tensors: list[Any]) -> Any:
        value = tensors[0]
        for operation in chain:
            value = operation(value)
        return value

    _check(tmp_path / "f", [_grid(*shape)], run)


@pytest.mark.parametrize(
    "operation",
    [torch.neg, torch.exp, lambda t: t + 1, lambda t: t.to(torch.float64), lambda t: t.sum(), lambda t: t.flip(0)],
)
def test_what_computes_is_refused(operation: Operation) -> None:
    with pytest.raises(CannotFollow, match=r"torch\.[\w.]+ computes elements, or is not supported"):
        operation(SymbolicTensor(entry_of(_grid(4), 0)))


def test_repr_of_a_symbolic_tensor() -> None:
    assert repr(SymbolicTensor(entry_of(_grid(2, 3), 0))) == "SymbolicTensor(float32, [2, 3])"
