"""Random models that ranks hold in parts, saved in random formats and loaded into models divided in a different way."""

from __future__ import annotations

import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import sluice
from support.divided_models import locals_of, mesh_of
from support.ranks import Ranks

pytestmark = pytest.mark.ranks

#: Suffix of the checkpoint, and arguments of ``save``.
FORMATS: Mapping[str, dict[str, Any]] = {
    ".safetensors": {},
    "-shards": {"max_shard_size": 2000},
    "-dcp": {"format": "dcp"},
}

#: Names and sizes of meshes of four ranks. The name says what it does; each stage of ``pp`` has some of the layers.
MESHES: list[dict[str, int]] = [
    {"dp": 4},
    {"tp": 4},
    {"replicate": 2, "dp": 2},
    {"dp": 2, "tp": 2},
    {"pp": 2, "dp": 2},
    {"pp": 2, "tp": 2},
    {"a": 2, "b": 2},
    {"a": 4, "b": 1},
]


class Layers(nn.Module):
    """Pairs of linear layers, some of them without biases."""

    def __init__(self, sizes: list[tuple[int, int, bool]], own: list[int]) -> None:
        super().__init__()
        for number in own:
            size, inner, bias = sizes[number]
            self.add_module(f"up{number}", nn.Linear(size, inner, bias=bias))
            self.add_module(f"down{number}", nn.Linear(inner, size, bias=bias))


def placed_at_random(model: nn.Module, mesh: Any, choice: random.Random) -> None:
    """Give each parameter placements of its own."""
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    for part in model.children():
        for name, tensor in list(part.named_parameters(recurse=False)):
            kinds = [choice.choice([Replicate(), *map(Shard, range(tensor.ndim))]) for _ in range(mesh.ndim)]
            setattr(part, name, nn.Parameter(distribute_tensor(tensor.detach(), mesh, kinds)))


def divide(model: nn.Module, sizes: dict[str, int], mesh: Any, choice: random.Random) -> None:
    """Divide a model over a mesh as the names of its dimensions say."""
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import Shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    if "a" in sizes:
        placed_at_random(model, mesh, choice)
    if "tp" in sizes:
        styles = {
            name: ColwiseParallel() if name.startswith("up") else RowwiseParallel()
            for name, _ in model.named_children()
        }
        parallelize_module(model, mesh["tp"], styles)  # type: ignore[arg-type]
    if "dp" in sizes:
        columns = choice.random() < 0.5 and "tp" not in sizes
        whole = mesh if "replicate" in sizes or mesh.ndim == 1 else mesh["dp"]
        for part in choice.sample(list(model.children()), 2):
            fully_shard(part, mesh=whole)
        place = (
            (lambda tensor: Shard(1) if tensor.ndim == 2 and tensor.shape[1] % 2 == 0 else None) if columns else None
        )
        fully_shard(model, mesh=whole, shard_placement_fn=place if whole.size() == 2 else None)


def made(sizes: list[tuple[int, int, bool]], choice: random.Random, state: Mapping[str, torch.Tensor] | None) -> Layers:
    """Return a divided model with the values of a state dict; None for a model on meta."""
    names = choice.choice(MESHES)
    mesh = mesh_of(*names.values(), names=tuple(names))
    own = list(range(len(sizes)))
    if "pp" in names:
        own = own[mesh["pp"].get_local_rank() :: 2]
    with torch.device("meta" if state is None else "cpu"):
        model = Layers(sizes, own)
    if state is not None:
        model.load_state_dict({name: state[name] for name in model.state_dict()})
    divide(model, names, mesh, choice)
    return model


def problems(seed: int, folder: Path) -> list[str]:
    """Save, load, and return what differs."""
    choice = random.Random(seed)
    sizes = [(choice.randint(1, 9), choice.randint(1, 17), choice.random() < 0.7) for _ in range(choice.randint(2, 5))]
    torch.manual_seed(seed)
    state = Layers(sizes, list(range(len(sizes)))).state_dict()
    suffix = choice.choice(list(FORMATS))
    path = folder / f"{seed}{suffix}"
    sluice.save(made(sizes, choice, state), path, **FORMATS[suffix])
    model, truth = (made(sizes, random.Random(-seed - 1), values) for values in (None, state))
    sluice.load_into(model, path, strict=False)
    found, expected = locals_of(model), locals_of(truth)  # torch 2.13 gathers uneven parts of TP x FSDP for ever
    wrong = [f"{seed}: {name}" for name, tensor in expected.items() if not torch.equal(found[name], tensor)]
    stored = sluice.load_state_dict(path)
    return wrong + [f"{seed}: stored {name}" for name in state if not torch.equal(stored[name], state[name])]


@pytest.mark.parametrize("first", range(0, 40, 10))
def test_saved_by_one_layout_and_loaded_into_another(four_ranks: Ranks, tmp_path: Path, first: int) -> None:
    for seed in range(first, first + 10):
        assert four_ranks.run(problems, seed, tmp_path) == [[]] * 4, seed
