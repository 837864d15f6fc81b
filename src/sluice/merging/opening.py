"""Open a merge: its inputs as one checkpoint, and from their names the tensors of the result."""

from __future__ import annotations

import re
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import reduce
from typing import Any, TypeAlias, cast

import torch
from msgspec import Struct
from msgspec.structs import replace

from sluice._dtypes import dtype_name, is_castable, torch_dtype
from sluice._errors import MismatchError, UnsupportedError
from sluice._messages import check_limit, listed
from sluice._options import Limits
from sluice._units import format_bytes
from sluice.checkpoint.merging import moved
from sluice.checkpoint.open_checkpoint import CheckpointSource, OpenCheckpoint, borrow
from sluice.checkpoint.open_file import OpenFile
from sluice.entries.lookup import subtree
from sluice.entries.tree import every_entry, flatten, metadata, refuse_opaques
from sluice.formats.protocol import LocatedByIndex
from sluice.matching.candidates import extra_states
from sluice.matching.selection import only_state_dict
from sluice.merging.kernels import MergedTensor
from sluice.merging.recipe import METHODS, InputSlice, OutputSlice, Recipe, parameter
from sluice.merging.source import ALIGNMENT, MergeSource, PlacedTensor
from sluice.records import Entry, FileRecord, Index, Storage, row_major
from sluice.records.geometry import round_up

__all__ = ["joined", "open_merge"]

_LAYER = re.compile(r"(.*?)\.(\d{1,18})\.(.+)")

#: The tensors of each input, by its path, with storages of the joined checkpoint.
_Inputs: TypeAlias = Mapping[str, Mapping[str, Entry]]


class _Output(Struct, frozen=True, kw_only=True):
    """A tensor of the result: its name, the slice and the layer that it comes from."""

    name: str
    part: OutputSlice
    #: Its name in each source of the slice.
    inputs: tuple[str, ...]
    #: Place of its layer in the slice, from 0 to 1.
    at: float = 0.0


@contextmanager
def open_merge(
    recipe: Recipe,
    *,
    title: str,
    key: str | None,
    limits: Limits | None,
    sources: Mapping[str, CheckpointSource],
    seed: int = 0,
    check: Callable[[OpenCheckpoint], None] = lambda _: None,
) -> Iterator[OpenCheckpoint]:
    """Open a merge for the block as a checkpoint whose data is computed when it is read.

    Args:
        recipe: The merge.
        title: Name for messages.
        key: Part of each input; None for the only state dict in it.
        limits: Bounds for hostile files.
        sources: Inputs by their names in the recipe; other names are paths and URLs.
        seed: Where random draws begin.
        check: Called with each input.

    Raises:
        MismatchError: The inputs do not have the same tensors, or small tensors of integers differ.
    """
    with ExitStack() as stack:
        found = [sources.get(name, name) for name in recipe.models]
        checkpoints = [stack.enter_context(borrow(each, limits=limits, alone=False)) for each in found]
        for checkpoint in checkpoints:
            check(checkpoint)
        joined, inputs = _joined(recipe, checkpoints, key)
        tensors = _placed(recipe, _outputs(recipe, inputs, joined.limits), inputs, seed)
        source = MergeSource(title, joined, tensors)
        stack.callback(source.close)
        source.check_integers()
        yield OpenCheckpoint(title, *_index(source, tensors), joined.limits)


def joined(checkpoints: Sequence[OpenCheckpoint], title: str) -> tuple[OpenCheckpoint, tuple[int, ...]]:
    """Return several checkpoints as one without names, and the position of the first storage of each in it."""
    files: list[OpenFile] = []
    records: list[FileRecord] = []
    storages: list[Storage] = []
    shifts = []
    for checkpoint in checkpoints:
        index, shift = checkpoint.index, len(storages)
        shifts.append(shift)
        storages += [replace(storage, file=storage.file + len(files)) for storage in index.storages]
        records += index.files
        files += [replace(file, first_storage=file.first_storage + shift) for file in checkpoint.open_files]
    index = Index(format="inputs", files=tuple(records), storages=tuple(storages), tree={})
    return OpenCheckpoint(title, index, tuple(files), checkpoints[0].limits), tuple(shifts)


