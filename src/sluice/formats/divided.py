"""Training states divided over ranks instead of tensors, recognized in order to refuse them with advice.

Such files hold ranges of one long vector, the padded concatenation of all parameters; only the library that wrote them
can locate each parameter. DeepSpeed's ZeRO, Megatron's distributed optimizer and the flat parameters of FSDP1 are
recognized, by file names or by the keys that their writers use.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import NamedTuple

from sluice.entries.tree import containers
from sluice.sources.directory import Directory

__all__ = ["Divided", "divided_directory", "divided_state"]


class Divided(NamedTuple):
    """A kind of state that is divided over ranks."""

    #: Description, as the object of a sentence.
    what: str
    #: Advice, as sentences.
    advice: str


_DEEPSPEED = Divided(
    "a state that DeepSpeed's ZeRO divided over ranks, not over tensors",
    "Pass the directory with the files of all ranks, or the one above it with the file 'latest'.",
)
_MEGATRON = Divided(
    "a state that Megatron divided over ranks, not over tensors",
    "Save it with --ckpt-format torch_dist, or convert it with Megatron's tools/checkpoint/convert.py: both write a "
    "torch.distributed.checkpoint directory.",
)
_FSDP = Divided(
    "flat parameters of FSDP1, each the concatenation of the tensors of a module",
    "Save it with torch.distributed.checkpoint.state_dict.get_optimizer_state_dict, or with FSDP.optim_state_dict and "
    "FULL_STATE_DICT: both write a state for each tensor.",
)

_MEGATRON_ENTRY = re.compile(r"mp_rank_\d{2}(?:_\d{3}){0,2}|distrib_optim\.pt|model_optim_rng\.pt", re.ASCII)
_FLAT_PARAMETER = re.compile(r"(?:.*\.)?_?flat_param(?:_\d+)?", re.ASCII | re.DOTALL)

_ZERO_KEYS = frozenset({"zero_stage", "fp32_flat_groups", "single_partition_of_fp32_groups"})
_MEGATRON_KEYS = frozenset({"buckets_coalesced", "per_bucket_numel"})


def divided_directory(directory: Directory) -> Divided | None:
    """Return the kind of divided state in a directory, or None.

    Raises:
        ReadError: The directory cannot be listed.
    """
    names = [entry.name for entry in directory.entries()]
    return _MEGATRON if any(map(_MEGATRON_ENTRY.fullmatch, names)) else None


def divided_state(tree: object) -> Divided | None:
    """Return the kind of divided state in the nested object of a file, or None."""
    found = (_by_keys(container) for container in containers(tree) if isinstance(container, dict))
    return next(filter(None, found), None)


def _by_keys(keys: Iterable[object]) -> Divided | None:
    names = {key for key in keys if isinstance(key, str)}
    if names & _ZERO_KEYS:
        return _DEEPSPEED
    if names & _MEGATRON_KEYS:
        return _MEGATRON
    return _FSDP if any(map(_FLAT_PARAMETER.fullmatch, names)) else None
