"""Model directories as Hugging Face libraries read them: one safetensors file, or shards and their index.

A crash at any moment leaves a directory that reads as the old model or as the new one:

1. All files are written under hidden names.
2. The shards are renamed. Nothing refers to their new names yet: if old shards have the usual names, the new names
   contain a token.
3. One step commits the model: the index is renamed. If the old or the new model is a single file, that file is removed
   or replaced instead, because readers prefer it to an index.
4. Files that only the old model needs are removed.

The directory is locked meanwhile, so hidden files of a set are known to be leftovers of killed saves. The hidden index
is durable before the first shard is renamed: it tells the next save which shards to remove. Shards that no index names
count as those of an old model: they are removed only where it may be replaced.
"""

from __future__ import annotations

import json
import os
import re
import secrets
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path

from msgspec import Struct

from sluice._errors import SaveError
from sluice.formats.safetensors.header import declare_ties
from sluice.writing.durable.directories import locked_directory, publish_set
from sluice.writing.durable.partial_files import hidden_stem, saving, syncing
from sluice.writing.durable.replacement import Replacement
from sluice.writing.safetensors import SafetensorsLayout, TensorOutline, lay_out_safetensors
from sluice.writing.uploads import Upload, UploadedFile

__all__ = ["Model", "ModelFiles", "plan_model_directory", "remove_files", "split_shards", "write_model_directory"]

_WHOLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"

#: Names of shards: the usual ones, and those with a token, used if the usual ones exist.
_SHARD = re.compile(r"model-([0-9a-f]{8}-)?\d{5}-of-\d{5}\.safetensors")


def split_shards(sizes: Mapping[str, int], limit_bytes: int | None) -> list[list[str]]:
    """Return the names of the tensors of each shard, in order; a tensor above the limit gets a shard of its own.

    Example:
        >>> split_shards({"a": 3, "b": 4, "c": 9}, 7)
        [['a', 'b'], ['c']]
    """
    shards: list[list[str]] = [[]]
    used = 0
    for name, nbytes in sizes.items():
        if shards[-1] and limit_bytes is not None and used + nbytes > limit_bytes:
            shards.append([])
            used = 0
        shards[-1].append(name)
        used += nbytes
    return shards


class Model(Struct, frozen=True, kw_only=True):
    """A model to write."""

    #: The tensors by name, each once.
    tensors: Mapping[str, TensorOutline]
    #: Further names of tensors: ``{name: stored name}``. Each is declared in the file that holds its tensor.
    ties: Mapping[str, str]
    #: ``__metadata__`` of each file.
    metadata: Mapping[str, str]
    #: Largest size of the tensors in one shard, in bytes; None for a single file.
    limit_bytes: int | None

    @property
    def nbytes(self) -> int:
        """Size of the tensors, in bytes."""
        return sum(tensor.nbytes for tensor in self.tensors.values())

    def layouts(self) -> list[SafetensorsLayout]:
        """Return the layout of each file of tensors.

        Raises:
            SaveError: The format cannot store a name or a dtype.
        """
        if self.limit_bytes is None:  # without further tables of 100,000 names
            return [lay_out_safetensors(self.tensors, declare_ties(self.ties, self.metadata))]
        names: defaultdict[str, list[str]] = defaultdict(list)
        for name, stored in self.ties.items():
            names[stored].append(name)
        return [
            lay_out_safetensors(
                {name: self.tensors[name] for name in shard},
                declare_ties({other: name for name in shard for other in names.get(name, ())}, self.metadata),
            )
            for shard in split_shards({name: tensor.nbytes for name, tensor in self.tensors.items()}, self.limit_bytes)
        ]


class ModelFiles(Struct, frozen=True, kw_only=True):
    """Planned files of a model; the last one commits it."""

    #: Name and layout of each file of tensors.
    shards: tuple[tuple[str, SafetensorsLayout], ...]
    #: Content of the index; empty for a single file.
    index: bytes
    #: Names of the files of the existing model, in the order in which they are removed.
    old: tuple[str, ...]

    @property
    def sizes(self) -> dict[str, int]:
        """Size of each file in bytes, by name."""
        sizes = {name: layout.nbytes for name, layout in self.shards}
        return {**sizes, _INDEX: len(self.index)} if self.index else sizes


def plan_model_directory(directory: Path | Upload, model: Model) -> ModelFiles:
    """Plan the files of a model; nothing is changed.

    Args:
        directory: The destination; it need not exist.
        model: The model.

    Raises:
        SaveError: The format cannot store a name or a dtype.
    """
    layouts = model.layouts()
    with saving(str(directory)):
        old = _model_files(directory)
    names = _shard_names(len(layouts), taken=old)
    held = {name: [tensor for tensor, _, _ in layout.tensors] for name, layout in zip(names, layouts, strict=True)}
    index = _index(held, model.nbytes) if len(layouts) > 1 else b""
    return ModelFiles(shards=tuple(zip(names, layouts, strict=True)), index=index, old=tuple(old))


