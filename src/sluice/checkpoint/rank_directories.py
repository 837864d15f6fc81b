"""Directories in which each rank wrote a file of its own, as Megatron-LM and NeMo do: one checkpoint.

Layout::

    mp_rank_TT[_PPP[_EEE]]/model_optim_rng.pt     Megatron: tensor, pipeline and expert rank
    tp_rank_TT_pp_rank_PPP/model_weights.ckpt     NeMo, also in a .nemo archive

The tensors of each file have the name of its directory as a prefix: ``mp_rank_00.decoder.layers.0...``. They are those
of ``model``, or of ``model0``, ``model1``, ... with interleaved pipeline stages, or of a state dict itself; optimizers,
extra state and other values are left out: each file alone has them. The files do not tell how tensors are divided:
``sluice.rules.megatron`` joins them.

Missing ranks are missing files. Refused: directories of different forms; versions of Megatron from before 2021.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from itertools import product
from math import prod

from sluice._errors import FormatError, UnsupportedError
from sluice._messages import check_limit, first_names
from sluice._options import Limits
from sluice.checkpoint.open_file import CheckpointLayout
from sluice.entries import tree as trees
from sluice.sources.directory import Directory

__all__ = ["RANK_DIRECTORY", "RANK_FILES", "rank_layout", "rank_tensors"]

#: Names of the files of ranks, of which a directory has one; each is a checkpoint by itself.
RANK_FILES = ("model_optim_rng.pt", "model_rng.pt", "model_weights.ckpt")

RANK_DIRECTORY = re.compile(r"mp_rank_\d{2}(?:_\d{3}){0,2}|tp_rank_\d{2}_pp_rank_\d{3}", re.ASCII)

#: Oldest version of Megatron's files that is read.
_VERSION = 2

#: Most directories in which a file of a rank is looked for: each is a request.
_TRIED = 4

_NUMBER = re.compile(r"\d+")
_MODEL = re.compile(r"model\d{0,3}", re.ASCII)


def rank_layout(
    directory: Directory, ranks: Collection[str], exists: Callable[[str], bool], limits: Limits, notes: tuple[str, ...]
) -> CheckpointLayout | None:
    """Return the layout of a directory that holds directories of ranks; None if they do not have the files of ranks.

    Args:
        directory: The directory.
        ranks: Names in it that match ``RANK_DIRECTORY``.
        exists: Whether there is a file in it.
        limits: Bounds the number of files.
        notes: Notes for the report.

    Raises:
        FormatError: The names have different forms.
        LimitError: There are more ranks than the limits allow.
    """
    forms = {_NUMBER.sub(lambda found: f"{{:0{len(found[0])}}}", name) for name in ranks}
    if len(forms) > 1:
        problem, found = "the directories of ranks have different forms", first_names(sorted(ranks))
        raise FormatError(problem, file=directory.path, expected="one form", found=found)
    counts = [max(map(int, numbers)) + 1 for numbers in zip(*map(_NUMBER.findall, ranks), strict=True)]
    check_limit(limits, "files", prod(counts), "the number of ranks", file=directory.path)
    some = sorted(ranks)[:_TRIED]
    file = next((file for file in RANK_FILES if any(exists(f"{rank}/{file}") for rank in some)), None)
    if file is None:
        return None
    files = tuple(f"{form.format(*rank)}/{file}" for form in forms for rank in product(*map(range, counts)))
    return CheckpointLayout(path=directory.path, directory=directory, kind="ranks", files=files, notes=notes)


def rank_tensors(name: str, tree: object, limits: Limits) -> dict[str, object] | None:
    """Return the tensors of a rank by their prefixed names, or None if its file holds no model.

    Args:
        name: Name of the file, below that of its directory.
        tree: Its object.
        limits: Bounds for flattening it.

    Raises:
        UnsupportedError: An old version of Megatron wrote it.
        FormatError: Two of its tensors have one name.
    """
    if not isinstance(tree, dict):
        return None
    version = tree.get("checkpoint_version", _VERSION)
    if type(version) not in (int, float) or version < _VERSION:
        problem = "a checkpoint of Megatron from 2020 or earlier, which orders the rows of attention differently"
        raise UnsupportedError(problem, file=name, expected=f"checkpoint_version {_VERSION} or newer", found=version)
    models = {key: value for key, value in tree.items() if isinstance(key, str) and _MODEL.fullmatch(key)}
    part: object = models or tree.get("state_dict", tree)
    if isinstance(models.get("model"), Mapping):
        part = models["model"]
    prefix = name.partition("/")[0]
    found = {**trees.unsupported(part), **trees.flatten(part, limits)}
    return {f"{prefix}.{key}": value for key, value in found.items() if "_extra_state" not in key} or None
