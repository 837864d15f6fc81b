"""The argument ``adapters=``, and scales from ``adapter_config.json``."""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from types import NoneType
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

from msgspec import Struct

from sluice._errors import FormatError, UnsupportedError
from sluice._messages import type_of
from sluice._public import public
from sluice.formats.protocol import read_whole
from sluice.formats.strict_json import decode_json
from sluice.sources.opening import PathOrAddress, find_place

if TYPE_CHECKING:
    from sluice.checkpoint.open_checkpoint import OpenCheckpoint

__all__ = ["Adapter", "AdapterConfig", "Adapters", "adapter_list", "read_config"]

_Number = TypeVar("_Number", int, float)

#: Options of peft with which an adapter is more than sums, or changes the base model; None, False and {} are accepted.
_REFUSED = (
    *("layer_replication", "trainable_token_indices", "target_parameters", "alora_invocation_tokens", "use_bdlora"),
    *("arrow_config", "use_qalora", "monteclora_config", "kasa_config", "use_effective_conv2d"),
)

#: Ways to initialise an adapter that keep the base weights.
_INITIAL = (True, False, None, "gaussian", "eva", "orthogonal")

#: The whole path of a module, or its end after a dot, as peft matches the keys of patterns.
_PATTERN = r"(.*\.)?({})$"

_ADVICE = "Merge it with peft's merge_and_unload(), save the model, and load that."


@public()
@dataclass(frozen=True, slots=True)
class Adapter:
    """An adapter to merge while base weights are read; ``adapters=`` also takes its path alone.

    Example:
        >>> sluice.Adapter("style/", weight=0.8)
        Adapter(path='style/', weight=0.8, prefix='')
    """

    #: A directory that peft wrote, or a file of peft, kohya, diffusers or ComfyUI; also a URL or a ``Remote``.
    path: PathOrAddress
    #: Factor of its scale.
    weight: float = 1.0
    #: Merge only tensors whose names begin with this, such as ``"lora_unet_"`` of a file for several models.
    prefix: str = ""


#: Types of ``adapters=``.
Adapters: TypeAlias = "PathOrAddress | Adapter | Sequence[PathOrAddress | Adapter]"


class AdapterConfig(Struct, frozen=True, kw_only=True):
    """Scales; without a file each tensor ``alpha`` decides, and the scale is 1 without one."""

    method: str = ""
    rank: int = 0
    alpha: float = 0.0
    rank_pattern: Mapping[re.Pattern[str], int] = {}
    alpha_pattern: Mapping[re.Pattern[str], float] = {}
    rslora: bool = False
    replaced: tuple[str, ...] = ()
    fan_in_fan_out: bool = False

    def rank_of(self, path: str) -> int:
        """Return the rank for a module, as peft does."""
        return _of_pattern(self.rank_pattern, path, self.rank)

    def scale_of(self, path: str, rank: int, alpha: float | None) -> float:
        """Return the factor for a module; ``alpha`` is the value of the tensor of this name, if there is one."""
        if not self.method:
            return 1.0 if alpha is None or rank == 0 else alpha / rank  # 0: LyCORIS ignores alpha of whole factors
        own = _of_pattern(self.alpha_pattern, path, self.alpha)
        return own / math.sqrt(rank) if self.rslora else own / rank


def _of_pattern(patterns: Mapping[re.Pattern[str], _Number], path: str, default: _Number) -> _Number:
    """Return the value of the first pattern that matches a path, as ``get_pattern_key`` of peft finds it."""
    found = (value for key, value in patterns.items() if key.match(path))
    return next(found, default)


def adapter_list(adapters: Adapters | None) -> tuple[Adapter, ...]:
    """Return the argument ``adapters=`` as a tuple; raises ``TypeError`` and ``ValueError``."""
    if adapters is None:
        return ()
    several = isinstance(adapters, (list, tuple))
    found = [each if isinstance(each, Adapter) else Adapter(each) for each in (adapters if several else [adapters])]  # type: ignore[arg-type,union-attr]
    for each in found:
        if find_place(each.path).kind not in {"local", "remote"}:
            raise TypeError(f"adapters= takes paths, URLs and sluice.Adapter, not {type_of(each.path)}")
        if not isinstance(each.weight, (int, float)) or not abs(each.weight) <= sys.float_info.max:
            raise ValueError(f"the weight of an adapter is a finite number, not {each.weight!r:.80}")
    return tuple(found)


