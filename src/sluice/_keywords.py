"""Unknown keyword arguments: an error that names the argument of sluice for what other libraries call differently.

The signatures of the public functions stay exact: ``explain_keywords`` compares the names of a call with them before it
calls, and nothing is accepted that the signature does not have.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

__all__ = ["explain_keywords"]

_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")

_NOT_NEEDED = "leave it out: "
_LOCAL = f"{_NOT_NEEDED}sluice reads local files; huggingface_hub.snapshot_download downloads them"
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
    "state_dict": (("source", "obj"), ""),
    # safetensors
    "filename": (("source", "path"), ""),
    "tensors": (("obj",), ""),
    "framework": ((), f"{_NOT_NEEDED}sluice returns torch tensors"),
    # accelerate, transformers
    "checkpoint": (("source",), ""),
    "save_directory": (("path", "destination"), ""),
    "pretrained_model_name_or_path": (("directory", "source"), ""),
    "device_map": (("device",), ""),
    "torch_dtype": (("dtype",), ""),
    "max_memory": (("memory",), "memory=sluice.MemoryLimits(host=..., device=...)"),
    "key_mapping": (("rename", "rules"), ""),
    "low_cpu_mem_usage": ((), f"{_NOT_NEEDED}memory never exceeds the finished model and the staging buffers"),
    "offload_folder": (("place",), "place='map' leaves CPU tensors in the file"),
    "offload_state_dict": ((), f"{_NOT_NEEDED}no state dict is held"),
    "ignore_mismatched_sizes": (("strict", "rules"), "rules=[sluice.rules.drop(...)] leaves tensors out"),
    "safe_serialization": (("format",), "format='torch' or 'safetensors'"),
    "quantization_config": ((), f"{_NOT_NEEDED}sluice does not quantize"),
    "load_in_8bit": ((), f"{_NOT_NEEDED}sluice does not quantize"),
    "load_in_4bit": ((), f"{_NOT_NEEDED}sluice does not quantize"),
    "trust_remote_code": ((), f"{_NOT_NEEDED}sluice never runs code from a checkpoint"),
    "use_safetensors": ((), f"{_NOT_NEEDED}pass the path of the file to choose it"),
    "variant": ((), f"{_NOT_NEEDED}pass the path of the file to choose it"),
    "subfolder": ((), f"{_NOT_NEEDED}pass the path of the subfolder"),
    **dict.fromkeys(("revision", "token", "cache_dir", "local_files_only", "force_download"), ((), _LOCAL)),
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

    @wraps(function)
    def checked(*args: _Arguments.args, **kwargs: _Arguments.kwargs) -> _Result:
        if len(args) > most or not kwargs.keys() <= set(known):
            raise _wrong_arguments(function.__name__, known, most, len(args), kwargs)
        return function(*args, **kwargs)

    return checked


def _wrong_arguments(
    function: str, known: tuple[str, ...], most: int, given: int, keywords: dict[str, object]
) -> TypeError:
    """Return the error for the first unknown keyword, or for too many positional arguments."""
    unknown = next((name for name in keywords if name not in known), None)
    if unknown is None:
        first = ", ".join(name for name in known[:most] if name != "self")
        others = ", ".join(f"{name}=" for name in known[most:])
        method = known[:1] == ("self",)
        return TypeError(
            f"{function}({first}) takes no more than {most - method} positional arguments, not {given - method}; "
            f"write the name of each other argument: {others}"
        )
    return TypeError(f"{function}() has no argument {unknown!r}: {_hint(unknown, known)}")


def _hint(unknown: str, known: tuple[str, ...]) -> str:
    arguments, text = _HINTS.get(unknown, ((), ""))
    instead = next((name for name in arguments if name in known), None)
    if instead is not None or (text and not arguments):
        return text or f"use {instead}="
    # Here, not above: only errors need it.
    from difflib import get_close_matches

    names = [name for name in known if name != "self"]
    close = get_close_matches(unknown, names, n=1)
    if close:
        return f"did you mean {close[0]}=?"
    return f"its arguments are {', '.join(names)}"
