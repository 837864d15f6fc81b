"""Merge methods against mergekit itself, and whole tensors against pieces."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from random import Random
from typing import Any

import pytest
import torch

from sluice.merging.kernels import MergedTensor, compute, survey
from sluice.merging.recipe import METHODS

#: Parameters of each method that mergekit has, and the number of inputs without the base.
CASES: list[tuple[str, dict[str, Any], dict[str, list[float]], int]] = [
    ("linear", {}, {"weight": [0.3, 0.5, 0.9]}, 3),
    ("linear", {"normalize": False}, {"weight": [0.3, -0.5]}, 2),
    ("passthrough", {}, {"scale": [0.7]}, 1),
    ("slerp", {"t": 0.3}, {}, 1),
    ("slerp", {"t": 1.0}, {}, 1),
    ("nuslerp", {}, {"weight": [0.2, 0.7]}, 2),
    ("nuslerp", {"nuslerp_flatten": False}, {"weight": [0.2, 0.7]}, 2),
    ("nuslerp", {"nuslerp_flatten": False, "nuslerp_row_wise": True}, {"weight": [0.2, 0.7]}, 2),
    ("model_stock", {}, {}, 3),
    ("model_stock", {"filter_wise": True}, {}, 2),
    ("task_arithmetic", {}, {"weight": [0.3, 0.9]}, 2),
    ("task_arithmetic", {"normalize": True, "lambda": 0.5}, {"weight": [0.3, 0.9, -0.2]}, 3),
    ("ties", {}, {"weight": [0.3, 0.9, 1.0], "density": [0.2, 0.5, 1.0]}, 3),
    ("ties", {"int8_mask": True, "normalize": False}, {"weight": [1.0, 1.0], "density": [0.5, 0.0]}, 2),
    ("breadcrumbs", {}, {"weight": [0.3, 0.9], "density": [0.2, 0.9], "gamma": [0.01, 0.2]}, 2),
    ("breadcrumbs_ties", {}, {"weight": [0.3, 0.9], "density": [0.5, 0.9], "gamma": [0.01, 0.0]}, 2),
]


def made(
    method: str, shared: Mapping[str, Any], each: Mapping[str, list[float]], count: int, **how: Any
) -> MergedTensor:
    spec, base = METHODS[method], how.pop("base", METHODS[method].base == "required")
    own: list[dict[str, Any]] = [
        {name: each.get(name, [default] * count)[i] for name, default in spec.each.items()} for i in range(count)
    ]
    return MergedTensor(
        name="w",
        method=method,
        base=count if base else None,
        shared={**spec.shared, **shared},
        each=(*own, *([{}] if base else [])),
        **how,
    )


def merged(tensor: MergedTensor, inputs: list[torch.Tensor], *, pieces: int) -> torch.Tensor:
    flat = [each.reshape(-1) for each in inputs]
    known = survey(tensor, lambda first, end: [each[first:end] for each in flat])
    steps = range(0, tensor.numel, pieces)
    parts = [compute(tensor, [each[i : i + pieces] for each in flat], i, known) for i in steps]
    return torch.cat(parts).view(tensor.shape)


def tensors(count: int, shape: tuple[int, ...], dtype: torch.dtype) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(count)
    base = torch.randn(shape, generator=generator)
    return [(base + 0.1 * torch.randn(shape, generator=generator)).to(dtype) for _ in range(count - 1)] + [
        base.to(dtype)
    ]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("base", [False, True])
@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case[0]}{case[1]}")
def test_bits_of_mergekit(
    case: tuple[str, dict[str, Any], dict[str, list[float]], int],
    dtype: Any,
    monkeypatch: pytest.MonkeyPatch,
    *,
    base: bool,
) -> None:
    """Of equal magnitudes the first ones count, as in a stable sort: that of mergekit depends on the processor."""
    methods = pytest.importorskip("mergekit.merge_methods", reason="mergekit is not installed")
    kit = pytest.importorskip("mergekit.merge_methods.base")
    monkeypatch.setattr(torch, "argsort", partial(torch.argsort, stable=True))
    monkeypatch.setattr(torch, "sort", partial(torch.sort, stable=True))
    method, shared, each, count = case
    if base != (METHODS[method].base == "required") and METHODS[method].base != "optional":
        pytest.skip("the method takes no base, or needs one")
    shape = (60, 130)
    inputs = tensors(count + base, shape, dtype)
    name = str(dtype).removeprefix("torch.")
    own = made(method, shared, each, count, base=base, shape=shape, dtype=name, out_dtype=name)
    entries = tuple(
        kit.TensorEntry(id=str(i), tensor=tensor, is_base=base and i == count) for i, tensor in enumerate(inputs)
    )
    group = kit.TensorGroup(entries=entries)
    values = {
        key: kit.PerInputValues([(str(i), value) for i, value in enumerate(found)]) for key, found in each.items()
    }
    theirs = methods.get(method)
    [expected] = theirs([group], parameters={**shared, **values})
    for pieces in (shape[0] * shape[1], 997):
        assert torch.equal(merged(own, inputs, pieces=pieces), expected), pieces


def test_equal_magnitudes_at_a_threshold_are_kept_in_order() -> None:
    base = torch.zeros(100)
    own = made("ties", {}, {"weight": [1.0], "density": [0.25]}, 1, shape=(100,), dtype="float32", out_dtype="float32")
    found = merged(own, [torch.ones(100), base], pieces=7)
    assert found.nonzero().flatten().tolist() == list(range(25))


def test_draws_do_not_depend_on_pieces() -> None:
    shape = (3, 700_001)  # several blocks
    own = made(
        "dare_linear", {}, {"weight": [1.0], "density": [0.3]}, 1, shape=shape, dtype="float32", out_dtype="float32"
    )
    inputs = [torch.ones(shape), torch.zeros(shape)]
    first = merged(own, inputs, pieces=own.numel)
    kept = (first != 0).float().mean()
    assert abs(kept - 0.3) < 0.002
    assert abs(first.sum() / first.numel() - 1) < 0.002  # rescaled
    pieces = Random(1).randrange(100_000, 900_000)
    assert torch.equal(merged(own, inputs, pieces=pieces), first)


def test_factors_of_all_inputs_come_from_one_pass() -> None:
    each = {"weight": [1.0] * 3, "density": [0.5, 0.25, 1.0]}
    own = made("dare_linear", {}, each, 3, shape=(400,), dtype="float32", out_dtype="float32")
    inputs, read = tensors(4, (400,), torch.float32), list[int]()

    def reader(first: int, end: int) -> list[torch.Tensor]:
        read.append(first)
        return [tensor[first:end] for tensor in inputs]

    kept = survey(own, reader)
    assert read == [0]
    assert [round(one.scale) for one in kept] == [2, 4, 1]


def test_averages_of_torch() -> None:
    models = [torch.nn.Linear(30, 40) for _ in range(4)]
    for method, shared, function in [
        ("swa", {}, torch.optim.swa_utils.get_swa_multi_avg_fn()),  # type: ignore[no-untyped-call]
        ("ema", {"decay": 0.99}, torch.optim.swa_utils.get_ema_multi_avg_fn(0.99)),  # type: ignore[no-untyped-call]
    ]:
        average = torch.optim.swa_utils.AveragedModel(models[0], multi_avg_fn=function)
        for model in models:
            average.update_parameters(model)
        own = made(method, shared, {}, 4, shape=(40, 30), dtype="float32", out_dtype="float32")
        found = merged(own, [model.weight.detach() for model in models], pieces=100)
        assert torch.equal(found, average.module.get_parameter("weight"))
