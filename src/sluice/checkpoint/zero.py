"""Checkpoints of DeepSpeed's ZeRO: one state dict, or one optimizer, from the files of all ranks.

The weights are the fp32 masters that the optimizer keeps, under the names and in the order of the model's own state
dict; buffers and parameters that are not trained are as the model states hold them. Other values of the files, such as
schedulers, are left out: each file can be opened alone.

The optimizer has the form ``{"state": {NAME: {"exp_avg": ...}}, "param_groups": [{..., "params": [NAME]}]}``.

Files of two saves can agree in everything but the step, which each rank stores in a small tensor: these are read.

Refused: files of ranks that contradict each other; state that is neither a number nor flat like the weights.
"""

from __future__ import annotations

import struct
from collections import OrderedDict, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from typing import Any

from msgspec.structs import replace

from sluice._errors import CheckpointError, FormatError
from sluice._messages import listed
from sluice._options import Limits
from sluice.checkpoint.merging import incomplete, renumbered
from sluice.checkpoint.open_file import CheckpointLayout, OpenFile
from sluice.checkpoint.zero_files import MODEL_STATES, OPTIMIZER_STATES, UNIVERSAL_OPTIMIZER
from sluice.entries import tree as trees
from sluice.formats.deepspeed.places import (
    Assembler,
    ParameterPlace,
    check_agreement,
    check_state,
    other_save,
    parameter_places,
)
from sluice.formats.deepspeed.states import (
    ModelStates,
    RankStates,
    is_flat,
    model_states,
    rank_states,
    universal_states,
)
from sluice.formats.protocol import Checksum
from sluice.records import Entry, Index, Storage
from sluice.sources.protocol import Source

__all__ = ["merge_zero"]


def merge_zero(
    layout: CheckpointLayout, opened: Sequence[OpenFile | None], limits: Limits
) -> tuple[Index, tuple[OpenFile, ...]]:
    """Return the index of the weights or of the optimizer, as the layout says, and its files.

    Raises:
        IncompleteCheckpointError: Files are missing.
        FormatError: Files violate the layout, or those of the ranks contradict each other.
        UnsupportedError: The model or the state of the optimizer was divided in other ways as well.
        LimitError: The parameters are in too many pieces.
    """
    missing = [position for position, file in enumerate(opened) if file is None]
    if missing:
        raise incomplete(layout, missing)
    files = {name: file for name, file in zip(layout.files, opened, strict=True) if file is not None}
    models = {name: file for name, file in files.items() if name.endswith(MODEL_STATES)}
    ranks = [file for name, file in files.items() if name.endswith(OPTIMIZER_STATES)]
    parsed = [model_states(file.index.tree, file.source.path, limits) for file in models.values()]
    pool, assembler = _Pool(), Assembler(layout.path, limits)
    parameters: _OfRanks | _OfFiles
    if ranks:
        parameters = _OfRanks(pool, assembler, parsed, ranks, limits)
    else:
        parameters = _OfFiles(pool, assembler, parsed[0], files)
    tree: object
    notes: tuple[str, ...] = ()
    if layout.kind == "zero":
        tree, notes = _state_dict(parameters.weights(), models, parsed, pool, assembler)
    else:
        tree = _optimizer(parameters.states(), parameters.vector_of, parameters.options)
    index = Index(
        format="deepspeed-zero" if ranks else "deepspeed-universal",
        files=tuple(file.index.files[0] for file in pool.files),
        storages=tuple(pool.storages),
        tree=tree,
        metadata=parsed[0].facts,
        notes=(*layout.notes, *notes),
    )
    kept = {id(file.source) for file in pool.files}
    for file in files.values():
        if id(file.source) not in kept:
            file.source.close()
    return index, tuple(pool.files)


class _Pool:
    """The storages that are needed of each file, numbered across files."""

    def __init__(self) -> None:
        self.files: list[OpenFile] = []
        self.storages: list[Storage] = []

    def take(self, file: OpenFile, tree: object) -> Any:
        """Add the storages of a part of a file's tree; return the part with their new numbers."""
        position, first = len(self.files), len(self.storages)
        new: defaultdict[int, int] = defaultdict(lambda: first + len(new))  # numbers by those in the file, as met
        part = renumbered(tree, by=new)
        own = tuple(replace(file.index.storages[number], file=position) for number in new)
        index = Index(format=file.index.format, files=file.index.files, storages=own, tree=None)
        self.storages += own
        self.files.append(replace(file, index=index, locator=_Needed(file, list(new)), first_storage=first))
        return part


