"""The changes that an adapter makes to the tensors of a model, by their names."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from difflib import get_close_matches

import torch
from msgspec import Struct

from sluice._dtypes import why_no_cast
from sluice._errors import FormatError, MismatchError, SourceChangedError, UnsupportedError
from sluice._options import Limits
from sluice._units import counted
from sluice.adapters.config import Adapter, AdapterConfig, read_config
from sluice.adapters.merging import Layout, MergeStep, fits
from sluice.checkpoint.open_checkpoint import borrow
from sluice.reading.reader import CheckpointReader
from sluice.records import Entry

__all__ = ["AdapterFile", "BaseWeight", "steps_of"]

#: Part of an adapter by the end of a tensor's name: of peft, of kohya and ComfyUI, of older diffusers, of LyCORIS.
_PARTS = {
    ".lora_A.weight": "a",
    ".lora_B.weight": "b",
    ".lora_B.bias": "bias",
    ".lora_embedding_A": "a",
    ".lora_embedding_B": "b",
    ".lora_magnitude_vector": "magnitude",
    ".lora_magnitude_vector.weight": "magnitude",
    ".lora_down.weight": "a",
    ".lora_up.weight": "b",
    ".lora.down.weight": "a",
    ".lora.up.weight": "b",
    ".lora_linear_layer.down.weight": "a",
    ".lora_linear_layer.up.weight": "b",
    ".alpha": "alpha",
    **{f".{kind}_{part}": f"{kind}_{part}" for kind in ("hada", "lokr") for part in ("w1_a", "w1_b", "w2_a", "w2_b")},
    **{f".lokr_{part}": f"lokr_{part}" for part in ("w1", "w2")},
}

#: Prefixes that libraries write before the path of a module.
_PREFIXES = (
    *("", "base_model.model.", "base_model.", "unet.", "transformer.", "text_encoder.", "text_encoder_2."),
    *("diffusion_model.", "model.diffusion_model."),
    *("text_model.", "text_encoder.text_model.", "base_model.model.text_model."),  # not in transformers 5
)

#: The same in files of kohya, which write "_" for the dots of the path.
_JOINED_PREFIXES = (
    *("lora_unet_", "lora_te_", "lora_te1_", "lora_te2_", "lora_te3_", "lora_transformer_", "lycoris_"),
    *("lora_te_text_model_", "lora_te1_text_model_"),  # CLIPTextModel of transformers 5 has no text_model
)

_LOHA = frozenset({"hada_w1_a", "hada_w1_b", "hada_w2_a", "hada_w2_b"})
_FLOATS = frozenset({"float16", "bfloat16", "float32", "float64"})


class BaseWeight(Struct, frozen=True, kw_only=True, eq=False):
    """A tensor that adapters may change."""

    #: Its names in the model.
    names: tuple[str, ...]
    shape: tuple[int, ...]
    #: Its values in the checkpoint; None if it has none.
    entry: Entry | None
    #: Dtype that it is cast to, and in which adapters are added to it.
    dtype: str
    #: Whether a module multiplies by it from the right (``Conv1D`` of transformers); None if that is unknown.
    transposed: bool | None = None
    #: Why it cannot be changed.
    problem: str = ""


class AdapterFile:
    """The tensors of one adapter: shapes at first, numbers from the first ``take`` on."""

    def __init__(self, adapter: Adapter, limits: Limits) -> None:
        self.adapter = adapter
        with borrow(adapter.path, limits=limits) as checkpoint:
            self.path, self.limits = checkpoint.path, checkpoint.limits
            self.files = checkpoint.index.files
            self.entries = {name: each for name, each in checkpoint.entries.items() if name.startswith(adapter.prefix)}
            alphas = [name for name in self.entries if name.endswith(".alpha")]
            # peft writes no alpha: the configuration is that of a different file in the directory.
            self.config = AdapterConfig() if alphas else read_config(adapter, checkpoint)
            for name, entry in self.entries.items():
                found = f"{entry.layout} {entry.dtype} {list(entry.shape)}"
                if entry.composite is not None or why_no_cast(entry.dtype, "float64", requires_grad=False):
                    raise UnsupportedError("the tensor is not dense and real", file=self.path, tensor=name, found=found)
                if name.endswith(".alpha") and entry.numel != 1:
                    raise FormatError("alpha is not one real number", file=self.path, tensor=name, found=found)
            with CheckpointReader(checkpoint) as reader:
                read = reader.read([self.entries[name] for name in alphas]) if alphas else []
            self.alphas = dict(zip(alphas, map(float, read), strict=True))
        self.shapes = {name: tuple(entry.shape) for name, entry in self.entries.items()}
        self.nbytes = sum(entry.nbytes for entry in self.entries.values())
        self._tensors: dict[str, torch.Tensor] = {}

    def take(self, parts: Mapping[str, str]) -> dict[str, torch.Tensor]:
        """Return tensors by part."""
        if not self._tensors:
            with borrow(self.adapter.path, limits=self.limits) as checkpoint, CheckpointReader(checkpoint) as reader:
                if checkpoint.index.files != self.files:
                    raise SourceChangedError("the adapter changed since the load was planned", file=self.path)
                self._tensors = dict(zip(self.entries, reader.read(list(self.entries.values())), strict=True))
        return {part: self._tensors[name] for part, name in parts.items()}


def steps_of(file: AdapterFile, weights: Mapping[str, BaseWeight]) -> Iterator[tuple[BaseWeight, MergeStep]]:
    """Yield the tensors that an adapter changes, in the order of the model, and how; nothing is read.

    Raises:
        MismatchError: A tensor of the adapter fits no weight.
        UnsupportedError: It is of a kind that is not merged.
    """
    parts, others = _by_module(file.entries)
    paths = _ModulePaths(name.removesuffix(".weight") for name in weights if name.endswith(".weight"))
    whole = _ModulePaths(weights)
    homes = {path: paths.find(path) for path in parts}
    wholes = {name: whole.find(name) for name in others}
    lost = [path for path, home in (homes | wholes).items() if home is None]
    if lost or not (parts or others):
        shown = ", ".join(map((paths if parts else whole).described, lost[:5]))
        what = f"{counted(len(lost), 'name')} without a place in the model: {shown}" if lost else "no tensors"
        raise _unmatched(file, what, lost)
    meant: dict[str | None, str] = {}
    for path, home in (homes | wholes).items():
        if meant.setdefault(home, path) != path:
            raise _unmatched(file, f"{meant[home]!r} and {path!r} both mean {home!r}", [path])
    if not parts and not file.config.method:
        advice = "Load it as the checkpoint itself, or pass the directory with its adapter_config.json."
        raise UnsupportedError("it holds whole weights, and no adapter", file=file.path, advice=advice)
    for name, found in wholes.items():
        if found is not None:
            yield _checked(file, found, weights, MergeStep(kind="replaced", parts={"whole": name}))
    order = {path: position for position, path in enumerate(weights)}
    for path, home in sorted(homes.items(), key=lambda item: order[f"{item[1]}.weight"]):
        if home is not None:
            yield from _module_steps(file, home, parts[path], weights)


def _module_steps(
    file: AdapterFile, home: str, parts: Mapping[str, str], weights: Mapping[str, BaseWeight]
) -> Iterator[tuple[BaseWeight, MergeStep]]:
    """Yield what the adapter of one module changes."""
    needed = {part for part in parts if part not in {"alpha", "bias"}}
    alpha = file.alphas[parts["alpha"]] if "alpha" in parts else None
    kind, rank = _kind_and_rank(file, home, needed, parts)
    scale = file.config.scale_of(home, rank, alpha) * file.adapter.weight
    own, layout = {part: parts[part] for part in sorted(needed)}, _layout(file, parts, weights[f"{home}.weight"])
    step = MergeStep(kind=kind, parts=own, scale=scale, layout=layout)
    yield _checked(file, f"{home}.weight", weights, step)
    if "bias" in parts:
        step = MergeStep(kind="bias", parts={"bias": parts["bias"]}, scale=scale)
        yield _checked(file, f"{home}.bias", weights, step)


def _kind_and_rank(file: AdapterFile, home: str, needed: set[str], parts: Mapping[str, str]) -> tuple[str, int]:
    config = file.config
    low_rank, hadamard = needed in ({"a", "b"}, {"a", "b", "magnitude"}), needed == _LOHA
    if low_rank or hadamard:
        name = parts["a" if low_rank else "hada_w1_b"]
        rank = next(iter(file.shapes[name]), 0)
        if rank == 0 or (config.method and rank != config.rank_of(home)):
            expected = config.rank_of(home) if config.method else "at least 1"
            raise MismatchError(
                "the rank of the adapter differs", file=file.path, tensor=name, expected=expected, found=rank
            )
        return "LoHa" if hadamard else "DoRA" if "magnitude" in needed else "LoRA", rank
    if any(needed == {*first, *second} for first in _factors("lokr_w1") for second in _factors("lokr_w2")):
        ranks = [next(iter(file.shapes[parts[part]]), 0) for part in ("lokr_w1_b", "lokr_w2_b") if part in needed]
        return "LoKr", config.rank_of(home) if config.method else ranks[-1] if ranks else 0
    problem = f"the adapter of {home!r} has the tensors {sorted(needed)}, which are not merged"
    advice = "Merge it with the library that trained it, save the model, and load that."
    raise UnsupportedError(problem, file=file.path, advice=advice)


def _factors(name: str) -> tuple[tuple[str, ...], ...]:
    return (name,), (f"{name}_a", f"{name}_b")


def _layout(file: AdapterFile, parts: Mapping[str, str], weight: BaseWeight) -> Layout:
    """Return how a module uses its weight: of modules that are unknown, as the shapes say, or the configuration."""
    if "embedding" in parts.get("a", ""):
        return "embedding"
    if len(weight.shape) > 2:
        return "conv"
    transposed = weight.transposed
    if transposed is None and "a" in parts:
        a, b = file.shapes[parts["a"]], file.shapes[parts["b"]]
        fits = weight.shape == (*a[1:], *b[:1])
        transposed = fits and (file.config.fan_in_fan_out or weight.shape != (*b[:1], *a[1:]))
    return "transposed" if transposed else "linear"


def _checked(
    file: AdapterFile, name: str, weights: Mapping[str, BaseWeight], step: MergeStep
) -> tuple[BaseWeight, MergeStep]:
    """Refuse a step whose weight cannot be changed while it is read."""
    weight = weights.get(name)
    if weight is None or weight.entry is None:
        raise MismatchError(f"the adapter cannot be merged: the base checkpoint has no {name!r}", file=file.path)
    replaced = file.config.replaced if step.kind == "replaced" and len(weight.names) > 1 else ()
    problem = weight.problem
    if not problem and (weight.dtype not in _FLOATS or weight.entry.composite is not None):
        form = weight.dtype if weight.entry.composite is None else weight.entry.layout
        problem = f"is {form}: merge before it is quantized"
    elif any(f".{name}".endswith((f".{part}.weight", f".{part}.bias")) for part in replaced):
        problem = f"is replaced, and tied to {weight.names}: untie it first"
    if problem:
        raise MismatchError(f"the adapter cannot be merged: {name!r} {problem}", file=file.path)
    if not fits(step, file.shapes, weight.shape):
        raise MismatchError(
            f"the adapter does not fit {name!r}",
            file=file.path,
            tensor=next(iter(step.parts.values())),
            expected=list(weight.shape),
            found=[list(file.shapes[part]) for part in step.parts.values()],
        )
    return weight, step


def _unmatched(file: AdapterFile, problem: str, names: Sequence[str]) -> MismatchError:
    error = MismatchError(f"the adapter cannot be merged: {problem}", unexpected=tuple(names), file=file.path)
    error.advice += " sluice.Adapter(path, prefix=...) merges a part of the file."
    return error


def _by_module(names: Iterable[str]) -> tuple[dict[str, dict[str, str]], list[str]]:
    """Return the name of each part of an adapter by the path that its name begins with, and all other names."""
    found: dict[str, dict[str, str]] = {}
    others = []
    for name in names:
        end = next((end for end in _PARTS if name.endswith(end)), None)
        if end is None:
            others.append(name)
        else:
            found.setdefault(name.removesuffix(end), {})[_PARTS[end]] = name
    return found, others


class _ModulePaths:
    """Paths of a model's modules, or names of its tensors, found by what libraries write for them."""

    def __init__(self, paths: Iterable[str]) -> None:
        self._paths = dict.fromkeys(paths)
        self._joined: dict[str, list[str]] = {}
        for path in self._paths:
            self._joined.setdefault(path.replace(".", "_"), []).append(path)

    def find(self, name: str) -> str | None:
        """Return the path that a name means; None if none or several do."""
        if "." not in name:
            for prefix in _JOINED_PREFIXES:
                found = self._joined.get(name.removeprefix(prefix), []) if name.startswith(prefix) else []
                if len(found) == 1:
                    return found[0]
        plain = name.replace(".base_layer", "")
        ends = (plain.removeprefix(prefix) for prefix in _PREFIXES if plain.startswith(prefix))
        return next((path for path in ends if path in self._paths), None)

    def described(self, name: str) -> str:
        """Return a name that means no path, with the most similar one."""
        near = get_close_matches(name.removeprefix("base_model.model."), self._paths, 1)
        return f"{name!r} (similar: {near[0]!r})" if near else f"{name!r}"
