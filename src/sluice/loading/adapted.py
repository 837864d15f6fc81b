"""Loads that merge adapters: the weights that change, and the functions that change them when they have arrived."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from math import prod

import torch
from msgspec import Struct
from msgspec.structs import replace
from torch import nn

from sluice._dtypes import ITEM_BYTES
from sluice._errors import MismatchError, SourceChangedError, UnsupportedError
from sluice._threads import Workers
from sluice._units import counted
from sluice.adapters.config import Adapter, read_config
from sluice.adapters.merging import Layout, MergeStep, merge, shape_of_sum
from sluice.adapters.names import ModulePaths, by_module
from sluice.checkpoint.open_checkpoint import OpenCheckpoint, borrow
from sluice.engine.targets import Targets
from sluice.loading.quantized import QuantizedMatch, with_finishers
from sluice.matching.match import Match
from sluice.modules.collect import ModuleState
from sluice.reading.transfer import prepare, run
from sluice.records import Request
from sluice.records.geometry import contiguous_stride
from sluice.reports.load_figures import MergedAdapter
from sluice.sharding.dtensors import is_dtensor

__all__ = ["MergedWeight", "adapted"]

_FLOATS = frozenset({"float16", "bfloat16", "float32", "float64"})

#: Tensors of the size of the weight that a kind holds at a time, if more than one.
_SUMS = {"DoRA": 3, "LoHa": 2}


class _File:
    """The tensors of one adapter: shapes at first, numbers from the first ``take`` until the last."""

    def __init__(self, adapter: Adapter) -> None:
        self.adapter = adapter
        with borrow(adapter.path) as checkpoint:
            self.path = checkpoint.path
            self.config = read_config(adapter, checkpoint.limits)
            self.entries = {name: each for name, each in checkpoint.entries.items() if name.startswith(adapter.prefix)}
            self.limits = checkpoint.limits
            self.alphas = {
                name: float(tensor)
                for name, tensor in _read(
                    checkpoint, [each for each in self.entries if each.endswith(".alpha")]
                ).items()
            }
        self.shapes = {name: tuple(entry.shape) for name, entry in self.entries.items()}
        self.nbytes = sum(prod(entry.shape) * ITEM_BYTES[entry.dtype] for entry in self.entries.values())
        self._tensors: dict[str, torch.Tensor] = {}

    def take(self, parts: Mapping[str, str]) -> dict[str, torch.Tensor]:
        """Return tensors by part; each is kept only until it was taken."""
        if not self._tensors.keys() >= set(parts.values()):
            with borrow(self.adapter.path, limits=self.limits) as checkpoint:
                entries = checkpoint.entries
                if any(self.shapes[name] != getattr(entries.get(name), "shape", None) for name in self.shapes):
                    raise SourceChangedError("the adapter changed since the load was planned", file=self.path)
                self._tensors = _read(checkpoint, [name for name in self.shapes if name not in self.alphas])
        return {part: self._tensors.pop(name) for part, name in parts.items()}


def _read(checkpoint: OpenCheckpoint, names: Sequence[str]) -> dict[str, torch.Tensor]:
    """Return tensors of a checkpoint on the host, in its dtypes."""
    if not names:
        return {}
    own = [(name, checkpoint.entries[name]) for name in names]
    requests = [
        Request(name=name, entry=entry, dtype=entry.dtype, device="cpu", stride=contiguous_stride(entry.shape))
        for name, entry in own
    ]
    prepared = prepare(checkpoint, requests)
    tensors, _ = run(checkpoint, prepared, Targets(prepared.plan))
    return dict(zip(names, tensors, strict=True))


class MergedWeight(Struct, frozen=True, kw_only=True, eq=False):
    """A weight that adapters change when it has arrived; it takes the place of a ``QuantizedWeight``."""

    #: The adapters and what each does, in order.
    steps: tuple[tuple[_File, MergeStep], ...]
    #: Number of its elements, and bytes of one.
    count: int
    item_bytes: int
    #: Bytes of all adapters.
    adapter_bytes: int
    device: torch.device

    @property
    def sizes(self) -> tuple[int, ...]:
        """Bytes of its finished form."""
        return (self.count * self.item_bytes,)

    def transient_bytes(self, cores: int) -> int:
        """Return the bytes of the adapters, and of the sums for one weight, at a time."""
        del cores
        sums = max((_SUMS.get(step.kind, 1) for _, step in self.steps if step.kind != "bias"), default=0)
        return self.adapter_bytes + sums * self.count * max(4, self.item_bytes) + (8 << 20)

    def finisher(self, workers: Workers, cores: int) -> Callable[[torch.Tensor], torch.Tensor]:
        """Return the function that changes the weight; the tensors of the adapters are read now."""
        del workers, cores
        taken = [(step, file.take(step.parts)) for file, step in self.steps]

        def finish(whole: torch.Tensor) -> torch.Tensor:
            while taken:
                merge(whole, *taken.pop(0))
            return whole.detach()

        return finish

    def set_attributes(self) -> None:
        """Do nothing: the module is as before."""


def adapted(state: ModuleState, matched: Match, adapters: Sequence[Adapter]) -> QuantizedMatch:
    """Return the match of a load that merges adapters; of these, names and scales are read.

    Raises:
        MismatchError: A tensor of an adapter fits no whole weight that the checkpoint fills.
        UnsupportedError: An adapter is of a kind that is not merged.
    """
    names = {name: slot for slot, one in enumerate(state.outline.slots) for name in one.names}
    requests = dict(zip(matched.slots, matched.requests, strict=True))
    found: dict[int, list[tuple[_File, MergeStep]]] = {}
    records = []
    files = [_File(adapter) for adapter in adapters]
    for file in files:
        changes = list(_steps(file, state, names))
        for name, step in changes:
            _check(file, name, step, state, requests, names[name])
            found.setdefault(names[name], []).append((file, step))
        done = [each for _, each in changes]
        records.append(
            MergedAdapter(
                source=file.path,
                kinds=tuple(dict.fromkeys(each.kind for each in done)),
                weight=file.adapter.weight,
                scales=tuple(sorted({each.scale for each in done if each.kind != "replaced"})),
                tensors=len(done),
            )
        )
    adapter_bytes = sum(file.nbytes for file in files)
    weights = {
        slot: MergedWeight(
            steps=tuple(steps),
            count=prod(state.outline.slots[slot].shape),
            item_bytes=ITEM_BYTES[requests[slot].dtype],
            adapter_bytes=adapter_bytes,
            device=torch.device(requests[slot].device),
        )
        for slot, steps in found.items()
    }
    return replace(with_finishers(state, matched, weights), adapters=tuple(records))


def _steps(file: _File, state: ModuleState, names: Mapping[str, int]) -> Iterator[tuple[str, MergeStep]]:
    """Yield the names of the tensors that an adapter changes, in the order of the model, and how."""
    parts, others = by_module(file.entries)
    paths = ModulePaths(name.removesuffix(".weight") for name in names if name.endswith(".weight"))
    whole = ModulePaths(names)
    homes = {path: paths.find(path) for path in parts}
    wholes = {name: whole.find(name) for name in others}
    lost = [path for path, home in (homes | wholes).items() if home is None]
    if lost or not (parts or others):
        raise _unmatched(file, lost, whole if not parts else paths)
    for name, home in wholes.items():
        if home is not None:
            yield home, MergeStep(kind="replaced", parts={"whole": name})
    order = {path: position for position, path in enumerate(names)}
    for path, home in sorted(homes.items(), key=lambda item: order[f"{item[1]}.weight"]):
        if home is not None:
            module = next(o.module for o in state.owners[names[f"{home}.weight"]])
            yield from _module_steps(file, home, parts[path], module)


def _module_steps(
    file: _File, home: str, parts: Mapping[str, str], module: nn.Module
) -> Iterator[tuple[str, MergeStep]]:
    """Yield what the adapter of one module changes."""
    needed = {part for part in parts if part not in {"alpha", "bias"}}
    alpha = file.alphas[parts["alpha"]] if "alpha" in parts else None
    kind, rank = _kind_and_rank(file, home, needed, parts)
    scale = file.config.scale_of(home, rank, alpha) * file.adapter.weight
    own = {part: parts[part] for part in sorted(needed)}
    yield f"{home}.weight", MergeStep(kind=kind, parts=own, scale=scale, layout=_layout(module))
    if "bias" in parts:
        yield f"{home}.bias", MergeStep(kind="bias", parts={"bias": parts["bias"]}, scale=scale)


def _kind_and_rank(file: _File, home: str, needed: set[str], parts: Mapping[str, str]) -> tuple[str, int]:
    config = file.config
    if needed in ({"a", "b"}, {"a", "b", "magnitude"}):
        rank = file.shapes[parts["a"]][0] if file.shapes[parts["a"]] else 0
        if rank == 0 or (config.method and rank != config.rank_of(home)):
            expected = config.rank_of(home) if config.method else "at least 1"
            raise MismatchError(
                "the rank of the adapter differs", file=file.path, tensor=parts["a"], expected=expected, found=rank
            )
        return ("DoRA" if "magnitude" in needed else "LoRA"), rank
    if needed == {"hada_w1_a", "hada_w1_b", "hada_w2_a", "hada_w2_b"}:
        return "LoHa", file.shapes[parts["hada_w1_b"]][0]
    raise UnsupportedError(
        f"the adapter of {home!r} has the tensors {sorted(needed)}, which are not merged",
        file=file.path,
        advice="Merge it with the library that trained it, save the model, and load that.",
    )


def _layout(module: nn.Module) -> Layout:
    if isinstance(module, nn.Embedding):
        return "embedding"
    if isinstance(module, (nn.Conv1d, nn.Conv2d, nn.Conv3d)):
        return "conv"
    return "transposed" if type(module).__name__ == "Conv1D" else "linear"


def _check(
    file: _File, name: str, step: MergeStep, state: ModuleState, requests: Mapping[int, Request], slot: int
) -> None:
    """Refuse a step whose weight cannot be changed while it is read."""
    one, request = state.outline.slots[slot], requests.get(slot)
    replaced = file.config.replaced if step.kind == "replaced" and len(one.names) > 1 else ()
    problem = ""
    if request is None:
        problem = "is not filled by the base checkpoint"
    elif is_dtensor(state.tensors[slot]) or slot in state.aliases:
        problem = "is a DTensor, or shares its memory with another tensor"
    elif request.dtype not in _FLOATS:
        problem = f"is {request.dtype}: merge before it is quantized"
    elif any(f".{name}".endswith((f".{part}.weight", f".{part}.bias")) for part in replaced):
        problem = f"is replaced, and tied to {one.names}: untie it first"
    elif getattr(state.owners[slot][0].module, "groups", 1) != 1 and step.kind != "replaced":
        problem = "belongs to a convolution with groups"
    if problem:
        raise MismatchError(f"the adapter cannot be merged: {name!r} {problem}", file=file.path)
    shape = shape_of_sum(step, file.shapes, one.shape)
    if shape != tuple(one.shape):
        raise MismatchError(
            f"the adapter does not fit {name!r}",
            file=file.path,
            tensor=next(iter(step.parts.values())),
            expected=list(one.shape),
            found=[list(file.shapes[part]) for part in step.parts.values()],
        )


def _unmatched(file: _File, lost: Sequence[str], paths: ModulePaths) -> MismatchError:
    near = {name: paths.near(name) for name in lost[:5]}
    shown = [f"{name!r}" + (f" (similar: {other!r})" if other else "") for name, other in near.items()]
    what = f"{counted(len(lost), 'name')} without a place in the model: {', '.join(shown)}" if lost else "no tensors"
    error = MismatchError(f"the adapter cannot be merged: {what}", unexpected=tuple(lost), file=file.path)
    error.advice += " sluice.Adapter(path, prefix=...) merges a part of the file."
    return error
