"""Recipes of merges: configurations in mergekit's form and their parameters by tensor. No torch.

The form is that of mergekit 0.1 (https://github.com/arcee-ai/mergekit, docs/merge_methods.md): ``models``, ``slices``
or ``modules``, ``base_model``, ``dtype``, ``out_dtype`` and ``parameters``, whose values may depend on a part of a
tensor's name (``filter``) and on its layer (a list: interpolated from the first layer of a slice to the last).
Tokenizers are not merged.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial
from reprlib import repr as short_repr
from typing import Any

from msgspec import Struct, ValidationError, convert

from sluice._dtypes import parse_dtype
from sluice._errors import FormatError, UnsupportedError

__all__ = ["METHODS", "InputSlice", "MergeMethod", "OutputSlice", "Recipe", "config_error", "parameter", "recipe_of"]

_Settings = Mapping[str, Any] | None

#: The error for what the author of a merge wrote.
config_error = partial(FormatError, advice="Correct the configuration of the merge.")


class MergeMethod(Struct, frozen=True, kw_only=True):
    """Parameters of a method with their defaults (``...`` for those without), and the inputs that it takes."""

    #: Parameters of the merge.
    shared: Mapping[str, Any] = {}
    #: Parameters of each input, without the base unless ``base`` is "input".
    each: Mapping[str, Any] = {}
    #: "input": like the others; "required"; "optional".
    base: str = "input"
    least: int = 1
    most: int = 10_000


_SPARSE = {"int8_mask": False, "normalize": False, "rescale": False, "lambda": 1.0}
_TASK = {"weight": ..., "density": 1.0}

#: Methods by name.
METHODS: Mapping[str, MergeMethod] = {
    "linear": MergeMethod(shared={"normalize": True}, each={"weight": ...}),
    "passthrough": MergeMethod(each={"scale": None}, most=1),
    "swa": MergeMethod(),
    "ema": MergeMethod(shared={"decay": ...}),
    "slerp": MergeMethod(shared={"t": ...}, base="required", least=2, most=2),
    "nuslerp": MergeMethod(
        shared={"nuslerp_row_wise": False, "nuslerp_flatten": True},
        each={"weight": ...},
        base="optional",
        least=2,
        most=2,
    ),
    "model_stock": MergeMethod(shared={"filter_wise": False}, base="required", least=3),
    "task_arithmetic": MergeMethod(shared=_SPARSE, each=_TASK, base="required"),
    "ties": MergeMethod(shared={**_SPARSE, "normalize": True}, each=_TASK, base="required"),
    "dare_linear": MergeMethod(shared={**_SPARSE, "rescale": True}, each=_TASK, base="required"),
    "dare_ties": MergeMethod(shared={**_SPARSE, "rescale": True}, each=_TASK, base="required"),
    "breadcrumbs": MergeMethod(shared=_SPARSE, each={**_TASK, "gamma": 0.01}, base="required"),
    "breadcrumbs_ties": MergeMethod(shared=_SPARSE, each={**_TASK, "gamma": 0.01}, base="required"),
}


class InputSlice(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An input of a slice."""

    model: str
    #: First layer and the one after the last; None for all layers.
    layer_range: tuple[int, int] | None = None
    parameters: _Settings = None