def write_model_directory(
    directory: Path | Upload,
    model: Model,
    planned: ModelFiles,
    *,
    overwrite: bool,
    write: Callable[[SafetensorsLayout, Replacement | UploadedFile], None],
) -> list[str]:
    """Write a model and return the names of its files.

    Args:
        directory: The destination; created if it does not exist.
        model: The model.
        planned: Its plan, which is made again once the directory is locked.
        overwrite: Whether an existing model may be replaced.
        write: Writes the content of one file, without committing it.

    Raises:
        SaveError: The model was not written; an existing model is intact.
    """
    if isinstance(directory, Upload):
        return _upload(directory, planned, overwrite=overwrite, write=write)
    directory = directory.absolute()  # the process may change its own meanwhile
    with locked_directory(str(directory)) as locked:
        if locked:
            _remove_leftovers(directory)
        files = plan_model_directory(directory, model)
        _check_old(directory, files, overwrite=overwrite)
        with ExitStack() as stack:
            written = []
            for name, layout in files.shards:
                out = stack.enter_context(Replacement(directory / name, overwrite=True, in_set=True))
                write(layout, out)
                out.seal(nbytes=layout.nbytes)
                written.append(out)
            if files.index:
                out = stack.enter_context(Replacement(directory / _INDEX, overwrite=True, in_set=True))
                out.write_at(0, files.index)
                out.seal(nbytes=len(files.index))
                written.append(out)
            _publish(directory, written, files.old)
        remove_files(directory, [name for name in files.old if name not in files.sizes])
    return list(files.sizes)


def _check_old(directory: Path | Upload, files: ModelFiles, *, overwrite: bool) -> None:
    if files.old and not overwrite:
        problem = "the directory already contains a model; pass overwrite=True to replace it"
        raise SaveError(problem, file=str(directory), found=files.old[0])


def _upload(
    upload: Upload, files: ModelFiles, *, overwrite: bool, write: Callable[[SafetensorsLayout, UploadedFile], None]
) -> list[str]:
    """Upload the files, the one that commits the model last, and remove objects that only the old model needs."""
    _check_old(upload, files, overwrite=overwrite)
    for name, layout in files.shards:
        with upload.file(name) as out:
            write(layout, out)
            out.commit(nbytes=layout.nbytes)
    if files.index:
        with upload.file(_INDEX) as out:
            out.write_at(0, files.index)
            out.commit()
    upload.remove([name for name in files.old if name not in files.sizes])
    return list(files.sizes)


def _publish(directory: Path, files: Sequence[Replacement], old: Sequence[str]) -> None:
    """Rename the files of the new model, and commit it last."""
    whole = directory / _WHOLE
    if len(files) > 1 and _WHOLE in old:  # readers ignore the index until this file is removed
        publish_set(str(directory), files, whole.unlink, lambda: not os.path.lexists(whole))
    else:
        publish_set(str(directory), files[:-1], files[-1].publish, lambda: files[-1].is_published)


def _shard_names(count: int, *, taken: Iterable[str]) -> list[str]:
    """Return the usual names, or names with a token if any of them is taken."""
    if count == 1:
        return [_WHOLE]
    names = [f"model-{number:05d}-of-{count:05d}.safetensors" for number in range(1, count + 1)]
    if not set(names) & set(taken):
        return names
    token = secrets.token_hex(4)
    return [f"model-{token}-{number:05d}-of-{count:05d}.safetensors" for number in range(1, count + 1)]


def _model_files(directory: Path | Upload) -> list[str]:
    """Return the files of the existing model, the one that readers prefer first."""
    if isinstance(directory, Upload):
        present = directory.names()
    else:
        present = os.listdir(directory) if directory.is_dir() else []
    files = [name for name in (_WHOLE, _INDEX) if name in present]
    files += sorted(_shards_of(directory, _INDEX)) if _INDEX in files else []
    return [*files, *sorted({name for name in present if _SHARD.fullmatch(name)} - set(files))]


def _shards_of(directory: Path | Upload, index: str) -> set[str]:
    """Return the shards that an index names; none if it is damaged."""
    with suppress(OSError, ValueError, AttributeError, TypeError, KeyError, RecursionError):
        content = directory.read(index) if isinstance(directory, Upload) else (directory / index).read_bytes()
        shards = set(json.loads(content)["weight_map"].values())
        return {name for name in shards if re.fullmatch(r"[^/\\]+\.safetensors", name) and name.isprintable()}
    return set()


def _remove_leftovers(directory: Path) -> None:
    """Remove the leftovers of killed saves: hidden files, and renamed shards of a model that was never committed."""
    with saving(str(directory)):
        names = os.listdir(directory)
    hidden = [name for name in names if hidden_stem(name, in_set=True) is not None]
    indexes = [name for name in hidden if hidden_stem(name, in_set=True) == _INDEX]  # not shards of gigabytes
    uncommitted = set[str]().union(*(_shards_of(directory, name) for name in indexes))
    remove_files(directory, sorted(uncommitted.intersection(names) - _shards_of(directory, _INDEX) - {_WHOLE}))
    remove_files(directory, hidden)  # last: only a hidden index tells which shards are uncommitted


def _index(shards: Mapping[str, Iterable[str]], total_bytes: int) -> bytes:
    index = {
        "metadata": {"total_size": total_bytes},
        "weight_map": {name: file for file, names in shards.items() for name in names},
    }
    return json.dumps(index, indent=2, ensure_ascii=False).encode() + b"\n"


def remove_files(directory: Path, names: Sequence[str]) -> None:
    """Remove files, best effort: the next save retries."""
    if not names:
        return
    with suppress(OSError, SaveError), syncing(str(directory), str(directory)):
        for name in names:
            with suppress(OSError):
                (directory / name).unlink()
