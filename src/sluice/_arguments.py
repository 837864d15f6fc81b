"""Checks of the arguments of public functions, each with one error that says which forms are accepted.

Only what can be decided without a checkpoint is checked here. Sources are checked where they are opened
(``sources.opening``), and devices where torch resolves them (``loading.devices``). torch is imported only by checks of
objects of torch.
"""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Collection, Mapping, Sequence
from numbers import Integral, Real
from typing import Any, cast, get_args

from sluice._dtypes import DType, parse_dtype, torch_dtype
from sluice._errors import UnsupportedError
from sluice._messages import type_of
from sluice._options import Limits, LoadPlace, Memory, MemoryLimits, PageCache, Share
from sluice._units import parse_bytes

__all__ = [
    "check_load",
    "check_model",
    "check_optimizer",
    "check_plan_without_model",
    "check_save",
    "check_tolerances",
    "device_name",
    "dtype_argument",
    "memory_limits",
    "path_argument",
    "size_or_none",
    "state_to_save",
]


_PLACES, _PAGE_CACHES, _SHARES = map(get_args, (LoadPlace, PageCache, Share))

_RENAMING_RULE = "rules=[sluice.rules.rename('old.**', 'new.**')]"

_SHARED_ONCE = (
    "share='once' is gone: ranks of one host fetch remote files once with sluice.Remote(url, cache=directory). "
    "Four ranks that loaded 1 GB from a server of 200 MB/s took 7 s with it, with share='once' 16 s, and each for "
    "itself 22 s; on file systems share='once' was the slowest"
)


def dtype_argument(dtype: DType | None, *, auto_is_none: bool = False) -> str | None:
    """Return the name of a ``dtype`` argument, ``"auto"`` or None.

    Args:
        dtype: The argument.
        auto_is_none: Whether None is returned for ``"auto"``, because both mean the dtypes of the checkpoint.

    Raises:
        ValueError: It is not a floating-point dtype. A cast of weights to integers would make most of them zero.
    """
    if dtype is None:
        return None
    name = parse_dtype(dtype, floats_only=True)
    if name == "auto":
        return None if auto_is_none else name
    if isinstance(dtype, str):
        try:
            torch_dtype(name)
        except UnsupportedError:
            raise ValueError(f"dtype={dtype!r}: the installed torch has no {name}") from None
    return name


def memory_limits(memory: Memory) -> MemoryLimits | None:
    """Return the limits of a ``memory`` argument, with devices as torch writes them; one size is that of the host.

    Raises:
        ValueError: A text is not a size, or a limit is for something other than an accelerator.
        TypeError: It is neither limits nor a size.
    """
    if isinstance(memory, MemoryLimits) and isinstance(memory.device, Mapping):
        limits = {_accelerator(key): size for key, size in memory.device.items()}
        if len(limits) < len(memory.device):
            raise ValueError(f"MemoryLimits(device=...) has two limits for one of {', '.join(limits)}")
        return dataclasses.replace(memory, device=limits)
    if memory is None or isinstance(memory, MemoryLimits):
        return memory
    if isinstance(memory, bool) or not isinstance(memory, (Integral, str)):
        raise TypeError(
            f"memory= is {type_of(memory)}; write a size such as '2GiB' for host memory, or "
            "sluice.MemoryLimits(host='2GiB', device={'cuda:0': '8GiB'})"
        )
    return MemoryLimits(host=size_or_none("memory", memory))


def _accelerator(key: Any) -> str:
    import torch

    try:
        device = torch.device(key)  # not device_name, which would create a context on each
    except (RuntimeError, TypeError):
        device = torch.device("cpu")
    if device.type in {"cpu", "meta"}:
        raise ValueError(f"MemoryLimits(device=...): {key!r} is not an accelerator such as 'cuda:0'; host= is 'cpu'")
    if device.index is None and torch.accelerator.is_available():
        device = torch.device(device.type, torch.accelerator.current_device_index())
    return str(device)


