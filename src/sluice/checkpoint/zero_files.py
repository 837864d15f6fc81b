"""Directories of DeepSpeed's ZeRO: recognized by names, and the files that make one up.

Layout::

    latest                                                  text: TAG, the name of a directory
    TAG/mp_rank_00_model_states.pt                          stages 1 and 2
    TAG/zero_pp_rank_R_mp_rank_00_model_states.pt           stage 3, one for each rank R
    TAG/[bf16_]zero_pp_rank_R_mp_rank_00_optim_states.pt    one for each rank

A universal checkpoint has the model states, and files of each parameter instead of those of each rank::

    TAG/zero/optimizer_state.pt
    TAG/zero/NAME/fp32.pt, exp_avg.pt, exp_avg_sq.pt, step.pt

Lightning and accelerate write the same below a directory of theirs; their ``latest`` names it. The first file of a rank
tells the number of ranks, so directories that cannot be listed do as well.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection
from contextlib import closing
from functools import partial
from itertools import chain
from typing import Literal, TypeAlias

from sluice._errors import CheckpointError, FormatError, IncompleteCheckpointError, PathEscapeError
from sluice._messages import check_limit
from sluice._options import TEXT_ENCODING, Limits
from sluice.checkpoint.open_file import CheckpointLayout, open_member
from sluice.formats.deepspeed.states import model_states, rank_states, universal_states
from sluice.formats.detection import detect
from sluice.formats.shard_index import is_plain_path
from sluice.sources.directory import Directory
from sluice.sources.protocol import Source
from sluice.sources.wrappers import ReadAhead

__all__ = ["LATEST", "MODEL_STATES", "OPTIMIZER_STATES", "UNIVERSAL_OPTIMIZER", "zero_layout"]

MODEL_STATES, OPTIMIZER_STATES = "_model_states.pt", "_optim_states.pt"

#: First file of a universal checkpoint, in the directory of its parameters.
UNIVERSAL_OPTIMIZER = "optimizer_state.pt"
_PARAMETERS = "zero/"

LATEST, _TAG_BYTES = "latest", 255
_MODEL = f"mp_rank_00{MODEL_STATES}"
_FILE = re.compile(r"(?:(?:\w{1,8}_)?zero_pp_rank_\d+_)?mp_rank_\d+_(?:optim|model)_states\.pt", re.ASCII)

#: Files of each parameter in the optimizer of a universal checkpoint.
_STATES = ("exp_avg.pt", "exp_avg_sq.pt")

#: Opens a file of the directory, None if it does not exist; see ``open_member``.
_Open: TypeAlias = Callable[[str], Source | None]


def zero_layout(
    directory: Directory, names: Collection[str], limits: Limits, *, optimizer: bool = False
) -> CheckpointLayout | None:
    """Return the layout of a directory of DeepSpeed's; None for any other directory.

    Args:
        directory: The directory.
        names: The names of its files.
        limits: Bounds for hostile files.
        optimizer: Whether to read the state of the optimizer instead of the weights.

    Raises:
        CheckpointError: Its first files are damaged, missing or from different saves.
        LimitError: It has more than ``limits.files``.
    """
    opened = partial(open_member, directory, limits=limits)
    tag = "" if any(map(_FILE.fullmatch, names)) else _tag(names, opened)
    if tag is None:
        return None
    files = tuple(_Files(directory.path, tag, opened, limits).names(optimizer=optimizer))
    check_limit(limits, "files", len(files), "the DeepSpeed checkpoint", file=directory.path)
    kind: Literal["zero", "zero-optimizer"] = "zero-optimizer" if optimizer else "zero"
    return CheckpointLayout(path=directory.path, directory=directory, kind=kind, files=files)


def _tag(names: Collection[str], opened: _Open) -> str | None:
    """Return the path of the directory that ``latest`` names if it holds a file of DeepSpeed's, with a slash."""
    if LATEST not in names:
        return None
    try:
        source = opened(LATEST)
    except CheckpointError:
        return None  # a directory, or empty
    if source is None:
        return None
    with closing(source):
        text = source.read_at(0, nbytes) if (nbytes := source.identity.nbytes) <= _TAG_BYTES else b""
    tag = text.decode(errors="replace").strip()
    if not tag.isprintable() or not is_plain_path(tag):
        return None
    ranked = f"{tag}/zero_pp_rank_0_mp_rank_00"
    firsts = (f"{tag}/{_MODEL}", f"{ranked}{MODEL_STATES}", f"{ranked}{OPTIMIZER_STATES}")
    return f"{tag}/" if any(_exists(name, opened) for name in firsts) else None


