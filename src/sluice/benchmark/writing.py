"""Write state dicts in the formats that the methods read."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Literal

import torch
from safetensors.torch import save_file

from sluice.benchmark.records import DCP, PARAMETERS, PTH, SAFETENSORS, TENSORS, Kind

__all__ = ["FORMATS", "CheckpointFormat", "write_checkpoint"]

#: ``torch``: one ``torch.save`` zip file. ``safetensors``: one file. ``tensorizer``: one file of its own format.
#: ``dcp``: a directory of torch.distributed.checkpoint. ``per-parameter``: a directory with a file ``NAME.pt`` per
#: entry of the state dict.
CheckpointFormat = Literal["torch", "safetensors", "tensorizer", "dcp", "per-parameter"]

#: The format of each kind of checkpoint that can be written.
FORMATS: dict[Kind, CheckpointFormat] = {
    PTH: "torch",
    SAFETENSORS: "safetensors",
    PARAMETERS: "per-parameter",
    TENSORS: "tensorizer",
    DCP: "dcp",
}


def write_checkpoint(
    state_dict: Mapping[str, torch.Tensor],
    path: Path,
    format: CheckpointFormat,  # noqa: A002 - the argument of sluice.save and sluice.convert has this name too
) -> None:
    """Write a flat state dict of contiguous tensors that share no memory.

    Args:
        state_dict: The tensors by name.
        path: The file to write, or for ``per-parameter`` the directory.
        format: Format of the checkpoint.
    """
    if format == "safetensors":
        save_file(dict(state_dict), path, metadata={"format": "pt"})  # transformers refuses files without it
    elif format == "torch":
        torch.save(state_dict, path)
    elif format == "tensorizer":
        serializer = import_module("tensorizer").TensorSerializer(str(path))
        serializer.write_state_dict(dict(state_dict))
        serializer.close()
    elif format == "dcp":
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # it says that one process saves
            import_module("torch.distributed.checkpoint").save(dict(state_dict), checkpoint_id=path, no_dist=True)
    else:
        path.mkdir(parents=True, exist_ok=True)
        for name, tensor in state_dict.items():
            torch.save(tensor, path / f"{name}.pt")