def device_name(device: object) -> str:
    """Return a device as torch writes it, with its current index; an int is the index of an accelerator.

    Raises:
        ValueError: torch cannot use it, or it cannot hold weights: the meta device, and accelerate's ``"disk"``.
        TypeError: It is not a device.
    """
    import torch

    if isinstance(device, bool) or not isinstance(device, (str, int, torch.device)):
        several = "; several devices need a model, as in load_into" if isinstance(device, Mapping) else ""
        raise TypeError(f"device= is {type_of(device)}; write 'cpu', 'cuda:0', a torch.device or an index{several}")
    if device == "disk":
        raise ValueError(
            "device 'disk' cannot hold weights: sluice loads all of them. To keep weights in the file until they "
            "are used, pass device='cpu' and place='map'"
        )
    if device == "auto":
        raise ValueError("device='auto' needs a model, as in load_into and plan")
    try:
        resolved = torch.empty(0, device=device).device
    except (RuntimeError, AssertionError) as error:  # torch without CUDA raises AssertionError
        text = str(error).partition("\n")[0]
        reason = "torch has no such kind of device" if text.startswith("Expected one of") else text.rstrip(".")
        shown = str(device) if isinstance(device, torch.device) else device
        raise ValueError(f"device {shown!r} cannot be used: {reason}; this machine has {_devices_here()}") from error
    if resolved.type == "meta":
        raise ValueError("device='meta' cannot hold weights")
    return str(resolved)


def _devices_here() -> str:
    import torch

    kind = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    found = [] if kind is None else [f"{kind.type}:{index}" for index in range(torch.accelerator.device_count())]
    return ", ".join(["cpu", *found])


def size_or_none(argument: str, size: int | str | None) -> int | None:
    """Return a size argument in bytes.

    Raises:
        ValueError: A text is not a size, or the size is negative.
        TypeError: It is neither an int nor a text.
    """
    if size is None:
        return None
    try:
        return parse_bytes(size)
    except (TypeError, ValueError) as error:
        raise type(error)(f"{argument}=: {error}") from None


def check_load(  # noqa: PLR0913  one for each argument that functions share
    *,
    key: object = None,
    limits: object = None,
    rename: object = None,
    rules: object = (),
    strict: object = True,
    allow_empty: object = False,
    ignore_mismatched: object = False,
    overwrite: object = False,
    dry_run: object = False,
    place: object = "copy",
    page_cache: object = "auto",
    share: object = "auto",
    blocks: object = None,
    progress: object = False,
    **_others: object,
) -> None:
    """Check arguments that several functions share, before anything is opened; all others are left out.

    Raises:
        TypeError: One has a wrong type.
        ValueError: ``allow_empty`` is given without ``strict=False``, a pattern is not a regular expression, or
            ``place``, ``page_cache`` or ``share`` is not one of its choices.
    """
    if key is not None and not isinstance(key, str):
        raise TypeError(f"key= is {type_of(key)}; write a text such as 'model_state_dict' or 'ema.model'")
    if limits is not None and not isinstance(limits, Limits):
        raise TypeError(f"limits= is {type_of(limits)}, not sluice.Limits; it bounds files, and memory= memory")
    flags = {"strict": strict, "allow_empty": allow_empty, "ignore_mismatched": ignore_mismatched}
    for name, value in {**flags, "overwrite": overwrite, "dry_run": dry_run}.items():
        if not isinstance(value, bool):
            raise TypeError(f"{name}= is {type_of(value)}, not True or False")
    if allow_empty and strict:
        raise ValueError("allow_empty=True needs strict=False: with strict=True every missing name is an error")
    if not (isinstance(progress, bool) or callable(progress)):
        raise TypeError(f"progress= is {type_of(progress)}, not True, False or a function of a ProgressEvent")
    if not (rename is None or callable(rename)):
        _check_rename(rename)
    if not isinstance(rules, Sequence) or isinstance(rules, (str, bytes)):
        raise TypeError(
            f"rules= is {type_of(rules)}; write a list, {_RENAMING_RULE}, or rename= for a mapping of names"
        )
    named = blocks is None or (isinstance(blocks, Collection) and all(isinstance(name, str) for name in blocks))
    if isinstance(blocks, str) or not named:
        raise TypeError("blocks must be a sequence of names of modules, such as ['layers.*']")
    chosen = ("place", place, _PLACES), ("page_cache", page_cache, _PAGE_CACHES), ("share", share, _SHARES)
    for name, value, choices in chosen:
        if value not in choices:
            wrong = f"{name}={value!r} is not one of {', '.join(map(repr, choices))}"
            raise ValueError(_SHARED_ONCE if (name, value) == ("share", "once") else wrong)