def _exists(name: str, opened: _Open) -> bool:
    source = opened(name)
    if source is not None:
        source.close()
    return source is not None


class _Files:
    """The files below a tag."""

    def __init__(self, path: str, tag: str, opened: _Open, limits: Limits) -> None:
        self._path, self._tag, self._opened, self._limits = path, tag, opened, limits

    def names(self, *, optimizer: bool) -> list[str]:
        """Return the names of the files that are needed, those of ranks first."""
        starts = [start for start in ("", "bf16_") if self._exists(_ranked(0, OPTIMIZER_STATES, start))]
        if len(starts) > 1:
            problem = "the directory holds the optimizer states of two saves"
            expected, found = f"one of {_ranked(0, OPTIMIZER_STATES)} and bf16_...", "both"
            raise FormatError(problem, file=self._path, expected=expected, found=found)
        if not starts:
            return self._universal(optimizer=optimizer)
        first = self._tag + _ranked(0, OPTIMIZER_STATES, starts[0])
        states = rank_states(*self._tree(first))
        check_limit(self._limits, "files", states.world, "the DeepSpeed checkpoint", file=self._path)
        if self._exists(beyond := _ranked(states.world, OPTIMIZER_STATES, starts[0])):
            problem = "the files of the ranks are from saves with different numbers of ranks"
            raise FormatError(problem, file=self._path, expected=f"{states.world} ranks", found=beyond)
        ranks = [_ranked(rank, OPTIMIZER_STATES, starts[0]) for rank in range(states.world)]
        models = [_ranked(r, MODEL_STATES) for r in range(states.world)] if states.by_parameter else [_MODEL]
        return [self._tag + name for name in (*ranks, *models)]

    def _universal(self, *, optimizer: bool) -> list[str]:
        ranked, settings = not self._exists(_MODEL), _PARAMETERS + UNIVERSAL_OPTIMIZER
        first = _ranked(0, MODEL_STATES) if ranked else _MODEL
        if (ranked and not self._exists(first)) or not self._exists(settings):
            problem = "the optimizer states of rank 0 are missing, which hold its weights"
            expected = self._tag + _ranked(0, OPTIMIZER_STATES)
            advice = f"Find the missing files. Without ZeRO, DeepSpeed writes none: pass the path of {_MODEL}."
            raise IncompleteCheckpointError(problem, file=self._path, expected=expected, advice=advice)
        model = model_states(*self._tree(self._tag + first), self._limits)
        check_limit(self._limits, "files", model.world, "the DeepSpeed checkpoint", file=self._path)
        models = [_ranked(rank, MODEL_STATES) for rank in range(max(1, model.world))] if ranked else [first]
        own = ["fp32.pt"]
        if optimizer:
            step, _ = universal_states(*self._tree(self._tag + settings))
            own = [*_STATES, *(["step.pt"] if step is None else ())]
        names = list(chain.from_iterable(model.shapes))
        for name in names:
            if not is_plain_path(name):
                problem = "the name of a parameter is not a plain path below the directory"
                raise PathEscapeError(problem, file=model.file, tensor=name)
        parameters = [f"{_PARAMETERS}{name}/{state}" for name in names for state in own]
        return [self._tag + name for name in (settings, *models, *parameters)]

    def _exists(self, name: str) -> bool:
        return _exists(self._tag + name, self._opened)

    def _tree(self, name: str) -> tuple[object, str]:
        """Return the object in a file, and the path of the file."""
        source = self._opened(name)
        if source is None:
            raise IncompleteCheckpointError("a file is missing", file=self._path, expected=name)
        with closing(source):
            headers = ReadAhead(source)
            tree = detect(headers, encoding=TEXT_ENCODING).read_index(headers, self._limits).tree
        return tree, source.path


def _ranked(rank: int, what: str, start: str = "") -> str:
    return f"{start}zero_pp_rank_{rank}_mp_rank_00{what}"
