"""The parameters of modules that ``fully_shard`` (FSDP2) divided, before and after a load.

After a load, its ``load_state_dict`` post-hook copies a new local tensor into memory padded to the size of the first
rank's, and into page-locked memory if parameters are offloaded to the CPU. No public function tells which; where torch
does not have the private names any more, this memory is not in the prediction.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from math import prod
from typing import Any

import torch
from msgspec import Struct
from torch import nn

__all__ = ["ShardMemory", "reshard", "shard_memories"]


class ShardMemory(Struct, frozen=True, kw_only=True):
    """The memory in which fully_shard keeps a local tensor."""

    #: Its elements, with padding.
    elements: int
    #: Whether it is in host memory, also if the mesh is of accelerators.
    offloaded: bool
    #: Whether it is page-locked.
    pinned: bool


def reshard(module: nn.Module) -> None:
    """Free parameters that are gathered for a forward pass: what is loaded into them would be lost."""
    for part in _sharded_parts(module):
        part.reshard()


def shard_memories(module: nn.Module) -> Mapping[int, ShardMemory]:
    """Return the memory of each parameter that fully_shard divided, by the id of the parameter."""
    return {
        id(parameter.sharded_param): ShardMemory(
            elements=prod(parameter.padded_sharded_param_size),
            offloaded=bool(getattr(parameter, "offload_to_cpu", False)),
            pinned=bool(getattr(parameter, "pin_memory", False)),
        )
        for part in _sharded_parts(module)
        for parameter in _parameters(part)
        if hasattr(parameter, "sharded_param") and hasattr(parameter, "padded_sharded_param_size")
    }


def _sharded_parts(module: nn.Module) -> Iterator[Any]:
    fsdp = sys.modules.get("torch.distributed.fsdp")
    if fsdp is not None and torch.distributed.is_initialized():  # nothing is looked at in the usual case
        yield from (part for part in module.modules() if isinstance(part, fsdp.FSDPModule))


def _parameters(part: Any) -> Iterator[Any]:
    state = part._get_fsdp_state()  # noqa: SLF001  see the head
    one = getattr(state, "_fsdp_param_group", None)  # up to torch 2.12
    for group in getattr(state, "_fsdp_param_groups", [one] if one is not None else []):
        yield from group.fsdp_params