def _joined(recipe: Recipe, checkpoints: Sequence[OpenCheckpoint], key: str | None) -> tuple[OpenCheckpoint, _Inputs]:
    """Return all inputs as one checkpoint, with the state of the first if no module moves, and the tensors of each."""
    whole, shifts = joined(checkpoints, "the inputs of the merge")
    inputs: dict[str, Mapping[str, Entry]] = {}
    for path, checkpoint, shift in zip(recipe.models, checkpoints, shifts, strict=True):
        tree = checkpoint.index.tree
        part = subtree(tree, only_state_dict(tree, checkpoint.path) if key is None else key)
        refuse_opaques(part, checkpoint.path)
        if not inputs and all(each.layer_range is None for made in recipe.slices for each in made.sources):
            whole.index = replace(whole.index, tree=_state(part))
        own = flatten(part, checkpoint.limits)
        for name, entry in own.items():
            if entry.composite is not None:
                problem, advice = f"a {entry.layout} tensor is not merged", "Leave it out with sluice.convert first."
                raise UnsupportedError(problem, file=checkpoint.path, tensor=name, advice=advice)
        inputs[path] = {name: moved(entry, by=shift) for name, entry in own.items()}
    return whole, inputs


def _state(part: object) -> OrderedDict[str, object]:
    """Return what is not merged of a state dict: extra state without tensors, and versions of modules."""
    state = OrderedDict((name, value) for name, value in extra_states(part) if not any(every_entry(value)))
    if not any(every_entry(metadata(part))):
        vars(state).update(getattr(part, "__dict__", {}))
    return state


def _outputs(recipe: Recipe, inputs: _Inputs, limits: Limits) -> list[_Output]:
    """Return the tensors of the result: those outside of the layers, and the layers of all slices."""
    first = recipe.slices[0]
    if all(source.layer_range is None for part in recipe.slices for source in part.sources):
        names = _names([first], inputs)
        prefix = _layers(names)
        last = max((layer for name in names if (layer := _layer(name, prefix)) is not None), default=0)
        return [_whole(name, first, prefix, last) for name in names]
    return list(_sliced(recipe, inputs, limits))


def _names(parts: Sequence[OutputSlice], inputs: _Inputs) -> Mapping[str, None]:
    return dict.fromkeys(name for part in parts for source in part.sources for name in inputs[source.model])


def _whole(name: str, part: OutputSlice, prefix: str, last: int) -> _Output:
    layer = _layer(name, prefix)
    at = 0.0 if layer is None else layer / last if last else 1.0
    return _Output(name=name, part=part, inputs=(name,) * len(part.sources), at=at)


def _sliced(recipe: Recipe, inputs: _Inputs, limits: Limits) -> Iterator[_Output]:
    first, last = recipe.slices[0], recipe.slices[-1]
    names = _names(recipe.slices, inputs)  # a layer that lacks tensors of others is refused
    prefix = _layers(names)
    rest = list(dict.fromkeys(m[3] for name in names if (m := _LAYER.fullmatch(name)) and m[1] == prefix))
    if not rest:
        raise MismatchError("the inputs of the merge have no layers", advice="Merge models without layer_range.")
    layers = sum(r[1] - r[0] for part in recipe.slices if (r := part.sources[0].layer_range))
    check_limit(limits, "entries", layers * len(rest), "the configuration of the merge")
    outside = [name for name in _names([first, last], inputs) if _layer(name, prefix) is None]
    done = 0
    for name in outside:
        part = first if re.search(r"emb(?!ed_out)|wte|wpe|relative_pe|^shared\.", name) else last
        yield _Output(name=name, part=part, inputs=(name,) * len(part.sources))
    for part in recipe.slices:
        ranges = [source.layer_range or (0, 0) for source in part.sources]
        count = ranges[0][1] - ranges[0][0]
        for offset in range(count):
            for name in rest:
                yield _Output(
                    name=f"{prefix}.{done}.{name}",
                    part=part,
                    inputs=tuple(f"{prefix}.{begin + offset}.{name}" for begin, _ in ranges),
                    at=offset / (count - 1) if count > 1 else 1.0,
                )
            done += 1


def _layers(names: Mapping[str, None]) -> str:
    """Return the path of the list with most tensors: the layers of the model."""
    found = Counter(match[1] for name in names if (match := _LAYER.fullmatch(name)))
    return found.most_common(1)[0][0] if found else ""


def _layer(name: str, prefix: str) -> int | None:
    match = _LAYER.fullmatch(name)
    return int(match[2]) if match and match[1] == prefix else None


