"""Class, configuration, dtype and quantizer of the model in a directory, from ``config.json`` only; and its ranks."""

from __future__ import annotations

import copy
import json
import os
from contextlib import closing
from typing import Any

import torch

from sluice._dtypes import torch_dtype
from sluice._errors import CheckpointError, FormatError, MissingFileError, ReadError, UnsupportedError
from sluice._messages import type_of
from sluice._options import DEFAULT_LIMITS, Limits
from sluice.checkpoint.open_checkpoint import OpenCheckpoint
from sluice.formats.protocol import read_whole
from sluice.hf._hub import FoundModel
from sluice.hf._quantization import Quantizer, TorchAoQuantizer
from sluice.sources.local import LocalFile
from sluice.sources.opening import refuse_url
from sluice.sources.remote_names import missing_advice

__all__ = ["class_and_config", "find_quantizer", "prepare_ranks", "settle_dtype"]

#: Settings of a configuration that change how weights are loaded and that sluice does not support.
_REFUSED_SETTINGS = {
    "compression_config": "a compressed model",
    "fusion_config": "a model with fused modules",
    "transformers_weights": "a model whose configuration names its weight file",
}


def class_and_config(
    library: Any, files: FoundModel, model_class: Any, config: Any, *, limits: Limits | None
) -> tuple[Any, Any]:
    """Return the model class and a copy of the configuration."""
    path = files.folder
    _check_directory(path, limits or DEFAULT_LIMITS)
    if not issubclass(type(model_class), (type, type(None))):
        raise TypeError(f"model_class is {type_of(model_class)}; write a class of transformers, such as GPT2Model")
    is_auto = model_class is not None and not issubclass(model_class, library.PreTrainedModel)
    if config is None:
        config = _read(
            library.transformers.AutoConfig if model_class is None or is_auto else model_class.config_class, path
        )
    elif not isinstance(config, library.transformers.PreTrainedConfig):
        raise TypeError(f"config is {type_of(config)}; write a configuration of transformers, such as GPT2Config(...)")
    config = copy.deepcopy(config)
    for setting, meaning in _REFUSED_SETTINGS.items():
        if getattr(config, setting, None):
            raise UnsupportedError(f"{setting} describes {meaning}, which sluice does not load", file=path)
    if model_class is None:
        model_class = _named_class(library, config, path)
    elif is_auto:
        model_class = _class_of_auto(library, model_class, config, path)
    others = getattr(type(config), "extra_files", ())
    extra = [name for name in others if name in files.names or os.path.exists(os.path.join(path, name))]
    if extra:
        problem = f"{model_class.__name__} stores weights in additional files"
        raise UnsupportedError(problem, file=path, found=", ".join(extra))
    config.name_or_path = files.name
    return model_class, config


