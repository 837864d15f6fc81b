"""``load_pipeline``: pipelines of diffusers, with sluice reading the weights of every model.

The library builds schedulers, tokenizers and processors as always. Models are built without memory and filled straight
from their files. Classes are looked up in diffusers and transformers; no other code that a file names is imported.
"""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import diffusers
import torch
import transformers
from torch import nn
from transformers.modeling_utils import local_torch_dtype

from sluice import hf
from sluice._dtypes import DType, parse_dtype, torch_dtype
from sluice._errors import FormatError, UnsupportedError
from sluice.api.checkpoint import open as open_checkpoint
from sluice.api.load import load_into
from sluice.loading.devices import Device
from sluice.modules.empty_init import empty_init

__all__ = ["load_pipeline"]


def load_pipeline(
    directory: str | os.PathLike[str], *, dtype: DType | None = None, device: Device = None, **components: Any
) -> Any:
    """Load a pipeline as ``DiffusionPipeline.from_pretrained`` does from a directory, one model after the other.

    Args:
        directory: A local directory with ``model_index.json``.
        dtype: Dtype of the weights; None is float32 for models of diffusers and what ``sluice.hf.from_pretrained``
            takes for models of transformers, as in the library. Modules that the library keeps in float32 keep it.
        device: Device of all models; None is the CPU.
        components: Components, or settings of the pipeline, to use instead of those in the directory.

    Raises:
        MismatchError: Checkpoint and model disagree.
        UnsupportedError: A class is not one of diffusers or transformers, or a model is quantized.
        FileNotFoundError: There is no ``model_index.json``.

    Example:
        >>> pipeline = load_pipeline("stable-diffusion-v1-5", dtype="fp16", device="cuda")
    """
    folder = Path(directory)
    with (folder / "model_index.json").open("rb") as file:
        index = json.load(file)
    if not isinstance(index, dict):
        raise FormatError("not the index of a pipeline", file=str(folder / "model_index.json"))
    pipeline = _class(diffusers, index.get("_class_name"), diffusers.DiffusionPipeline, folder)
    wanted = torch_dtype(parse_dtype(dtype)) if dtype is not None else None
    given: dict[str, Any] = {}
    for name, value in index.items():
        if name.startswith("_") or name in components:
            continue
        given[name] = value
        if isinstance(value, list) and len(value) == 2:
            library, class_name = value
            given[name] = None if class_name is None else _component(folder / name, library, class_name, wanted, device)
    result = pipeline(**given, **components)
    result.register_to_config(_name_or_path=str(folder))
    return result


def _component(folder: Path, library: str, class_name: str, dtype: Any, device: Device) -> Any:
    """Return a part of the pipeline."""
    places = {"diffusers": diffusers, "transformers": transformers}
    place = places.get(library) or getattr(diffusers.pipelines, library, None)
    kind = _class(place, class_name, object, folder)
    if issubclass(kind, transformers.PreTrainedModel):
        return hf.from_pretrained(folder, kind, dtype="auto" if dtype is None else dtype, device=device)
    if issubclass(kind, diffusers.ModelMixin):
        return _model(folder, kind, dtype, device)
    if issubclass(kind, nn.Module) or not hasattr(kind, "from_pretrained"):
        raise UnsupportedError(f"{class_name} is neither a model of diffusers nor of transformers", file=str(folder))
    return kind.from_pretrained(str(folder), local_files_only=True)


def _class(place: Any, name: object, base: type, folder: Path) -> type[Any]:
    """Return a public class of the two libraries."""
    found: Any = getattr(place, name, None) if isinstance(name, str) and not name.startswith("_") else None
    known = isinstance(found, type) and found.__module__.split(".")[0] in ("diffusers", "transformers")
    if not known or not issubclass(found, base):
        raise UnsupportedError(
            "the index names a class that diffusers and transformers do not have",
            file=str(folder),
            found=str(name)[:200],
        )
    kind: type[Any] = found
    return kind


def _model(folder: Path, kind: Any, dtype: Any, device: Device) -> nn.Module:
    """Return a model of diffusers."""
    config = kind.load_config(str(folder), local_files_only=True)
    if config.get("quantization_config"):
        raise UnsupportedError("the model is quantized, which only the library loads", file=str(folder))
    with local_torch_dtype(dtype or torch.get_default_dtype()), empty_init():  # buffers that no file holds have it too
        model: Any = kind.from_config(config)
    kept = kind._keep_in_fp32_modules or []  # noqa: SLF001  no public name
    for name, tensor in model.state_dict(keep_vars=True).items():
        if dtype is not None and tensor.is_floating_point():
            tensor.data = tensor.data.to(torch.float32 if set(kept) & set(name.split(".")) else dtype)
    with open_checkpoint(folder) as checkpoint:
        names = {name: name for name in checkpoint}
        model._fix_state_dict_keys_on_load(names)  # noqa: SLF001  old names of attention layers
        rename: dict[str | re.Pattern[str], str | None] = {old: new for new, old in names.items() if old != new}
        load_into(model, checkpoint, device=device, rename=rename or None)
    model.register_to_config(_name_or_path=str(folder))
    model.eval()
    loaded: nn.Module = model
    return loaded
