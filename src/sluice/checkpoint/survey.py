"""What a checkpoint directory is, from the names in it: which files to open, and what they are to each other.

Asked in this order; the first that is there is taken:

1. The model files of transformers, diffusers and peft: a whole file, then the index of a sharded one, safetensors
   before pickles::

       model.safetensors                    model.safetensors.index.json
       pytorch_model.bin                    pytorch_model.bin.index.json
       diffusion_pytorch_model.safetensors  diffusion_pytorch_model.safetensors.index.json
       diffusion_pytorch_model.bin          diffusion_pytorch_model.bin.index.json
       adapter_model.safetensors            adapter_model.safetensors.index.json
       adapter_model.bin                    adapter_model.bin.index.json

   Of a variant (``model.fp16.safetensors``, ``model.safetensors.index.fp16.json``) only where no file without one is
   there, and only one variant is. What else stands beside them is no model; training states are named in a note.
2. The only other ``*.index.json``.
3. ``.metadata``: a torch.distributed.checkpoint directory, or what is left of one whose writing never ended.
4. Parts: every ``*.safetensors``. Where their names count (``-00001-of-00003``), all must be there.
5. Parameters: every ``*.pt``, each one tensor; its name is that of the file without ``.pt``.

The directory is listed once and nothing in it is looked at: the kinds of its entries come with the listing. Nested
directories are not searched. FIFOs, sockets and devices are passed over, and said so where their names matter.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

from sluice._errors import (
    CheckpointError,
    FormatError,
    IncompleteCheckpointError,
    LimitError,
    PathEscapeError,
    ReadError,
    UnsupportedError,
)
from sluice._options import Limits
from sluice.formats.divided import divided_directory
from sluice.formats.foreign import HINTING_NAME, directory_hint
from sluice.formats.shard_index import ShardIndex, read_shard_index

__all__ = [
    "METADATA_FILE",
    "PARAMETER_SUFFIX",
    "Layout",
    "check_inside",
    "index_layout",
    "optimizer_files",
    "survey",
]

PARAMETER_SUFFIX = ".pt"

#: What describes a torch.distributed.checkpoint directory.
METADATA_FILE = ".metadata"

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

#: Not the number of a shard: ``model.fp16-00001-of-00002.safetensors`` belongs to an index.
_VARIANT = r"(?:\.(?P<variant>(?![^.]*-\d{5}-of-\d{5}\.)[^.]+))?"
_STEM = "|".join(sorted({stem for pair in _STEMS for stem in pair}))
_MODEL_FILE = re.compile(rf"(?P<stem>{_STEM}){_VARIANT}(?P<rest>\.safetensors|\.bin)")
_MODEL_INDEX = re.compile(rf"(?P<stem>(?:{_STEM})\.(?:safetensors|bin)\.index){_VARIANT}(?P<rest>\.json)")
_FURTHER_MODEL = re.compile(rf"(?:{_STEM})_\d+(?:\.safetensors|\.bin)")  # accelerate numbers what it prepared
_OPTIMIZER_FILE = re.compile(r"optimizer(?:_\d+)?\.(?:bin|pt)")  # of transformers' Trainer and of accelerate
_OPTIMIZER_DIRECTORY = re.compile(r"optimizer(?:_\d+)?")  # of accelerate with FSDP: a distributed checkpoint
_ANY_INDEX = re.compile(r".+\.index(\.[^.]+)?\.json")
_NUMBERED = re.compile(r"(?P<before>.*-)(?P<number>\d{5})-of-(?P<count>\d{5})(?P<after>.*\.safetensors)")

#: What accelerate and the Trainer of transformers write beside a model.
_TRAINING_STATE = re.compile(r"(optimizer|scheduler|scaler)(_\d+)?\.(bin|pt)")

#: How torch.distributed.checkpoint's writer for Hugging Face names the shard of one rank.
_RANK_SHARD = re.compile(r"shard-\d{5}-.+\.safetensors")

#: Parts of a distributed checkpoint without its metadata: data, and metadata of one rank or being written.
_DISTRIBUTED_PARTS = (".distcp", METADATA_FILE, f"{METADATA_FILE}.tmp")

#: Names that do not end in one of these play no part.
_SUFFIXES = (_PARTS_SUFFIX, ".bin", PARAMETER_SUFFIX, ".json", *_DISTRIBUTED_PARTS)

#: Names that a message lists.
_SHOWN = 8

#: Names that are kept for what they tell.
_HINTS = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Which files make up a checkpoint, before any of them is opened."""

    #: What was surveyed: the directory or the index file; for messages.
    path: str
    #: What ``files`` are relative to.
    directory: str
    #: ``whole``: one model file; ``shards``: parts with an index; ``parts``: state dicts without repetition;
    #: ``parameters``: one tensor each; ``distributed``: what the metadata file says.
    kind: Literal["whole", "shards", "parts", "parameters", "distributed"]
    #: Names of the files, relative, with forward slashes. Not all of them need be there; ``distributed`` has one.
    files: tuple[str, ...]
    #: For ``shards``: what the index says.
    shard_index: ShardIndex | None = None
    #: What a reader of the report should know, a sentence each.
    notes: tuple[str, ...] = ()