class OutputSlice(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Layers of the merged model that follow each other."""

    sources: tuple[InputSlice, ...]
    base_model: str | None = None
    residual_weight: float | None = None
    parameters: _Settings = None


class _Module(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    slices: tuple[OutputSlice, ...] = ()
    models: tuple[InputSlice, ...] = ()
    parameters: _Settings = None


class _Config(_Module, frozen=True, kw_only=True, forbid_unknown_fields=True):
    merge_method: str
    modules: Mapping[str, _Module] = {}
    base_model: str | None = None
    dtype: str | None = None
    out_dtype: str | None = None
    tokenizer_source: str | None = None
    tokenizer: Mapping[str, Any] | None = None
    chat_template: str | None = None
    name: str | None = None


class Recipe(Struct, frozen=True, kw_only=True):
    """A merge: its method, the inputs of each slice, and parameters."""

    method: str
    slices: tuple[OutputSlice, ...]
    base: str | None = None
    #: Dtype of the computation, and of the result; None for that of the inputs, and of the computation.
    dtype: str | None = None
    out_dtype: str | None = None
    #: Parameters of the merge, those of a module first.
    parameters: tuple[_Settings, ...] = ()

    @property
    def models(self) -> tuple[str, ...]:
        """Paths of all inputs."""
        found = dict.fromkeys(source.model for part in self.slices for source in part.sources)
        return tuple(dict.fromkeys([*found, *filter(None, [self.base, *(part.base_model for part in self.slices)])]))


def recipe_of(config: Mapping[str, Any], file: str | None = None) -> Recipe:
    """Return the recipe of a configuration.

    Raises:
        FormatError: It is not a configuration of a merge.
        UnsupportedError: It asks for something that is not merged.
    """
    try:
        found = convert(dict(config), _Config)
    except ValidationError as error:
        raise config_error(f"the configuration of the merge is wrong: {error}", file=file) from error
    if found.tokenizer_source or found.tokenizer or found.chat_template:
        advice = "Leave tokenizer_source, tokenizer and chat_template out, and copy the files of the base model."
        raise UnsupportedError("tokenizers are not merged", file=file, advice=advice)
    if found.merge_method not in METHODS:
        problem = f"the method {found.merge_method!r} is not one of {', '.join(METHODS)}"
        raise UnsupportedError(problem, file=file, advice="Merge with mergekit, and load the result.")
    if sum(map(bool, (found.models, found.slices, found.modules))) != 1 or len(found.modules) > 1:
        raise config_error("a merge has one of models, slices, and modules with a single module", file=file)
    [module] = found.modules.values() or [_Module(slices=found.slices, models=found.models)]
    if module.models and module.slices:
        raise config_error("a module has models or slices", file=file)
    base = found.base_model
    missing = base is not None and all(base != model.model for model in module.models)  # it is the last then
    whole = OutputSlice(sources=(*module.models, *([InputSlice(model=base)] if missing and base else [])))
    slices = module.slices or (whole,)
    for part in slices:
        _check_inputs(part, found.merge_method, part.base_model or found.base_model, file, several=len(slices) > 1)
    try:
        dtypes = [each and parse_dtype(each, auto=False, floats_only=True) for each in (found.dtype, found.out_dtype)]
    except ValueError as error:
        raise config_error(f"the configuration of the merge is wrong: {error}", file=file) from error
    return Recipe(
        method=found.merge_method,
        slices=slices,
        base=found.base_model,
        dtype=dtypes[0],
        out_dtype=dtypes[1],
        parameters=(module.parameters, found.parameters),
    )


def _check_inputs(part: OutputSlice, method: str, base: str | None, file: str | None, *, several: bool) -> None:
    models, spec = [source.model for source in part.sources], METHODS[method]
    ranges = [source.layer_range for source in part.sources if source.layer_range]
    lengths = {end - first for first, end in ranges}
    count = len(models) - (spec.base == "optional" and base in models)
    problem = ""
    if len(set(models)) != len(models):
        problem = "a model is twice an input of the same tensors"
    elif len(lengths) > 1:
        problem = "the inputs of a slice have different numbers of layers"
    elif any(length < 1 for length in lengths):
        problem = "a layer_range is empty"
    elif len(ranges) < len(models) and (ranges or several):
        problem = "each input of several slices, or all inputs of one, need a layer_range"
    elif part.residual_weight is not None:
        problem = "residual_weight is not merged"
    elif spec.base == "required" and base not in models:
        problem = f"{method} needs a base_model that is one of its inputs"
    elif not spec.least <= count <= spec.most:
        bound = f"at most {spec.most}" if count > spec.most else f"{spec.least} or more"
        problem = f"{method} takes {bound} inputs, not {count}"
    if problem:
        raise config_error(f"the merge is wrong: {problem}", file=file, advice="Correct its inputs and parameters.")


def parameter(settings: Sequence[_Settings], name: str, default: Any, *, tensor: str, at: float) -> Any:
    """Return the value of a parameter for a tensor.

    Args:
        settings: Those that count first come first.
        name: Name of the parameter.
        default: Value without a setting; ``...`` if there is none.
        tensor: Name of the tensor in the input, for filters.
        at: Place of its layer in the slice, from 0 to 1, for lists.

    Raises:
        FormatError: There is no value, or it is of a wrong type.
    """
    for scope in settings:
        if scope is not None and name in scope:
            try:
                value = _value(scope[name], tensor, at)
            except (AttributeError, TypeError, ValueError, OverflowError, RecursionError) as error:
                problem = f"the value of {name!r} in the merge is neither a number nor a list of numbers or of filters"
                raise config_error(problem, tensor=tensor, found=short_repr(scope[name])) from error
            if value is not None:
                return _typed(value, name, default)
    if default is ...:
        raise config_error(f"the merge has no value of {name!r} for this tensor", tensor=tensor)
    return default


def _value(setting: Any, tensor: str, at: float) -> Any:
    if isinstance(setting, Mapping):
        setting = [setting]
    if not isinstance(setting, list | tuple):
        return setting
    if any(isinstance(each, Mapping) for each in setting):
        for each in setting:
            wanted = each.get("filter")
            if wanted is None or wanted == "*" or wanted in tensor:
                return _value(each.get("value"), tensor, at)
        return None
    return _interpolated(setting, at)


def _interpolated(values: Sequence[Any], at: float) -> Any:
    if not values:
        return None
    if any(isinstance(value, bool) for value in values):
        return values[int(at * (len(values) - 1))]
    numbers = [float(value) for value in values]
    scaled = at * (len(numbers) - 1)
    low = int(scaled)
    share = scaled - low
    return (1 - share) * numbers[low] + share * numbers[min(len(numbers) - 1, low + 1)]


def _typed(value: Any, name: str, default: Any) -> bool | float:
    is_flag = isinstance(default, bool)
    try:
        if is_flag and not isinstance(value, str):
            return bool(value)
        if is_flag or not math.isfinite(number := float(value)):
            raise ValueError
        return number
    except (TypeError, ValueError, OverflowError) as error:
        problem = f"the value of {name!r} in the merge is not {'true or false' if is_flag else 'a finite number'}"
        raise config_error(problem, found=short_repr(value)) from error
