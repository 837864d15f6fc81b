"""Random pipelines of rules, compared with the same operations of torch on the loaded tensors."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import safetensors.torch
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import sluice
from sluice import rules

Tensors = dict[str, torch.Tensor]


@dataclass
class Pipeline:
    """Rules, and the results of the same operations in torch."""

    tensors: Tensors
    rules: list[rules.Rule]


#: A rule, and the same operation in torch.
Operation = tuple[rules.Rule, Callable[[Tensors], Tensors]]


def operations(tensors: Tensors) -> st.SearchStrategy[Operation]:  # noqa: C901, PLR0915 - a strategy for each rule
    """Return rules that apply to these tensors, each with the same operation in torch."""
    name = st.sampled_from(sorted(tensors))

    def replaced(one: str, function: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Tensors], Tensors]:
        return lambda state: {key: function(value) if key == one else value for key, value in state.items()}

    @st.composite
    def permuted(draw: st.DrawFn) -> Operation:
        one = draw(name)
        dims = draw(st.permutations(range(tensors[one].ndim)))
        return rules.permute(one, dims), replaced(one, lambda tensor: tensor.permute(dims))

    @st.composite
    def reshaped(draw: st.DrawFn) -> Operation:
        one = draw(name)
        left = tensors[one].numel()
        shape: list[int] = []
        while left > 1 and len(shape) < 3:
            size = draw(st.sampled_from([size for size in range(1, left + 1) if left % size == 0]))
            shape.append(size)
            left //= size
        shape.append(left)
        return rules.reshape(one, shape), replaced(one, lambda tensor: tensor.reshape(shape))

    @st.composite
    def resized(draw: st.DrawFn) -> Operation:
        one = draw(name)
        dim = draw(st.integers(0, tensors[one].ndim - 1))
        size = tensors[one].shape[dim]
        rows = draw(st.integers(max(1, size - 2), size + 2))

        def resize(tensor: torch.Tensor) -> torch.Tensor:
            added = list(tensor.shape)
            added[dim] = max(0, rows - size)
            kept = tensor.narrow(dim, 0, min(rows, size))
            return torch.cat([kept, torch.full(added, 0.3, dtype=tensor.dtype)], dim)

        return rules.resize(one, rows, fill=0.3, dim=dim), replaced(one, resize)

    @st.composite
    def scaled(draw: st.DrawFn) -> Operation:
        one, factor = draw(name), draw(st.sampled_from([0.1, -2.0, 3.3]))
        return rules.scale(one, factor), replaced(one, lambda tensor: tensor * factor)

    @st.composite
    def halved(draw: st.DrawFn) -> Operation:
        one = draw(name)
        dim = draw(st.integers(0, tensors[one].ndim - 1))
        first = draw(st.integers(0, tensors[one].shape[dim]))
        sizes = (first, tensors[one].shape[dim] - first)
        new = (f"{one}l", f"{one}r")

        def split(state: Tensors) -> Tensors:
            made: Tensors = {}
            for key, value in state.items():
                made.update(
                    zip(new, torch.split(value, list(sizes), dim), strict=True) if key == one else [(key, value)]
                )
            return made

        return rules.split(one, new, dim=dim, sizes=sizes), split

    @st.composite
    def joined(draw: st.DrawFn) -> Operation:
        one = draw(name)
        like = [key for key in sorted(tensors) if tensors[key].shape == tensors[one].shape and key != one]
        other = draw(st.sampled_from(like)) if like else one
        new_dim = draw(st.booleans())
        dim = draw(st.integers(0, tensors[one].ndim - (not new_dim)))
        if not like:
            copied = next(new for n in itertools.count() if (new := f"{one}c{n}") not in tensors)
            return rules.copy(one, copied), lambda state: {**state, copied: state[one]}
        new = f"{one}j"

        def join(state: Tensors) -> Tensors:
            whole = (torch.stack if new_dim else torch.cat)([state[one], state[other]], dim)
            return {**{key: value for key, value in state.items() if key not in (one, other)}, new: whole}

        return (rules.stack if new_dim else rules.concatenate)((one, other), new, dim=dim), join

    return st.one_of(permuted(), reshaped(), resized(), scaled(), halved(), joined())


@st.composite
def pipelines(draw: st.DrawFn) -> tuple[Tensors, Pipeline]:
    dtype = draw(st.sampled_from([torch.float32, torch.float16]))
    shapes = draw(st.lists(st.lists(st.integers(1, 5), min_size=1, max_size=3), min_size=1, max_size=3))
    numbers = itertools.count()
    start = {
        f"t{i}": torch.tensor([float(next(numbers)) for _ in range(torch.Size(shape).numel())], dtype=dtype).view(shape)
        for i, shape in enumerate(shapes)
    }
    pipeline = Pipeline(dict(start), [])
    for _ in range(draw(st.integers(1, 6))):
        usable = {name: tensor for name, tensor in pipeline.tensors.items() if tensor.numel() and tensor.ndim < 6}
        if not usable:
            break
        rule, function = draw(operations(usable))
        pipeline.rules.append(rule)
        pipeline.tensors = function(pipeline.tensors)
    return start, pipeline


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(made=pipelines(), finished=st.sampled_from([None, torch.bfloat16]))
def test_any_pipeline_equals_torchs(
    tmp_path: Path, made: tuple[Tensors, Pipeline], finished: torch.dtype | None
) -> None:
    start, pipeline = made
    path = tmp_path / "f.safetensors"
    safetensors.torch.save_file(start, path)
    loaded = sluice.load_state_dict(path, rules=pipeline.rules, dtype=finished)
    assert loaded.keys() == pipeline.tensors.keys()
    for name, expected in pipeline.tensors.items():
        wanted = expected.to(finished or expected.dtype)
        assert loaded[name].shape == wanted.shape, name
        assert torch.equal(loaded[name], wanted), name