def read_config(adapter: Adapter, checkpoint: OpenCheckpoint) -> AdapterConfig:
    """Return the configuration in the metadata of an adapter, or next to its tensors; an empty one if there is none."""
    what = "the configuration of the adapter"
    data, path = checkpoint.metadata.get("lora_adapter_metadata", "").encode(), checkpoint.path  # of diffusers
    if not data:
        place = find_place(adapter.path)
        # A server is not asked whether there is a directory of such a name.
        is_file = place.kind == "remote" and re.search(r"(?i)\.(safetensors|bin|pt|pth|ckpt)$", place.name)
        try:
            source = ((None if is_file else place.directory()) or place.parent()).open("adapter_config.json")
        except FileNotFoundError:
            return AdapterConfig()
        with closing(source):
            data, path = read_whole(source, checkpoint.limits, what), source.path
    # The keys of a part, such as "unet.r", start as the names of its tensors.
    starts = {name.partition(".")[0] for name in checkpoint.entries if name.startswith(adapter.prefix)}
    try:
        values = decode_json(data, dict[str, Any], what, path)
        found = starts.intersection(key.partition(".")[0] for key in values if "." in key)
        if found and len(starts) > 1:
            advice = "Merge one part: sluice.Adapter(path, prefix=...)."
            raise UnsupportedError("its parts have configurations of their own", file=path, advice=advice)
        if not found and all("." in key for key in values):  # of parts that are not merged
            return AdapterConfig()
        for part in found:
            own = {key.removeprefix(f"{part}."): values[key] for key in values if key.startswith(f"{part}.")}
            values = {"peft_type": "LORA", **own}
        return _checked(values, path)
    except (ValueError, RecursionError, OverflowError, re.error) as error:
        raise FormatError(f"{what} is damaged: {error}", file=path) from error


def _checked(values: Mapping[str, Any], path: str) -> AdapterConfig:
    """Return what a configuration says, if its kind of adapter is merged."""
    kinds = {"peft_type": str, "rank_pattern": dict, "alpha_pattern": dict, "modules_to_save": list}
    wrong = [name for name, kind in kinds.items() if not isinstance(values.get(name), (kind, NoneType))]
    if wrong:
        found = f"{values[wrong[0]]!r:.80}"
        raise FormatError(f"{wrong[0]} of the adapter is of a wrong type", file=path, found=found)
    method = values.get("peft_type")
    if method not in {"LORA", "LOHA", "LOKR"}:
        raise UnsupportedError(f"adapters of the kind {method!r} are not merged", file=path, advice=_ADVICE)
    refused = next((name for name in _REFUSED if values.get(name)), None)
    if refused is not None:
        raise UnsupportedError(f"adapters with {refused} are not merged", file=path, advice=_ADVICE)
    initial = values.get("init_lora_weights")
    if method == "LORA" and initial not in _INITIAL:
        advice = f"It changes the base weights: save it with path_initial_model_for_weight_conversion=. {_ADVICE}"
        raise UnsupportedError(f"adapters with init_lora_weights={initial!r} are not merged", file=path, advice=advice)
    cost = 0  # of matching, which could take for ever
    for pattern in (*(values.get("rank_pattern") or ()), *(values.get("alpha_pattern") or ())):
        choices = len(re.findall(r"[*+{(]|(?<!\()\?", pattern))
        slow = len(pattern) > (1000 if choices < 2 else 200) or re.search(r"[)\]][+*{]", pattern)
        if slow or (cost := cost + 10**choices) > 20_000:
            raise UnsupportedError(f"the pattern {pattern[:80]!r} is not supported", file=path, advice=_ADVICE)
    ranks, alphas = (
        {re.compile(_PATTERN.format(pattern)): value for pattern, value in (values.get(name) or {}).items()}
        for name in ("rank_pattern", "alpha_pattern")
    )
    numbers: list[Any] = [values.get("r"), values.get("lora_alpha" if method == "LORA" else "alpha")]
    numbers += [*ranks.values(), *alphas.values()]
    real = all(type(each) in {int, float} and math.isfinite(each) for each in numbers)
    if not real or min([numbers[0], *ranks.values()]) <= 0:
        raise FormatError("r, alpha or a pattern of the adapter is not a positive number", file=path)
    return AdapterConfig(
        method=method,
        rank=numbers[0],
        alpha=numbers[1],
        rank_pattern=ranks,
        alpha_pattern=alphas,
        rslora=bool(values.get("use_rslora")),
        replaced=tuple(values.get("modules_to_save") or ()),
        fan_in_fan_out=bool(values.get("fan_in_fan_out")),
    )