def _check_rename(rename: object) -> None:
    if isinstance(rename, Mapping):
        fine = all(_is_pattern(old) and (new is None or isinstance(new, str)) for old, new in rename.items())
    else:
        fine = isinstance(rename, Sequence) and not isinstance(rename, (str, bytes)) and all(map(_is_pair, rename))
    if not fine:
        raise TypeError(
            f"rename= is {type_of(rename)} in a wrong form; write {{'old': 'new'}}, "
            "[('regular expression', 'replacement')], or a function of a name"
        )
    pairs = () if isinstance(rename, Mapping) else cast("Sequence[tuple[str | re.Pattern[str], str]]", rename)
    for pattern, _ in pairs:
        try:
            re.compile(pattern)
        except (re.error, OverflowError, RecursionError) as error:
            raise ValueError(f"rename=: {pattern!r} is not a regular expression: {error}") from None


def _is_pair(pair: object) -> bool:
    if not (isinstance(pair, (tuple, list)) and len(pair) == 2 and isinstance(pair[1], str)):
        return False
    return _is_pattern(pair[0])


def _is_pattern(value: object) -> bool:
    return isinstance(value.pattern if isinstance(value, re.Pattern) else value, str)


def check_plan_without_model(
    *,
    rename: object,
    strict: object,
    allow_empty: object,
    ignore_mismatched: object,
    place: object,
    quantize: object,
    device: object,
    **_others: object,
) -> None:
    """Refuse arguments of ``plan`` that need a model; all others are left out.

    Raises:
        ValueError: There are such arguments.
    """
    several = isinstance(device, Mapping) or device == "auto"
    given = {
        "rename": rename is not None,
        "strict": not strict,
        "allow_empty": bool(allow_empty),
        "ignore_mismatched": bool(ignore_mismatched),
        "place": place != "copy",
        "quantize": quantize is not None,
        "device": several,
    }
    if wrong := [f"{name}=" for name, is_given in given.items() if is_given]:
        instead = f"; without one, write {_RENAMING_RULE}" if rename is not None else ""
        raise ValueError(f"plan(None, source): these arguments need a model: {', '.join(wrong)}{instead}")


def check_save(metadata: object, chosen: str) -> None:
    """Check the metadata of a save.

    Raises:
        TypeError: It is not a mapping.
        ValueError: The format has no metadata.
    """
    if metadata is not None and not isinstance(metadata, Mapping):
        raise TypeError(f"metadata= is {type_of(metadata)}; write a dict of texts")
    if metadata and chosen not in {"safetensors", "huggingface"}:
        raise ValueError(f"metadata is written to the header of safetensors files; {chosen!r} files have none")


def check_tolerances(*, rtol: object, atol: object) -> None:
    """Check the tolerances of a comparison.

    Raises:
        TypeError: One is not a number.
        ValueError: One is negative or NaN.
    """
    for name, value in (("rtol", rtol), ("atol", atol)):
        if not isinstance(value, Real):
            raise TypeError(f"{name}= is {type_of(value)}, not a number")
        if not float(value) >= 0:
            raise ValueError(f"tolerances must not be negative: {name}={value}")


def path_argument(path: object, argument: str = "path") -> str:
    """Return a path argument as text, with ``~`` expanded unless that name exists.

    Raises:
        TypeError: It is not a path.
    """
    if not isinstance(path, (str, os.PathLike)):
        if isinstance(path, bytes):
            hint = "pass os.fsdecode(name)"
        elif hasattr(path, "write"):
            hint = "pass the path of a file, not the file"
        else:
            hint = "write a path, a str or a pathlib.Path"
        raise TypeError(f"{argument} is {type_of(path)}; {hint}")
    text = os.fsdecode(path)
    return text if os.path.lexists(text) else os.path.expanduser(text)


