"""Unknown keyword arguments: an error that names the argument of sluice for what other libraries call differently.

The signatures of the public functions stay exact: ``explain_keywords`` compares the names of a call with them before it
calls, and nothing is accepted that the signature does not have.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

__all__ = ["explain_keywords", "name_hint"]

_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")

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
_LOCAL = f"{_NOT_NEEDED}from_pretrained reads local directories; huggingface_hub.snapshot_download makes them"
_NO_PICKLE = f"{_NOT_NEEDED}sluice never runs code from a file, and always loads as weights_only=True does"
_ITSELF = f"{_NOT_NEEDED}sluice decides it from the file and the machine"

#: Arguments of the functions that sluice replaces, by name: the arguments of sluice with that meaning, and what else to
#: say. The first of these arguments that the called function has is shown.
_HINTS: dict[str, tuple[tuple[str, ...], str]] = {
    # torch.load, torch.save, nn.Module.load_state_dict
    "f": (("source", "path"), ""),
    "map_location": (("device",), ""),
    "weights_only": ((), _NO_PICKLE),
    "pickle_module": ((), _NO_PICKLE),
    "pickle_protocol": ((), _ITSELF),
    "mmap": (("place",), "place='map' maps the file"),
    "assign": ((), f"{_NOT_NEEDED}tensors on meta get new memory, live ones are filled in place"),
    "state_dict": (("obj", "source"), ""),
    "strict": ((), f"{_NOT_NEEDED}only load_into and plan match names with a model"),
    # safetensors
    "filename": (("source", "path"), ""),
    "tensors": (("obj",), ""),
    "framework": ((), f"{_NOT_NEEDED}sluice returns torch tensors"),
    # accelerate, transformers
    "checkpoint": (("source",), ""),
    "save_directory": (("path", "destination"), ""),
    "pretrained_model_name_or_path": (("directory", "source"), ""),
    "device_map": (("device",), ""),
    "device_mesh": (("distributed_config",), "with distributed_config= transformers makes the mesh"),
    "tp_size": (("distributed_config",), "distributed_config={'tp_size': ...}"),
    "torch_dtype": (("dtype",), ""),
    "max_memory": (("memory",), "memory=sluice.MemoryLimits(host=..., device=...)"),
    "key_mapping": (("rename", "rules"), ""),
    "low_cpu_mem_usage": ((), f"{_NOT_NEEDED}memory never exceeds the finished model and the staging buffers"),
    "offload_folder": (("place",), "place='map' leaves CPU tensors in the file"),
    "offload_state_dict": ((), f"{_NOT_NEEDED}no state dict is held"),
    "ignore_mismatched_sizes": (("ignore_mismatched", "rules"), ""),
    "safe_serialization": (("format",), "format='torch' or 'safetensors'"),
    "quantization_config": (("quantize",), "quantize=Int8WeightOnlyConfig(), or another configuration of torchao"),
    "load_in_8bit": (("quantize", "quantization_config"), ""),
    "load_in_4bit": (("quantize", "quantization_config"), ""),
    "quantize": (
        (),
        f"{_NOT_NEEDED}load_into(quantize=) quantizes, and a model that was saved quantized is not converted",
    ),
    "trust_remote_code": ((), f"{_NOT_NEEDED}sluice never runs code from a checkpoint"),
    "use_safetensors": ((), f"{_NOT_NEEDED}pass the path of the file to choose it"),
    "variant": ((), f"{_NOT_NEEDED}pass the path of the file to choose it"),
    "subfolder": ((), f"{_NOT_NEEDED}pass the path of the subfolder"),
    "revision": (("source",), "write it in the source, as in 'hf://owner/name@revision'"),
    "token": (
        ("source",),
        f"{_NOT_NEEDED}'hf://owner/name' uses the token of huggingface_hub (HF_TOKEN, hf auth login)",
    ),
    "cache_dir": (("source",), f"{_NOT_NEEDED}'hf://owner/name' uses the cache of huggingface_hub (HF_HUB_CACHE)"),
    "local_files_only": (("source",), f"{_NOT_NEEDED}HF_HUB_OFFLINE=1 reads only the cache of huggingface_hub"),
    # arguments of other functions of sluice, and options of its command line
    "rename": (("rules",), "rules=[sluice.rules.rename('old.**', 'new.**')]"),
    "key_a": (("key",), ""),
    "key_b": (("other_key",), ""),
    # usual words
    "path": (("source", "directory"), ""),
    "file": (("source", "path"), ""),
    "module": (("model",), ""),
    "net": (("model",), ""),
    "optim": (("optimizer",), ""),
    "to": (("device",), ""),
    "prefix": (("key",), ""),
    "mode": ((), f"{_NOT_NEEDED}checkpoints are opened for reading"),
    "host": (("memory",), "memory=sluice.MemoryLimits(host=...)"),
    "staging": (("memory",), "memory=sluice.MemoryLimits(staging=...)"),
    "memory_limit": (("memory",), ""),
    "exist_ok": (("overwrite",), ""),
    "force": (("overwrite",), ""),
    "verbose": (("progress",), ""),
    "output": (("destination", "path"), ""),
    "dst": (("destination",), ""),
    "src": (("source",), ""),
    **dict.fromkeys(("num_workers", "num_threads", "threads", "non_blocking", "buffer_size"), ((), _ITSELF)),
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
        return function(*args, **kwargs)

    return checked


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
    arguments, text = _HINTS.get(unknown, ((), ""))
    if "directory" in known and arguments == ("source",):
        arguments, text = (), _LOCAL
    instead = next((name for name in arguments if name in known), None)
    if instead is not None or (text and not arguments):
        return text or f"use {instead}="
    # Here, not above: only errors need it.
    from difflib import get_close_matches

    names = [name for name in known if name != "self"]
    close = get_close_matches(unknown, names, n=1)
    return f"did you mean {close[0]}=?" if close else f"its arguments are {', '.join(names)}"
