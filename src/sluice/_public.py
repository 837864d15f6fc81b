"""Public names: the module they report, when a call began, errors for wrong argument names.

The signatures of the public functions stay exact: ``explain_keywords`` compares the names of a call with them before it
calls, and nothing is accepted that the signature does not have.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from contextvars import ContextVar
from functools import wraps
from typing import ParamSpec, TypeVar

__all__ = ["call_started", "explain_keywords", "name_hint", "public"]

_Thing = TypeVar("_Thing")


def public(module: str = "sluice") -> Callable[[_Thing], _Thing]:
    """Return a decorator that sets ``__module__`` of a class or function to the module that exports it.

    Tracebacks, ``repr`` and pickles then name ``sluice.FormatError``, and later moves inside the package do not show.
    ``typing.get_type_hints`` of such a class needs ``globalns``, as for numpy's and torch's classes.
    """

    def mark(thing: _Thing) -> _Thing:
        thing.__module__ = module
        return thing

    return mark


_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")

_STARTED: ContextVar[float | None] = ContextVar("sluice.started", default=None)

#: Functions of other libraries that users may look for in this module.
_FUNCTIONS = {
    "load": "load_state_dict(source) loads a file, load_into(model, source) fills a module",
    "load_file": "load_state_dict(source) loads a file",
    "load_model": "load_into(model, source) fills a module",
    "load_checkpoint_in_model": "load_into(model, source) fills a module",
    "load_checkpoint_and_dispatch": "load_into(model, source, device='auto') fills a module",
    "from_pretrained": "hf.from_pretrained(directory) loads a model of transformers",
    "init_empty_weights": "empty_init() builds modules without memory",
    "safe_open": "open(source) opens a checkpoint",
    "save_file": "save(obj, path) writes a state dict",
    "save_model": "save(obj, path) writes a module",
    "inspect": "open(source) opens a checkpoint; the command is `sluice inspect`",
}

#: Calls that may have been meant if the last argument is missing.
_WITHOUT_SOURCE = {
    "plan": "plan(None, source) plans for the checkpoint alone",
    "load_into": "load_state_dict(source) loads without a model",
}

_NOT_NEEDED = "leave it out: "
_NO_PICKLE = f"{_NOT_NEEDED}sluice never runs code from a file, and always loads as weights_only=True does"
_ITSELF = f"{_NOT_NEEDED}sluice decides it from the file and the machine"
_ITS_PATH = f"{_NOT_NEEDED}pass the path of the file or subfolder"
_HUB = f"{_NOT_NEEDED}'hf://owner/name' uses the settings of huggingface_hub: HF_TOKEN, HF_HUB_CACHE, HF_HUB_OFFLINE"

#: Arguments of the functions that sluice replaces: the argument of sluice with that meaning, or what else to say. Of
#: several arguments the first that the called function has is shown; without any, its arguments are listed.
_HINTS: dict[str, str] = {
    **dict.fromkeys(("f", "filename", "file"), "source= path="),
    **dict.fromkeys(("path", "checkpoint", "src", "pretrained_model_name_or_path"), "source= directory="),
    **dict.fromkeys(("save_directory", "output", "dst"), "destination= path="),
    **dict.fromkeys(("map_location", "device_map", "to"), "device="),
    **dict.fromkeys(("weights_only", "pickle_module", "trust_remote_code"), _NO_PICKLE),
    **dict.fromkeys(("pickle_protocol", "num_workers", "num_threads", "non_blocking", "buffer_size"), _ITSELF),
    **dict.fromkeys(("low_cpu_mem_usage", "framework", "offload_state_dict"), f"{_NOT_NEEDED}sluice always does so"),
    **dict.fromkeys(("use_safetensors", "variant", "subfolder"), _ITS_PATH),
    **dict.fromkeys(("token", "cache_dir", "local_files_only"), _HUB),
    "revision": f"{_NOT_NEEDED}write it in the source, as in 'hf://owner/name@revision'",
    **dict.fromkeys(("headers", "timeout", "cache"), "source=sluice.Remote(url, headers=..., timeout=..., cache=...)"),
    **dict.fromkeys(("load_in_8bit", "load_in_4bit"), "quantize= quantization_config="),
    **dict.fromkeys(("module", "net"), "model="),
    **dict.fromkeys(("exist_ok", "force"), "overwrite="),
    **dict.fromkeys(("host", "staging", "max_memory"), "memory=sluice.MemoryLimits(host=..., device=..., staging=...)"),
    "mmap": "place='map'",
    "adapters": f"{_NOT_NEEDED}merge them first, with sluice.convert(source, destination, adapters=)",
    "offload_folder": "place='map'",
    "assign": f"{_NOT_NEEDED}tensors on meta get new memory, live ones are filled in place",
    "state_dict": "obj= source=",
    "tensors": "obj=",
    "strict": f"{_NOT_NEEDED}only load_into and plan match names with a model",
    "device_mesh": "distributed_config=",
    "tp_size": "distributed_config={'tp_size': ...}",
    "torch_dtype": "dtype=",
    "memory_limit": "memory=",
    "key_mapping": "rename= rules=",
    "rename": "rules=[sluice.rules.rename('old.**', 'new.**')]",
    "ignore_mismatched_sizes": "ignore_mismatched= rules=",
    "safe_serialization": "format='safetensors'",
    "quantization_config": "quantize=Int8WeightOnlyConfig()",
    "quantize": f"{_NOT_NEEDED}load_into(quantize=) quantizes, and a model that was saved quantized is not converted",
    "key_a": "key=",
    "key_b": "other_key=",
    "optim": "optimizer=",
    "prefix": "key=",
    "mode": f"{_NOT_NEEDED}checkpoints are opened for reading",
    "verbose": "progress=",
}


def explain_keywords(function: Callable[_Arguments, _Result]) -> Callable[_Arguments, _Result]:
    """Return a function with the same signature whose errors for wrong argument names say what to write.

    Args:
        function: A function or method without ``*args`` and ``**kwargs``.
    """
    code = function.__code__
    most = code.co_argcount
    known = code.co_varnames[: most + code.co_kwonlyargcount]
    names = frozenset(known)
    required = most - len(function.__defaults__ or ())

    @wraps(function)
    def checked(*args: _Arguments.args, **kwargs: _Arguments.kwargs) -> _Result:
        if len(args) > most or not names.issuperset(kwargs) or not kwargs.keys() >= set(known[len(args) : required]):
            missing = [name for name in known[len(args) : required] if name not in kwargs]
            raise _wrong_arguments(function.__name__, known, most, args, kwargs, missing)
        if _STARTED.get() is not None:
            return function(*args, **kwargs)
        began = _STARTED.set(time.monotonic())
        try:
            return function(*args, **kwargs)
        finally:
            _STARTED.reset(began)

    return checked


def call_started() -> float:
    """Return when the public call of this thread began, by ``time.monotonic``; the present time outside of calls."""
    began = _STARTED.get()
    return time.monotonic() if began is None else began


def name_hint(name: str) -> str:
    """Return what a missing name of the package may have meant, as the end of an error text."""
    if name in _FUNCTIONS:
        return f"; sluice.{_FUNCTIONS[name]}"
    return ""


def _wrong_arguments(
    function: str,
    known: tuple[str, ...],
    most: int,
    args: tuple[object, ...],
    keywords: dict[str, object],
    missing: list[str],
) -> TypeError:
    """Return the error for the first unknown keyword, for too many positional arguments, or for missing ones."""
    unknown = next((name for name in keywords if name not in known), None)
    if unknown is not None:
        return TypeError(f"{function}() has no argument {unknown!r}: {_hint(unknown, known)}")
    positional = [name for name in known[:most] if name != "self"]
    call = f"{function}({', '.join(positional)})"
    if len(args) > most:
        if "model" not in known and args and hasattr(args[0], "named_parameters"):
            return TypeError(f"{call} takes no module; load_into(model, source) loads into one")
        others = ", ".join(f"{name}=" for name in known[most:])
        return TypeError(f"{call} takes no further positional arguments; write their names: {others}")
    hint = f"; {_WITHOUT_SOURCE[function]}" if function in _WITHOUT_SOURCE and args else ""
    return TypeError(f"{call}: {' and '.join(missing)} {'is' if len(missing) == 1 else 'are'} missing{hint}")


def _hint(unknown: str, known: tuple[str, ...]) -> str:
    text = _HINTS.get(unknown, "")
    if text.startswith(_NOT_NEEDED):
        return text
    for argument in re.findall(r"(?:^| )([a-z_]+)=", text.partition("(")[0]):
        if argument in known:
            return f"use {text if text[-1] != '=' else f'{argument}='}"
    # Here, not above: only errors need it.
    from difflib import get_close_matches

    names = [name for name in known if name != "self"]
    close = get_close_matches(unknown, names, n=1)
    return f"did you mean {close[0]}=?" if close else f"its arguments are {', '.join(names)}"
