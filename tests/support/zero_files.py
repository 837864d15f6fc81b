"""Checkpoints in the public layout of DeepSpeed's ZeRO, written without DeepSpeed; and those that it wrote itself.

``write_zero`` follows ``deepspeed/utils/zero_to_fp32.py`` and the ``state_dict`` methods of DeepSpeed's optimizers: it
builds vectors with ``torch.cat``, and cuts them into ranks.
"""

from __future__ import annotations

import argparse
import tarfile
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

WRITTEN = {path.name.partition(".")[0]: path for path in sorted((Path(__file__).parent / "deepspeed_files").iterdir())}

Tensors = dict[str, torch.Tensor]

#: Settings that all groups of the optimizer have.
_SETTINGS: dict[str, Any] = {"betas": (0.8, 0.9), "eps": 1e-8, "weight_decay": 0.1, "amsgrad": False}

#: Changes the content of a file before it is written: (name of the file, content).
Change = Callable[[str, Any], None]


def unpacked(name: str, folder: Path) -> Path:
    """Unpack a checkpoint that DeepSpeed wrote: ``run``, ``weights.safetensors``, ``optimizer.safetensors``."""
    with tarfile.open(WRITTEN[name]) as archive:
        archive.extractall(folder, filter="data")
    return folder


@dataclass
class Training:
    """A model in training."""

    #: Weights that are trained, by group.
    groups: list[Tensors]
    frozen: Tensors = field(default_factory=dict)
    buffers: Tensors = field(default_factory=dict)
    #: Further names of weights.
    shared: dict[str, str] = field(default_factory=dict)
    step: int = 7
    lr: float = 0.1

    @property
    def weights(self) -> Tensors:
        """The whole state dict."""
        known = {name: value for group in self.groups for name, value in group.items()} | self.frozen | self.buffers
        return known | {name: known[stored] for name, stored in self.shared.items()}

    def state(self, name: str, key: str) -> torch.Tensor:
        """The state of a weight in the optimizer."""
        weight = next(group[name] for group in self.groups if name in group)
        return (weight * {"exp_avg": 0.25, "exp_avg_sq": 0.5}[key]).float()


def example(*, odd: int = 5) -> Training:
    """Return a model with every kind of tensor; ``odd`` is a size that few numbers of ranks divide."""
    draw = torch.Generator().manual_seed(3)

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=draw)

    return Training(
        groups=[
            {"embed": drawn(odd, 3), "conv": drawn(2, 1, 3, odd), "down": drawn(3, odd)},
            {"bias": drawn(odd), "scale": torch.tensor(1.5)},
        ],
        frozen={"frozen": drawn(3, odd).bfloat16()},
        buffers={"mean": drawn(4), "count": torch.tensor(3)},
        shared={"head": "embed"},
    )