def optimizer_files(directory: str) -> list[str]:
    """Return the paths of the optimizers' states that stand in a directory beside a model; none for a file.

    Raises:
        ReadError: The directory cannot be listed.
    """
    try:
        with os.scandir(directory) as listing:
            names = sorted(
                entry.name
                for entry in listing
                if _OPTIMIZER_FILE.fullmatch(entry.name)
                or (
                    _OPTIMIZER_DIRECTORY.fullmatch(entry.name)
                    and os.path.exists(os.path.join(entry.path, METADATA_FILE))
                )
            )
    except (NotADirectoryError, FileNotFoundError):
        return []
    except OSError as error:
        raise ReadError(f"listing failed: {error.strerror}", file=directory) from error
    return [os.path.join(directory, name) for name in names]


def survey(directory: str, limits: Limits) -> Layout:
    """Return what a directory is.

    Raises:
        FormatError: It holds nothing that sluice knows, or several things of which none is preferred.
        UnsupportedError: It is of a kind that sluice does not read.
        CheckpointError: Its index file is not what the format allows.
        ReadError: It cannot be listed.
    """
    listing = _list(directory)
    chosen, notes = _choose_model(directory, listing.names)
    notes = (*listing.notes, *notes)
    if chosen is None:
        chosen = _only_index(directory, listing.names)
    if chosen is not None:
        if chosen.endswith(".json"):
            check_inside(directory, chosen, limits)
            return index_layout(os.path.join(directory, chosen), limits, notes=notes)
        return Layout(path=directory, directory=directory, kind="whole", files=(chosen,), notes=notes)
    if METADATA_FILE in listing.names:
        return Layout(path=directory, directory=directory, kind="distributed", files=(METADATA_FILE,), notes=notes)
    _check_distributed_parts(directory, listing.names)
    divided = divided_directory(directory)
    if divided is not None:
        raise UnsupportedError(f"the directory holds {divided.what}", file=directory, advice=divided.advice)
    parts = _complete({name for name in listing.names if name.endswith(_PARTS_SUFFIX)}, limits)
    parameters = {name for name in listing.names if name.endswith(PARAMETER_SUFFIX)}
    files = tuple(sorted(parts or parameters))
    if not files:
        raise _nothing_usable(directory, listing)
    if len(files) > limits.files:
        expected = f"at most {limits.files}"
        raise LimitError("the directory passes the limit 'files'", file=directory, expected=expected, found=len(files))
    if parts and parameters:
        notes = (*notes, f"Left out beside the {_PARTS_SUFFIX} files: {_joined(sorted(parameters))}.")
    kind: Literal["parts", "parameters"] = "parts" if parts else "parameters"
    return Layout(path=directory, directory=directory, kind=kind, files=files, notes=notes)


def index_layout(path: str, limits: Limits, *, notes: tuple[str, ...] = ()) -> Layout:
    """Return the shards of an index file.

    Raises:
        CheckpointError: The file is not what the format allows.
        PathEscapeError: It names a file outside its directory.
    """
    index = read_shard_index(path, limits)
    files = tuple(sorted(set(index.weight_map.values())))
    directory = os.path.dirname(path)
    return Layout(path=path, directory=directory, kind="shards", files=files, shard_index=index, notes=notes)


def check_inside(directory: str, file: str, limits: Limits) -> None:
    """Check that a file of a directory does not lead out of it through a symbolic link, unless the limits allow that.

    Raises:
        PathEscapeError: It leads outside.
    """
    if limits.symlinks_outside:
        return
    path = os.path.join(directory, file)
    real = Path(os.path.realpath(path))
    if not real.is_relative_to(os.path.realpath(directory)):
        raise PathEscapeError("a symbolic link leads out of the checkpoint's directory", file=path, found=str(real))


class _Listing(NamedTuple):
    """The entries of a directory."""

    #: Regular files and links whose names can matter.
    names: set[str]
    #: The first names of all kinds, for messages, and how many entries there are.
    first: list[str]
    total: int
    notes: tuple[str, ...]
    #: Names that tell what a directory is which holds none that matter, files and directories.
    hints: list[str]