def _placed(recipe: Recipe, outputs: Sequence[_Output], inputs: _Inputs, seed: int) -> list[PlacedTensor]:
    problems = [problem for output in outputs for problem in _problems(output, inputs)]
    if problems or not outputs:
        problem = listed("the inputs of the merge do not have the same tensors", problems or ["they have none"])
        advice = "Name the part that they share with key=, or leave other tensors out with sluice.convert first."
        raise MismatchError(problem, advice=advice)
    tensors, at, drawn = [], 0, dict[Entry, str]()
    for output in outputs:
        own = [inputs[source.model][name] for source, name in zip(output.part.sources, output.inputs, strict=True)]
        drawn_as = next(filter(None, map(drawn.get, own)), output.name)  # one name of those that any input ties
        drawn.update(dict.fromkeys(own, drawn_as))
        merged = _merged(recipe, output, own, seed, drawn_as)
        tensors.append(PlacedTensor(merged=merged, inputs=tuple(own), first_byte=at))
        at = round_up(at + tensors[-1].nbytes, ALIGNMENT)
    return tensors


def _problems(output: _Output, inputs: _Inputs) -> Iterator[str]:
    shapes = {}
    for source, name in zip(output.part.sources, output.inputs, strict=True):
        entry = inputs[source.model].get(name)
        if entry is None:
            yield f"{name} is not in {source.model}"
        else:
            shapes[entry.shape] = source.model
    if len(shapes) > 1:
        yield f"{output.name} has the shapes " + ", ".join(f"{list(s)} in {path}" for s, path in shapes.items())


def _merged(recipe: Recipe, output: _Output, entries: Sequence[Entry], seed: int, drawn_as: str) -> MergedTensor:
    spec, sources, part = METHODS[recipe.method], output.part.sources, output.part
    base = part.base_model or recipe.base
    at = next((i for i, source in enumerate(sources) if source.model == base), None)

    def value(name: str, default: Any, source: InputSlice | None, tensor: str) -> Any:
        settings = (source.parameters if source else None, part.parameters, *recipe.parameters)
        return parameter(settings, name, default, tensor=tensor, at=output.at)

    each = tuple(
        {}
        if spec.base != "input" and i == at
        else {name: value(name, default, source, tensor) for name, default in spec.each.items()}
        for i, (source, tensor) in enumerate(zip(sources, output.inputs, strict=True))
    )
    copied = recipe.method == "passthrough" and each[0]["scale"] is None
    dtype = _dtype(recipe.dtype, output, entries, copied=copied)
    return MergedTensor(
        name=output.name,
        method=recipe.method,
        shape=entries[0].shape,
        dtype=dtype,
        out_dtype=recipe.out_dtype or dtype if torch_dtype(dtype).is_floating_point else dtype,
        base=None if spec.base == "input" else at,
        shared={name: value(name, default, None, output.name) for name, default in spec.shared.items()},
        each=each,
        seed=seed,
        drawn_as=drawn_as,
    )


def _dtype(asked: str | None, output: _Output, entries: Sequence[Entry], *, copied: bool) -> str:
    """Return the dtype of the computation: integers stay, and floats become what was asked or what holds them all."""
    names = dict.fromkeys(entry.dtype for entry in entries)
    found = asked if asked and all(map(is_castable, names)) else None
    with suppress(RuntimeError):  # no dtype holds them all
        found = found or dtype_name(reduce(torch.promote_types, map(torch_dtype, names)))
    if not found or (found.startswith(("float8", "float4")) and not copied):
        problem = f"torch does not compute with {found or ', '.join(names)}"
        advice = 'For floats, write "dtype: bfloat16" into the configuration of the merge.'
        raise UnsupportedError(problem, file=output.part.sources[0].model, tensor=output.inputs[0], advice=advice)
    return asked if asked and torch_dtype(found).is_floating_point else found


def _index(source: MergeSource, tensors: Sequence[PlacedTensor]) -> tuple[Index, tuple[OpenFile, ...]]:
    tree = cast("dict[str, object]", source.inputs.index.tree)
    for number, placed in enumerate(tensors):
        tree[placed.merged.name] = row_major(placed.merged.out_dtype, placed.merged.shape, number)
    storages = tuple(
        Storage(file=0, offset=placed.first_byte, nbytes=placed.nbytes, key=placed.merged.name) for placed in tensors
    )
    largest = source.whole_bytes
    note = f"the method holds whole tensors of all inputs, and sums: {format_bytes(largest)} at most"
    index = Index(
        format="merge",
        files=(FileRecord(path=source.path, identity=source.identity),),
        storages=storages,
        tree=tree,
        metadata={"format": "pt"},
        notes=(note,) if largest else (),
    )
    return index, (OpenFile(source=source, locator=LocatedByIndex(), index=replace(index, tree=None)),)