def write_zero(
    folder: Path,
    training: Training,
    *,
    stage: int,
    world: int,
    tag: str = "global_step7",
    start: str = "",
    gap: int = 0,
    change: Change | None = None,
) -> Path:
    """Write a directory with ``latest``; return it.

    Args:
        folder: Where.
        training: What.
        stage: Of ZeRO.
        world: Number of ranks.
        tag: Name of the inner directory.
        start: Start of the names of optimizer files: ``"bf16_"``.
        gap: Unused elements after each parameter (stages 1 and 2).
        change: Makes the files contradict each other.
    """
    inside = folder / tag
    inside.mkdir(parents=True)
    (folder / "latest").write_text(tag)

    def write(name: str, content: dict[str, Any]) -> None:
        if change is not None:
            change(name, content)
        torch.save(content, inside / name)

    cut = _cut_by_parameter if stage == 3 else _cut_by_vector
    weights, paddings = cut([list(group.values()) for group in training.groups], world, gap)
    states = {
        key: cut([[training.state(name, key) for name in group] for group in training.groups], world, gap)[0]
        for key in ("exp_avg", "exp_avg_sq")
    }
    for rank in range(world):
        ends = paddings if rank == world - 1 else [0] * len(paddings)
        state = {
            i: {
                "step": torch.tensor(float(training.step)),
                **{key: torch.nn.functional.pad(vectors[rank][i], (0, end)) for key, vectors in states.items()},
            }
            for i, end in enumerate(ends)
        }
        groups = [{"lr": training.lr / (i + 1), **_SETTINGS, "params": [i]} for i in state]
        base = {"state": state, "param_groups": groups}
        own: dict[str, Any] = {"loss_scaler": argparse.Namespace(scale=1), "zero_stage": stage}
        if stage == 3:
            own |= {"partition_count": world, "optimizer_state_dict": base, "fp32_flat_groups": weights[rank]}
        else:
            own |= {"partition_count": [world] * len(groups), "base_optimizer_state": base}
            own |= {"single_partition_of_fp32_groups": weights[rank]}
            own |= {"group_paddings": ends}
            own |= {"param_alignment_paddings": [[gap] * len(group) for group in training.groups]} if gap else {}
        name = f"{start}zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"
        write(name, {"optimizer_state_dict": own, "ds_version": "0.19.8"})
        if stage == 3:
            write(f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt", _model(training, stage, world, rank))
    if stage < 3:
        write("mp_rank_00_model_states.pt", _model(training, stage, world, 0))
    return folder


def _cut_by_vector(
    groups: list[list[torch.Tensor]], world: int, gap: int
) -> tuple[list[list[torch.Tensor]], list[int]]:
    """Return the vectors of each rank without the padding, and the padding of each vector of the last rank."""
    ranks: list[list[torch.Tensor]] = [[] for _ in range(world)]
    paddings = []
    for group in groups:
        whole = torch.cat([torch.nn.functional.pad(value.flatten().float(), (0, gap)) for value in group])
        padding = -len(whole) % (2 * world)
        parts = list(torch.nn.functional.pad(whole, (0, padding), value=9e9).chunk(world))
        paddings.append(min(padding, len(parts[-1])))
        parts[-1] = parts[-1][: len(parts[-1]) - paddings[-1]]
        for rank, part in enumerate(parts):
            ranks[rank].append(part.clone())
    return ranks, paddings


def _cut_by_parameter(
    groups: list[list[torch.Tensor]], world: int, gap: int
) -> tuple[list[list[torch.Tensor]], list[int]]:
    del gap
    ranks = [
        [torch.cat([_share(value.float(), world, rank) for value in group]) for group in groups]
        for rank in range(world)
    ]
    return ranks, [0] * len(groups)


def _share(value: torch.Tensor, world: int, rank: int) -> torch.Tensor:
    """Return a rank's elements of a parameter, padded."""
    whole = value.flatten()
    size = -(-len(whole) // world)
    return torch.nn.functional.pad(whole, (0, size * world - len(whole)), value=9e9)[rank * size :][:size].clone()


def _model(training: Training, stage: int, world: int, rank: int) -> dict[str, Any]:
    known = training.weights
    empty = torch.empty(0, dtype=torch.bfloat16)
    stored = {n: v if n in training.buffers else (empty if stage == 3 else v.bfloat16()) for n, v in known.items()}
    module = OrderedDict(stored)
    if stage != 2:
        module._metadata = OrderedDict({"": {"version": 1}})  # type: ignore[attr-defined]  # as torch's own
    frozen: Mapping[str, torch.Tensor] = training.frozen if stage > 1 else {}
    return {
        "module": module,
        "buffer_names": list(training.buffers),
        "optimizer": None,
        "param_shapes": [OrderedDict((n, value.shape) for n, value in group.items()) for group in training.groups],
        "frozen_param_shapes": OrderedDict((n, value.shape) for n, value in frozen.items()) or None,
        "frozen_param_fragments": {n: _share(v, world, rank) if stage == 3 else v for n, v in frozen.items()} or None,
        "shared_params": dict(training.shared) if rank == 0 else {},
        "global_steps": training.step,
        "dp_world_size": world,
        "mp_world_size": 1,
        "ds_version": "0.19.8",
    }