def _read(config_class: Any, path: str) -> Any:
    """Return the configuration of the directory.

    Raises:
        UnsupportedError: transformers cannot read it, or it names code that is not part of transformers.
    """
    try:
        config = config_class.from_pretrained(path, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # validation code of each architecture may raise anything
        raise UnsupportedError(f"transformers cannot read the configuration: {error}", file=path) from error
    for part in (config, *(getattr(config, name) for name in config.sub_configs)):
        for setting in ("_attn_implementation", "_experts_implementation"):
            named = getattr(part, setting, None)
            if "/" in str(named):
                problem = f"{setting} names code of a different repository; sluice does not run code named in files"
                raise UnsupportedError(problem, file=path, found=str(named)[:200])
    return config


def _check_directory(path: str, limits: Limits) -> None:
    """Check that the path is a model directory.

    Raises:
        MissingFileError: There is no such directory, or it has no configuration.
        ReadError: It is not a directory, or the configuration cannot be read.
        FormatError: The configuration is not a JSON object.
        LimitError: The configuration exceeds ``limits.header_bytes``.
        UnsupportedError: The directory holds an adapter, or the path is a URL.
    """
    refuse_url(path)
    name = os.path.join(path, "config.json")
    if not os.path.isfile(name):  # excludes FIFOs, whose read would block
        if os.path.exists(os.path.join(path, "adapter_config.json")):
            raise UnsupportedError("the directory holds an adapter, not a model", file=path)
        raise _no_configuration(path, name)
    with closing(LocalFile(name)) as source:
        text = read_whole(source, limits, "config.json")
    try:
        values = json.loads(text)  # also NaN and infinity, as transformers writes them
    except (ValueError, RecursionError) as error:
        raise FormatError(f"config.json is not JSON: {error}", file=path) from error
    if not isinstance(values, dict):
        raise FormatError("config.json is not a JSON object", file=path, found=type(values).__name__)


def _no_configuration(path: str, name: str) -> CheckpointError | ReadError:
    """Return the error for a path that is not a model directory; ``name`` is that of its configuration."""
    if not os.path.lexists(path):
        return MissingFileError("the directory does not exist", file=path, advice=missing_advice(path))
    if os.path.isdir(path) and not os.path.lexists(name):
        advice = "A directory that save_pretrained wrote has one; sluice.load_into loads weights without it."
        return MissingFileError("the directory has no config.json", file=name, advice=advice)
    advice = "Pass a directory that save_pretrained wrote; sluice.load_into loads weights from a file."
    return ReadError("not a local directory with a config.json", file=path, advice=advice)


def _architectures(config: Any) -> list[str]:
    """Return the names of model classes in a configuration, which may hold anything in their place."""
    names = config.architectures
    return [name for name in names if isinstance(name, str)] if isinstance(names, (list, tuple)) else []


def _named_class(library: Any, config: Any, path: str) -> type:
    """Return the class of transformers that ``config.json`` names."""
    names = _architectures(config)
    if len(names) != 1:
        found = ", ".join(names) or "none"
        raise UnsupportedError(
            "config.json does not name exactly one architecture: pass model_class", file=path, found=found
        )
    named: Any = getattr(library.transformers, names[0], None) if names[0].isidentifier() else None
    if not (isinstance(named, type) and issubclass(named, library.PreTrainedModel)):
        raise UnsupportedError("transformers has no model class with this name", file=path, found=names[0])
    return named


def _class_of_auto(library: Any, auto: Any, config: Any, path: str) -> type:
    """Return the model class that an ``AutoModel...`` class selects."""
    mapped = getattr(auto, "_model_mapping", {}).get(type(config), ())
    choices = mapped if isinstance(mapped, (list, tuple)) else (mapped,)
    named = [choice for choice in choices if choice.__name__ in _architectures(config)]
    for choice in (*named, *choices):
        if issubclass(choice, library.PreTrainedModel):
            chosen: type = choice
            return chosen
    problem = f"{getattr(auto, '__name__', auto)} is not a model class and has none for {type(config).__name__}"
    raise UnsupportedError(problem, file=path)


def settle_dtype(config: Any, dtype: torch.dtype | str, checkpoint: OpenCheckpoint, path: str) -> torch.dtype:
    """Return the dtype of the model, and set it in the configuration and its parts, as the library does."""
    requested: Any = config.dtype if dtype == "auto" else dtype
    if requested is None:
        entries, storages = checkpoint.entries, checkpoint.index.storages
        by_name = "safetensors" in checkpoint.format  # the library goes through their names in alphabetical order
        order = sorted(entries, key=lambda name: (storages[entries[name].storages[0]].file, name if by_name else ""))
        floating = (torch_dtype(entries[name].dtype) for name in order)
        usable = (each for each in floating if each.is_floating_point and each.itemsize > 1)
        requested = next(usable, torch.float32)
    chosen = getattr(torch, requested, None) if isinstance(requested, str) else requested
    if not (isinstance(chosen, torch.dtype) and chosen.is_floating_point and chosen.itemsize > 1):
        expected = "a floating-point dtype of 2 bytes or more"
        if dtype == "auto":
            problem = "a model cannot have the dtype in config.json"
            raise UnsupportedError(problem, file=path, expected=expected, found=repr(requested))
        raise ValueError(f"dtype must be 'auto' or {expected}, not {requested!r}")
    config.dtype = chosen
    for name in config.sub_configs:
        if (part := getattr(config, name)) is not None:
            part.dtype = chosen
    return chosen


def prepare_ranks(library: Any, model_class: Any, config: Any, tp_plan: Any) -> tuple[Any, Any, Any] | None:
    """Return the ``DistributedConfig`` of a divided model, the device of this rank and the library's meshes.

    None for a whole model. The library divides a model on meta, and the load finds DTensors like in any other model.

    Raises:
        UnsupportedError: The configuration asks for pipeline parallelism, which removes layers.
        ValueError: Both forms were given, or the library refuses the configuration.
    """
    if config is None and tp_plan is None:
        return None
    if config is not None and tp_plan is not None:
        raise ValueError("pass distributed_config= or tp_plan=, not both")
    kind = library.transformers.distributed.DistributedConfig
    if config is None:
        config = kind(tp_plan=tp_plan)
    elif isinstance(config, dict):
        config = kind.from_dict(config)
    if config.pp_size is not None and config.pp_size > 1:
        raise UnsupportedError("from_pretrained does not divide the layers of a model: pp_size must be 1")
    prepared, device, meshes = model_class.prepare_distribute_model(config)
    return prepared, device, meshes


def find_quantizer(library: Any, config: Any, argument: Any, path: str, *, divided: bool) -> Quantizer:
    """Return the quantizer for the caller's argument or the directory's configuration, which gets it.

    Args:
        library: The library.
        config: Configuration of the model.
        argument: Argument of the load.
        path: The directory.
        divided: Whether the model is divided over ranks.

    Raises:
        TypeError: The argument is not a configuration of the library.
        UnsupportedError: It is for neither torchao nor bitsandbytes, it changes which weights are tied, or the model is
            divided.
    """
    found = argument if argument is not None else getattr(config, "quantization_config", None)
    if not found:
        return Quantizer()
    values = found if isinstance(found, dict) else getattr(found, "__dict__", {})
    method = values.get("quant_method")
    if method is None and found is argument:
        raise TypeError(
            f"quantization_config is {type_of(argument)}; write TorchAoConfig(...) of transformers around a "
            "configuration of torchao, or BitsAndBytesConfig(...)"
        )
    method = str(getattr(method, "value", method))
    if method not in {"torchao", "bitsandbytes"}:
        problem = "quantization_config describes a model that sluice does not load"
        raise UnsupportedError(problem, file=path, expected="torchao or bitsandbytes", found=method)
    if values.get("untie_embedding_weights"):
        raise UnsupportedError("quantization_config: untie_embedding_weights is not supported", file=path)
    if divided:
        raise UnsupportedError("a quantized model cannot be divided over ranks while it is loaded", file=path)
    try:
        quantizer, _, _ = library.get_hf_quantizer(config, argument, None, True, {})
    except Exception as error:  # the library's code may raise anything for what a file says
        raise UnsupportedError(f"transformers refuses the quantization_config: {error}", file=path) from error
    if method == "torchao":
        return TorchAoQuantizer(quantizer)
    from sluice.hf._bitsandbytes import BitsAndBytesQuantizer  # here, not above: most models do without

    return BitsAndBytesQuantizer(quantizer)