class _Needed:
    """Locates some of the storages of a file; see ``Locator``."""

    def __init__(self, file: OpenFile, used: Sequence[int]) -> None:
        self._file, self._used = replace(file, index=replace(file.index, tree=None)), used

    def checksums(self, source: Source, limits: Limits) -> list[Checksum | CheckpointError]:
        return self._file.locator.checksums(source, limits)

    def locate(self, source: Source, index: Index, storages: Iterable[int]) -> Mapping[int, int]:  # noqa: ARG002 - its own
        numbers = {self._used[number]: number for number in storages}
        found = self._file.locator.locate(source, self._file.index, numbers)
        return {numbers[number]: offset for number, offset in found.items()}


class _OfRanks:
    """Parameters in the vectors of ranks."""

    def __init__(
        self,
        pool: _Pool,
        assembler: Assembler,
        models: Sequence[ModelStates],
        files: Sequence[OpenFile],
        limits: Limits,
    ) -> None:
        self._pool, self._assembler, self._files = pool, assembler, files
        self._ranks = [rank_states(file.index.tree, file.source.path) for file in files]
        check_agreement(models, self._ranks)
        _check_steps(files, self._ranks)
        self._places = parameter_places(models[0], self._ranks, limits)
        self.options = self._ranks[0].options
        #: Number of the vector of each parameter.
        self.vector_of = {name: place.vector for name, place in self._places.items()}

    def weights(self) -> dict[str, Entry]:
        """Return the weights of the parameters that are trained."""
        taken = [self._pool.take(f, list(own.vectors)) for f, own in zip(self._files, self._ranks, strict=True)]
        return {
            name: self._assembler.placed(place, lambda rank, vector: taken[rank][vector])
            for name, place in self._places.items()
        }

    def states(self) -> dict[str, dict[str, object]]:
        """Return the state of each parameter in the optimizer."""
        for vector, known in enumerate(self._ranks[0].states):
            for rank in self._ranks:
                check_state(rank, vector, known)
        taken = [self._pool.take(f, list(own.states)) for f, own in zip(self._files, self._ranks, strict=True)]
        if not any(taken[0]):
            return {}
        return {
            name: {key: self._state(taken, place, key, value) for key, value in taken[0][place.vector].items()}
            for name, place in self._places.items()
        }

    def _state(self, taken: Sequence[Any], place: ParameterPlace, key: str, value: object) -> object:
        if not is_flat(value):
            return value  # of one rank: what is divided was checked
        if not value.shape or key == "step":
            return self._assembler.whole(value.shape, [value])  # not shared with other parameters: steps count in place

        def held(rank: int, vector: int) -> Entry:
            found = taken[rank][vector].get(key)
            if not is_flat(found) or len(found.shape) != 1:
                problem = "the vectors that hold a parameter have different states of the optimizer"
                raise FormatError(problem, file=self._ranks[rank].file, tensor=str(key), found=str(found)[:200])
            return found

        return self._assembler.placed(place, held)


class _OfFiles:
    """Parameters in files of their own: a universal checkpoint."""

    def __init__(self, pool: _Pool, assembler: Assembler, model: ModelStates, files: Mapping[str, OpenFile]) -> None:
        self._pool, self._assembler, self._model = pool, assembler, model
        below = next(iter(files)).removesuffix(UNIVERSAL_OPTIMIZER)
        self._files = {name.removeprefix(below): file for name, file in files.items()}
        first = self._files[UNIVERSAL_OPTIMIZER]
        self._step, self.options = universal_states(first.index.tree, first.source.path)
        #: Number of the vector of each parameter.
        self.vector_of = {name: number for number, shapes in enumerate(model.shapes) for name in shapes}

    def weights(self) -> dict[str, Entry]:
        """Return the weights of the parameters that are trained."""
        self._pool.take(self._files[UNIVERSAL_OPTIMIZER], None)
        return self._tensors("fp32")

    def states(self) -> dict[str, dict[str, object]]:
        """Return the state of each parameter in the optimizer."""
        first = self._files[UNIVERSAL_OPTIMIZER]
        if sum(count for _, count in self.options) != len(self._model.shapes):
            problem = "the groups of the optimizer do not have the vectors of the model states"
            raise FormatError(
                problem, file=first.source.path, expected=len(self._model.shapes), found=len(self.options)
            )
        step = self._pool.take(first, self._step)
        states: dict[str, dict[str, object]] = {name: {} for name in self.vector_of}
        for key in ("exp_avg", "exp_avg_sq"):
            for name, entry in self._tensors(key).items():
                states[name][key] = entry
        for name, own in states.items():
            counted = step
            if counted is None:
                file = self._files[f"{name}/step.pt"]
                counted = self._pool.take(file, file.index.tree)
            own["step"] = self._assembler.whole((), [counted]) if is_flat(counted) else counted
        return states

    def _tensors(self, key: str) -> dict[str, Entry]:
        entries = {}
        for name, shape in chain.from_iterable(shapes.items() for shapes in self._model.shapes):
            file = self._files[f"{name}/{key}.pt"]
            tree = file.index.tree
            value = self._pool.take(file, tree.get("param") if isinstance(tree, dict) else tree)
            fits = is_flat(value) and (value.shape == shape or len(value.shape) == 1)
            whole = self._assembler.whole(shape, [value]) if fits else None
            if whole is None:
                raise _misfit(file.source.path, name, shape, value)
            entries[name] = whole
        return entries


