"""The ways of ``bench.ranks`` to load a model that fully_shard divided over ranks, each as its documentation says.

Every way gets the model on the meta device, with parameters in the dtype in which they are to finish.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import sluice

__all__ = ["DCP", "FILE", "METHODS", "SHARDS", "Method", "join_ranks"]

#: Kinds of checkpoints: one torch file, safetensors shards in Hugging Face's layout, a distributed checkpoint.
FILE, SHARDS, DCP = "pth", "shards", "dcp"


@dataclass(frozen=True, slots=True, kw_only=True)
class Method:
    """A way to load."""

    #: Loads the checkpoint at a path into the model.
    load: Callable[[nn.Module, Path], object]
    #: Kinds of checkpoints that it reads.
    reads: tuple[str, ...]
    #: Modules that are imported before the clock starts.
    imports: tuple[str, ...] = ()


def join_ranks(rank: int, ranks: int, store: str) -> None:
    """Make this process a rank of a gloo group of this host, with one thread for kernels."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks)


def _whole(path: Path) -> dict[str, torch.Tensor]:
    """Return the whole state dict on rank 0, nothing on the others."""
    if dist.get_rank():
        return {}
    if path.is_file():
        loaded: dict[str, torch.Tensor] = torch.load(path, weights_only=True)
        return loaded
    from safetensors.torch import load_file

    return {name: tensor for part in sorted(path.glob("*.safetensors")) for name, tensor in load_file(part).items()}


def _sluice(model: nn.Module, path: Path) -> None:
    sluice.load_into(model, path)


def _broadcast(model: nn.Module, path: Path) -> None:
    from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

    model.to_empty(device="cpu")
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    whole: dict[str, Any] = dict(_whole(path))
    set_model_state_dict(model, whole, options=options)


def _accelerate(model: nn.Module, path: Path) -> None:
    from accelerate.utils.fsdp_utils import fsdp2_load_full_state_dict

    accelerator = SimpleNamespace(is_main_process=dist.get_rank() == 0, device=torch.device("cpu"))
    dtype = next(model.parameters()).dtype
    # It broadcasts the tensors of rank 0 into tensors of the model's dtype.
    whole = {name: tensor.to(dtype) for name, tensor in _whole(path).items()}
    fsdp2_load_full_state_dict(accelerator, model, whole)


def _dcp(model: nn.Module, path: Path) -> None:
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
    from torch.distributed.checkpoint.state_dict_loader import load

    model.to_empty(device="cpu")
    hub = next(path.glob("*.safetensors"), None)
    state: dict[str, Any] = model.state_dict()
    if hub:
        load(state, storage_reader=HuggingFaceStorageReader(str(path), thread_count=4))
    else:
        load(state, checkpoint_id=path)


#: Ways to load by name.
METHODS: Mapping[str, Method] = {
    "sluice": Method(load=_sluice, reads=(FILE, SHARDS, DCP)),
    "set_model_state_dict": Method(load=_broadcast, reads=(FILE, SHARDS)),
    "accelerate": Method(load=_accelerate, reads=(FILE, SHARDS), imports=("accelerate.utils.fsdp_utils",)),
    "torch DCP": Method(load=_dcp, reads=(SHARDS, DCP)),
}