def _list(directory: str) -> _Listing:
    names: set[str] = set()
    first: list[str] = []
    special: list[str] = []
    hints: list[str] = []
    total = 0
    try:
        with os.scandir(directory) as entries:
            for entry in entries:
                total += 1
                if len(first) < _SHOWN:
                    first.append(entry.name)
                if len(hints) < _HINTS and HINTING_NAME.fullmatch(entry.name):
                    hints.append(entry.name)
                if not entry.name.endswith(_SUFFIXES) or entry.is_dir(follow_symlinks=False):
                    continue
                if entry.is_symlink() or entry.is_file(follow_symlinks=False):
                    names.add(entry.name)
                else:
                    special.append(entry.name)
    except OSError as error:
        raise ReadError(f"the directory cannot be listed: {error.strerror}", file=directory) from error
    notes = (f"Passed over, as they are no regular files: {_joined(sorted(special))}.",) if special else ()
    return _Listing(names, first, total, notes, hints)


def _check_distributed_parts(directory: str, names: set[str]) -> None:
    """Check that nothing is left of a distributed checkpoint that never got its metadata, or got it elsewhere."""
    left = sorted(name for name in names if name.endswith(_DISTRIBUTED_PARTS))
    if left:
        raise IncompleteCheckpointError(
            f"this is a torch.distributed.checkpoint directory without {METADATA_FILE}, which is written last",
            file=directory,
            expected=METADATA_FILE,
            found=_joined(left),
        )
    shards = sorted(filter(_RANK_SHARD.fullmatch, names))
    if shards:
        problem = (
            "these are the shards of a distributed checkpoint as safetensors, each of which holds parts of tensors"
        )
        raise UnsupportedError(problem, file=directory, found=_joined(shards))


class _Candidate(NamedTuple):
    rank: int
    name: str
    variant: str | None


def _choose_model(directory: str, names: set[str]) -> tuple[str | None, tuple[str, ...]]:
    """Return the preferred model file or index, and what to say of the choice."""
    found = sorted(candidate for candidate in map(_candidate, names) if candidate)
    plain = [candidate for candidate in found if candidate.variant is None]
    variants = sorted({candidate.variant for candidate in found if candidate.variant is not None})
    if not found:
        return None, ()
    if not plain and len(variants) > 1:
        raise FormatError(
            "the directory holds several variants of the model; give the path of a file or an index instead",
            file=directory,
            expected="one variant",
            found=_joined([candidate.name for candidate in found]),
        )
    chosen = (plain or found)[0]
    others = [candidate.name for candidate in found if candidate is not chosen]
    others += sorted(name for name in names if _FURTHER_MODEL.fullmatch(name))
    notes = []
    if not plain:
        notes.append(f"Only the variant {variants[0]!r} of the model is there.")
    if others:
        notes.append(f"{chosen.name} was taken, as it comes first by preference; left out: {_joined(others)}.")
    beside = sorted(filter(_TRAINING_STATE.fullmatch, names))
    if beside:
        notes.append(f"Beside the model, each a checkpoint of its own: {_joined(beside)}.")
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
        problem = "the directory holds several shard indexes; give the path of one instead"
        raise FormatError(problem, file=directory, expected="one index", found=_joined(indexes))
    return indexes[0] if indexes else None


def _complete(parts: set[str], limits: Limits) -> set[str]:
    """Return the names of parts together with those that their numbering says must exist, up to the limit."""
    files = set(parts)
    counted = {(match["before"], match["count"], match["after"]) for match in map(_NUMBERED.fullmatch, parts) if match}
    for before, count, after in counted:
        first = 0 if f"{before}00000-of-{count}{after}" in parts else 1
        files.update(f"{before}{number:05}-of-{count}{after}" for number in range(first, first + int(count)))
        if len(files) > limits.files:
            break
    return files


def _nothing_usable(directory: str, listing: _Listing) -> CheckpointError:
    more = f" and {listing.total - len(listing.first)} more" if listing.total > len(listing.first) else ""
    hint = directory_hint(listing.hints)
    return (hint.error if hint else FormatError)(
        "the directory holds no checkpoint that sluice knows (nested directories are not searched)",
        file=directory,
        expected=f"{', '.join(_PREFERENCE[:4])}, another *.index.json, *{_PARTS_SUFFIX}, or one *{PARAMETER_SUFFIX} "
        "file for each parameter",
        found="; ".join([", ".join(map(repr, sorted(listing.first))) + more or "nothing", *listing.notes]),
        advice=hint.advice if hint else None,
    )


def _joined(names: Sequence[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more