def _state_dict(
    trained: Mapping[str, Entry],
    files: Mapping[str, OpenFile],
    models: Sequence[ModelStates],
    pool: _Pool,
    assembler: Assembler,
) -> tuple[OrderedDict[object, object], tuple[str, ...]]:
    """Return the state dict of the model with the weights that are trained, and a note on names without values."""
    model = models[0]
    frozen = [{name: own.fragments[name] for name in own.frozen if name in own.fragments} for own in models]
    known = {*trained, *frozen[0]}
    known |= {name for name, stored in model.shared.items() if stored in known}
    others = {name: value for name, value in model.module.items() if name not in known}
    held = ([own, others if own is frozen[0] else None] for own in frozen)
    kept = [pool.take(file, own) for file, own in zip(files.values(), held, strict=True)]
    values: dict[object, object] = dict(kept[0][1])
    values.update(trained)
    for name in frozen[0]:
        values[name] = _frozen(name, model, [own[name] for own, _ in kept if name in own], assembler)
    for name, stored in model.shared.items():
        if stored in known and stored in values:  # not itself a further name
            values[name] = values[stored]
    empty: set[object] = set()
    if next(iter(files)).rpartition("/")[2].startswith("zero_"):  # stage 3: parameters are empty in the state dict
        left = {name: values[name] for name in others if name not in model.buffers}
        empty = {name for name, value in left.items() if isinstance(value, Entry) and not value.numel}
    else:
        for key, value in values.items():
            own = model.module.get(key)  # type: ignore[call-overload]  # any key may be asked for
            if isinstance(own, Entry) and isinstance(value, Entry) and own.shape != value.shape:
                raise _misfit(model.file, str(key), own.shape, value.shape)
    names = dict.fromkeys(chain(model.module, values))
    tree = OrderedDict((name, values[name]) for name in names if name not in empty)
    if not any(trees.every_entry(versions := trees.metadata(model.module))):
        tree._metadata = versions  # type: ignore[attr-defined]  # noqa: SLF001  (torch's own name for it)
    left_out = listed("Left out, because the files hold no values of them", sorted(map(str, empty)))
    return tree, (f"{left_out}.",) if empty else ()


def _frozen(name: str, model: ModelStates, pieces: Sequence[Entry], assembler: Assembler) -> Entry:
    shape = model.frozen[name]
    if pieces[0].shape == shape and len(pieces) == 1:
        return pieces[0]
    whole = assembler.whole(shape, pieces) if all(map(is_flat, pieces)) else None
    if whole is None or sum(piece.numel for piece in pieces) - whole.numel >= len(pieces):
        raise _misfit(model.file, name, shape, [piece.shape for piece in pieces])
    return whole


def _optimizer(
    states: Mapping[str, object], vector_of: Mapping[str, int], options: Sequence[tuple[dict[str, object], int]]
) -> dict[str, object]:
    """Return an optimizer by name: the state of each parameter, and the groups."""
    if not options:
        return {}
    groups: list[dict[str, Any]] = [{**own, "params": []} for own, _ in options]
    group_of = [group for group, (_, count) in zip(groups, options, strict=True) for _ in range(count)]
    for name, vector in vector_of.items():
        group_of[vector]["params"].append(name)
    return {"state": dict(states), "param_groups": groups}


def _check_steps(files: Sequence[OpenFile], ranks: Sequence[RankStates]) -> None:
    """Check that the optimizers of all ranks have made the same steps, which takes a small read of each file."""
    first: object = None
    for file, rank in zip(files, ranks, strict=True):
        found = next((own["step"] for own in rank.states if "step" in own), None)
        if isinstance(found, Entry):
            found = _number(file, found) if is_flat(found) and found.numel == 1 else None
        first = found if first is None else first
        if found != first:
            raise other_save(rank.file, "step", first, found)


def _number(file: OpenFile, entry: Entry) -> str:
    """Return the bytes of a tensor of one element as text."""
    storage = file.index.storages[entry.storage]
    offset = storage.offset if storage.located else file.locate([entry.storage], at_once=True)[entry.storage]
    start, end = entry.byte_span
    data = file.source.read_at(offset + start, end - start)
    return f"{struct.unpack('<f', data)[0]:g}" if entry.dtype == "float32" else data.hex()


def _misfit(file: str, name: str, shape: tuple[int, ...], found: object) -> FormatError:
    problem = "a tensor does not have the shape of its parameter"
    found = getattr(found, "shape", found)
    return FormatError(problem, file=file, tensor=name, expected=list(shape), found=str(found)[:200])