def check_model(model: object, source: object, call: str, *, optional: bool = False) -> None:
    """Refuse what is not an ``nn.Module``, and say what the argument is instead.

    Args:
        model: The first argument.
        source: The second argument, to recognize that the two are swapped.
        call: The call as text: ``"load_into(model, source)"``.
        optional: Whether None is accepted.

    Raises:
        TypeError: It is not a module.
    """
    from torch import nn

    if isinstance(model, nn.Module) or (model is None and optional):
        return
    raise TypeError(f"{call}: {_what_instead('model', model, source, nn.Module)}")


def check_optimizer(optimizer: object, source: object) -> None:
    """Refuse what is not a ``torch.optim.Optimizer``; see ``check_model``.

    Raises:
        TypeError: It is not an optimizer.
    """
    from torch import nn, optim

    if isinstance(optimizer, optim.Optimizer):
        return
    if isinstance(optimizer, nn.Module):
        problem = "optimizer is a module; load_into(model, source) loads into modules"
    elif isinstance(optimizer, optim.lr_scheduler.LRScheduler):
        problem = "optimizer is a scheduler; pass checkpoint.tree[...] to its own load_state_dict"
    else:
        problem = _what_instead("optimizer", optimizer, source, optim.Optimizer)
    raise TypeError(f"load_optimizer(optimizer, source): {problem}")


def _what_instead(argument: str, value: object, other: object, wanted: type) -> str:
    """Return what is wrong with an argument that should be an instance of ``wanted``."""
    if isinstance(other, wanted):
        return f"the arguments are swapped: the first is {type_of(value)}, the second the {argument}"
    if isinstance(value, type):
        build = f"build it first: {argument} = {value.__name__}(...)"
        return f"{argument} is {type_of(value)}, not an instance; {build}{_UNDER_EMPTY_INIT[argument]}"
    if isinstance(value, Mapping):
        return f"{argument} is {type_of(value)}, not a {wanted.__name__}; {_FROM_MAPPING[argument]}"
    if value is None and argument == "model":
        return "model is None, not a torch.nn.Module; load_state_dict(source) loads without a model"
    if callable(value):
        return f"{argument} is a function; call it and pass what it returns{_UNDER_EMPTY_INIT[argument]}"
    return f"{argument} is {type_of(value)}, not a torch.{wanted.__module__.split('.')[1]}.{wanted.__name__}"


_UNDER_EMPTY_INIT = {"model": ", inside `with sluice.empty_init():`", "optimizer": ""}

_FROM_MAPPING = {
    "model": "load_state_dict(source) returns a state dict",
    "optimizer": "pass the optimizer itself",
}


def state_to_save(obj: object, path: object) -> Any:
    """Return the state of what ``save`` gets: that of a module or an optimizer, and anything else unchanged.

    Raises:
        TypeError: The arguments are swapped, or the object is a class, a path, or an open checkpoint.
    """
    from torch import Tensor, nn, optim

    if isinstance(obj, (nn.Module, optim.Optimizer)):
        return obj.state_dict()
    if isinstance(obj, (str, bytes, os.PathLike)):
        swapped = isinstance(path, (nn.Module, optim.Optimizer, Mapping, Tensor))
        hint = "the arguments are swapped" if swapped else "convert(source, destination) copies a checkpoint"
        raise TypeError(f"save(obj, path): obj is a path; {hint}")
    if isinstance(obj, type):
        raise TypeError(f"save(obj, path): obj is {type_of(obj)}, not an instance")
    if hasattr(obj, "index") and hasattr(obj, "sources"):  # an open checkpoint; its class is in a higher layer
        raise TypeError("save(obj, path): obj is an open checkpoint; convert(source, destination) writes it")
    return obj
