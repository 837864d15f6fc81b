"""The kind of a checkpoint directory, decided from the names in it: the files to open and how they relate.

The rules are tried in this order; the first that applies decides:

1. The model files of transformers, diffusers and peft: a whole file, then the index of a sharded one, safetensors
   before pickles::

       model.safetensors                    model.safetensors.index.json
       pytorch_model.bin                    pytorch_model.bin.index.json
       diffusion_pytorch_model.safetensors  diffusion_pytorch_model.safetensors.index.json
       diffusion_pytorch_model.bin          diffusion_pytorch_model.bin.index.json
       adapter_model.safetensors            adapter_model.safetensors.index.json
       adapter_model.bin                    adapter_model.bin.index.json

   A variant (``model.fp16.safetensors``, ``model.safetensors.index.fp16.json``) is taken only if there is no file
   without a variant, and only one variant. Other files next to them are not part of the model; training states are
   named in a note.
2. The only other ``*.index.json``.
3. A file or a directory for each rank, as Megatron and NeMo write them (``rank_directories``).
4. ``.metadata``: a torch.distributed.checkpoint directory, or the remains of one that was never completed.
5. The files of DeepSpeed's ZeRO, here or below a directory that ``latest`` names (``zero_files``).
6. Parts: every ``*.safetensors``. If their names are numbered (``-00001-of-00003``), all of them must exist.
7. Parameters: every ``*.pt``, each one tensor, named after the file without ``.pt``.

The directory is listed once and its entries are not examined: their kinds come with the listing. Other subdirectories
are not searched. FIFOs, sockets and devices are skipped, with a note if their names match.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import closing
from functools import partial
from itertools import filterfalse
from typing import Any, Literal, NamedTuple

from msgspec.structs import replace

from sluice._errors import (
    CheckpointError,
    FormatError,
    IncompleteCheckpointError,
    MissingFileError,
    SluiceError,
    UnsupportedError,
)
from sluice._messages import check_limit, first_names, listed
from sluice._options import Limits
from sluice.checkpoint.open_file import METADATA_FILE, PARAMETER_SUFFIX, CheckpointLayout
from sluice.checkpoint.rank_directories import RANK_DIRECTORY, RANK_FILES, rank_layout
from sluice.checkpoint.zero_files import LATEST, zero_layout
from sluice.formats.divided import divided_directory
from sluice.formats.foreign import HINTING_NAME, directory_hint
from sluice.formats.shard_index import read_shard_index
from sluice.sources.directory import Directory, DirectoryEntry
from sluice.sources.opening import Place, missing_advice
from sluice.sources.protocol import Source

__all__ = ["index_layout", "listed_layout", "optimizer_files", "survey"]

_PARTS_SUFFIX = ".safetensors"

#: Stems of safetensors and of pickled files, the preferred first.
_STEMS = (
    ("model", "pytorch_model"),
    ("diffusion_pytorch_model", "diffusion_pytorch_model"),
    ("adapter_model", "adapter_model"),
)

#: The names of (1) without variants, by preference.
_PREFERENCE = tuple(
    name
    for safetensors, pickled in _STEMS
    for file in (f"{safetensors}.safetensors", f"{pickled}.bin")
    for name in (file, f"{file}.index.json")
)

#: Excludes shard numbers: ``model.fp16-00001-of-00002.safetensors`` belongs to an index.
_VARIANT = r"(?:\.(?P<variant>(?![^.]*-\d{5}-of-\d{5}\.)[^.]+))?"
_STEM = "|".join(sorted({stem for pair in _STEMS for stem in pair}))
_MODEL_FILE = re.compile(rf"(?P<stem>{_STEM}){_VARIANT}(?P<rest>\.safetensors|\.bin)")
_MODEL_INDEX = re.compile(rf"(?P<stem>(?:{_STEM})\.(?:safetensors|bin)\.index){_VARIANT}(?P<rest>\.json)")
_FURTHER_MODEL = re.compile(rf"(?:{_STEM})_\d+(?:\.safetensors|\.bin)")  # accelerate numbers the models it prepares
_OPTIMIZER_FILE = re.compile(r"optimizer(?:_\d+)?\.(?:bin|pt)")  # transformers' Trainer, accelerate
_OPTIMIZER_DIRECTORY = re.compile(r"optimizer(?:_\d+)?")  # accelerate with FSDP: a distributed checkpoint
_ANY_INDEX = re.compile(r".+\.index(\.[^.]+)?\.json")
_NUMBERED = re.compile(r"(?P<before>.*-)(?P<number>\d{5})-of-(?P<count>\d{5})(?P<after>.*\.safetensors)")

#: Training states that accelerate and the Trainer of transformers write next to a model.
_TRAINING_STATE = re.compile(r"(optimizer|scheduler|scaler)(_\d+)?\.(bin|pt)")

#: Shard of one rank, as torch.distributed.checkpoint's writer for Hugging Face names it. A rank may have no tensors for
#: some of the numbered files.
_RANK_SHARD = re.compile(r"shard-\d{5}-.+\.safetensors")

#: Parts of a distributed checkpoint: data, and metadata that is complete or still being written.
_DISTRIBUTED_PARTS = (".distcp", METADATA_FILE, f"{METADATA_FILE}.tmp")

#: Suffixes of all names that can matter.
_SUFFIXES = (_PARTS_SUFFIX, ".bin", PARAMETER_SUFFIX, ".json", *_DISTRIBUTED_PARTS, *RANK_FILES, LATEST)

#: Directory of a distributed checkpoint in NeMo's archives.
_DISTRIBUTED_DIRECTORY = "model_weights"
_DISTRIBUTED_METADATA = f"{_DISTRIBUTED_DIRECTORY}/{METADATA_FILE}"

#: Most names that a message lists.
_SHOWN = 8

#: Most names that are kept as hints.
_HINTS = 1000

#: Advice for a directory that holds more than one checkpoint.
_CHOOSE = "Pass the path of one file or index instead."


class _ListedFiles:
    """Files that the caller listed one by one; see ``Directory``. Their names are the titles of their places."""

    def __init__(self, place: Place) -> None:
        self.path = place.title
        self._places = {member.title: member for member in place.members}
        self._commits: dict[Any, Any] = {}

    def entries(self) -> Iterator[DirectoryEntry]:
        return iter(())

    def open(self, name: str) -> Source:
        return self._places[name].open_file(self._commits)

    def check_inside(self, name: str) -> None:
        """Return: the caller chose each file, links included."""


def listed_layout(place: Place, limits: Limits) -> CheckpointLayout:
    """Return the layout of files that the caller listed as one checkpoint; each holds a state dict.

    Raises:
        LimitError: There are more than ``limits.files``.
        MissingFileError: There is nothing at some of the paths.
        UnsupportedError: One is a directory.
    """
    names = tuple(member.title for member in place.members)
    check_limit(limits, "files", len(names), "the list", file=place.title)
    local = [member.title for member in place.members if member.kind == "local"]
    for path in filter(os.path.isdir, local):
        problem = "the list names a directory among files"
        raise UnsupportedError(problem, file=path, advice="Name files, or pass the directory alone.")
    missing = [path for path in local if "\0" not in path and not os.path.lexists(path)]
    if missing:
        problem = f"{len(missing)} files of the list do not exist: {first_names(missing)}"
        one = "the file does not exist" if len(missing) == 1 else problem
        raise MissingFileError(one, file=missing[0], advice=missing_advice(missing[0]))
    return CheckpointLayout(path=place.title, directory=_ListedFiles(place), kind="parts", files=names)


def optimizer_files(directory: Directory) -> list[str]:
    """Return the names of the optimizer states in a directory, next to a model.

    Raises:
        ReadError: The directory cannot be listed.
    """
    return sorted(
        entry.name
        for entry in directory.entries()
        if _OPTIMIZER_FILE.fullmatch(entry.name)
        or (_OPTIMIZER_DIRECTORY.fullmatch(entry.name) and _exists(directory, f"{entry.name}/{METADATA_FILE}"))
    )


def _exists(directory: Directory, name: str) -> bool:
    try:
        directory.open(name).close()
    except SluiceError as error:
        # Otherwise it exists, but is empty or not a file.
        return not isinstance(error, MissingFileError) and not isinstance(error.__cause__, OSError)
    return True


def survey(directory: Directory, limits: Limits) -> CheckpointLayout:
    """Return the layout of a checkpoint directory.

    Raises:
        FormatError: It holds no recognized checkpoint, or several without a preferred one.
        UnsupportedError: It is of a kind that sluice does not read.
        CheckpointError: Its index file violates the format.
        ReadError: It cannot be listed.
    """
    path = directory.path
    listing = _list(directory)
    chosen, notes = _choose_model(path, listing.names)
    notes = (*listing.notes, *notes)
    if chosen is None:
        chosen = _only_index(path, listing.names) or next(filter(listing.names.__contains__, RANK_FILES), None)
    if chosen is not None:
        if chosen.endswith(".json"):
            if not limits.symlinks_outside:
                directory.check_inside(chosen)
            with closing(directory.open(chosen)) as index_file:
                return index_layout(index_file, directory, limits, notes=notes)
        return CheckpointLayout(path=path, directory=directory, kind="whole", files=(chosen,), notes=notes)
    ranks = rank_layout(directory, listing.ranks, partial(_exists, directory), limits, notes) if listing.ranks else None
    if ranks is not None:
        return ranks
    metadata = METADATA_FILE if METADATA_FILE in listing.names else _DISTRIBUTED_METADATA
    if metadata in listing.names or (listing.has_weights and _exists(directory, metadata)):
        return CheckpointLayout(path=path, directory=directory, kind="distributed", files=(metadata,), notes=notes)
    _check_distributed_parts(path, listing.names)
    zero = zero_layout(directory, listing.names, limits)
    return replace(zero, notes=notes) if zero is not None else _parts(directory, listing, limits, notes)


def _parts(directory: Directory, listing: _Listing, limits: Limits, notes: tuple[str, ...]) -> CheckpointLayout:
    """Return the layout of files that do not tell of each other."""
    path, divided = directory.path, divided_directory(directory)
    if divided is not None:
        raise UnsupportedError(f"the directory holds {divided.what}", file=path, advice=divided.advice)
    parts = _complete({name for name in listing.names if name.endswith(_PARTS_SUFFIX)}, limits)
    parameters = {name for name in listing.names if name.endswith(PARAMETER_SUFFIX)}
    files = tuple(sorted(parts or parameters))
    if not files:
        raise _nothing_usable(path, listing)
    check_limit(limits, "files", len(files), "the directory", file=path)
    if parts and parameters:
        notes = (*notes, f"{listed(f'Left out, because there are {_PARTS_SUFFIX} files', sorted(parameters))}.")
    kind: Literal["parts", "parameters"] = "parts" if parts else "parameters"
    return CheckpointLayout(path=path, directory=directory, kind=kind, files=files, notes=notes)


def index_layout(
    index_file: Source, directory: Directory, limits: Limits, *, notes: tuple[str, ...] = ()
) -> CheckpointLayout:
    """Return the layout that an index file describes.

    Args:
        index_file: The open index file; stays open.
        directory: The directory that holds it.
        limits: Bounds of the index.
        notes: Notes for the report.

    Raises:
        CheckpointError: The file violates the format.
        PathEscapeError: It names a file outside its directory.
    """
    index = read_shard_index(index_file, limits)
    files = tuple(sorted(set(index.weight_map.values())))
    return CheckpointLayout(
        path=index_file.path, directory=directory, kind="shards", files=files, shard_index=index, notes=notes
    )


class _Listing(NamedTuple):
    """The entries of a directory."""

    #: Regular files and links with a matching suffix.
    names: set[str]
    #: The first names of all kinds, for messages.
    first: list[str]
    #: Number of entries.
    total: int
    notes: tuple[str, ...]
    #: Names of files and directories that hint at the kind of a directory without matching names.
    hints: list[str]
    #: Names of directories of ranks.
    ranks: list[str]
    #: Whether there is a directory of NeMo's weights.
    has_weights: bool


def _list(directory: Directory) -> _Listing:
    names: set[str] = set()
    first: list[str] = []
    special: list[str] = []
    hints: list[str] = []
    ranks: list[str] = []
    has_weights = False
    total = 0
    for entry in directory.entries():
        total += 1
        name = entry.name
        if len(first) < _SHOWN:
            first.append(name)
        if len(hints) < _HINTS and HINTING_NAME.fullmatch(name):
            hints.append(name)
        if RANK_DIRECTORY.fullmatch(name) and entry.kind in {"directory", "link"}:
            ranks.append(name)
        has_weights |= name == _DISTRIBUTED_DIRECTORY
        if not name.endswith(_SUFFIXES):
            continue
        kind = entry.kind
        if kind == "special":
            special.append(name)
        elif kind != "directory":
            names.add(name)
    notes = (f"{listed('Skipped, because they are not regular files', sorted(special))}.",) if special else ()
    return _Listing(names, first, total, notes, hints, ranks, has_weights)


def _check_distributed_parts(directory: str, names: set[str]) -> None:
    """Check that the directory holds no parts of a distributed checkpoint whose metadata is missing."""
    left = sorted(name for name in names if name.endswith(_DISTRIBUTED_PARTS))
    if any(name.startswith("__") and name.endswith(METADATA_FILE) for name in left):
        problem = "each rank wrote metadata of its own (use_collectives=False), which only those ranks can load"
        advice = "Load it on as many ranks with torch.distributed.checkpoint, and save it with use_collectives=True."
        raise UnsupportedError(problem, file=directory, found=listed("files", left), advice=advice)
    if left:
        raise IncompleteCheckpointError(
            f"the torch.distributed.checkpoint directory has no {METADATA_FILE}, which is written last",
            file=directory,
            expected=METADATA_FILE,
            found=listed("files", left),
        )


class _Candidate(NamedTuple):
    rank: int
    name: str
    variant: str | None


def _choose_model(directory: str, names: set[str]) -> tuple[str | None, tuple[str, ...]]:
    """Return the preferred model file or index, and notes on the choice."""
    candidates = sorted(candidate for candidate in map(_candidate, names) if candidate)
    plain = [candidate for candidate in candidates if candidate.variant is None]
    variants = sorted({candidate.variant for candidate in candidates if candidate.variant is not None})
    if not candidates:
        return None, ()
    if not plain and len(variants) > 1:
        raise FormatError(
            "the directory holds several variants of the model",
            file=directory,
            expected="one variant",
            found=listed("files", [candidate.name for candidate in candidates]),
            advice=_CHOOSE,
        )
    chosen = (plain or candidates)[0]
    others = [candidate.name for candidate in candidates if candidate is not chosen]
    others += sorted(name for name in names if _FURTHER_MODEL.fullmatch(name))
    notes = []
    if not plain:
        notes.append(f"The model exists only as the variant {variants[0]!r}.")
    if others:
        left_out = listed("left out", others)
        notes.append(f"{chosen.name} was chosen, as it comes first by preference; {left_out}.")
    states = sorted(filter(_TRAINING_STATE.fullmatch, names))
    if states:
        notes.append(f"{listed('Next to the model, each a separate checkpoint', states)}.")
    return chosen.name, tuple(notes)


def _candidate(name: str) -> _Candidate | None:
    match = _MODEL_FILE.fullmatch(name) or _MODEL_INDEX.fullmatch(name)
    plain = match["stem"] + match["rest"] if match else ""
    if match is None or plain not in _PREFERENCE:
        return None
    return _Candidate(_PREFERENCE.index(plain), name, match["variant"])


def _only_index(directory: str, names: set[str]) -> str | None:
    indexes = sorted(name for name in names if _ANY_INDEX.fullmatch(name))
    if len(indexes) > 1:
        problem, found = "the directory holds several shard indexes", listed("indexes", indexes)
        raise FormatError(problem, file=directory, expected="one index", found=found, advice=_CHOOSE)
    return indexes[0] if indexes else None


def _complete(parts: set[str], limits: Limits) -> set[str]:
    """Return the names of parts and those that their numbering implies, up to the limit."""
    files = set(parts)
    numbered = map(_NUMBERED.fullmatch, filterfalse(_RANK_SHARD.fullmatch, parts))
    counted = {(match["before"], match["count"], match["after"]) for match in numbered if match}
    for before, count, after in counted:
        first = 0 if f"{before}00000-of-{count}{after}" in parts else 1
        files.update(f"{before}{number:05}-of-{count}{after}" for number in range(first, first + int(count)))
        if len(files) > limits.files:
            break
    return files


def _nothing_usable(directory: str, listing: _Listing) -> CheckpointError:
    more = f" and {listing.total - len(listing.first)} more" if listing.total > len(listing.first) else ""
    kind, advice = directory_hint(listing.hints)
    error = kind(
        "the directory holds no recognized checkpoint (subdirectories are not searched)",
        file=directory,
        expected=f"{', '.join(_PREFERENCE[:4])}, another *.index.json, *{_PARTS_SUFFIX}, or one *{PARAMETER_SUFFIX} "
        "file for each parameter",
        found="; ".join([", ".join(map(repr, sorted(listing.first))) + more or "nothing", *listing.notes]),
        advice=advice,
    )
    error.foreign = not isinstance(error, IncompleteCheckpointError)
    return error
