"""``load_pipeline``: pipelines of diffusers, with sluice reading the weights of every model.

The library builds schedulers, tokenizers and processors as always. Models are built without memory and filled straight
from their files. Classes are looked up in diffusers and transformers; no other code that a file names is imported.
"""

from __future__ import annotations

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
from sluice._errors import UnsupportedError
from sluice.api.checkpoint import open as open_checkpoint
from sluice.api.load import load_into
from sluice.formats.strict_json import decode_json
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
    file = folder / "model_index.json"
    index = decode_json(file.read_bytes(), dict[str, Any], "the index of the pipeline", str(file))
    pipeline = _class(diffusers, index.get("_class_name"), diffusers.DiffusionPipeline, folder)
    wanted = None if dtype is None else torch_dtype(parse_dtype(dtype, auto=False, floats_only=True))
    taken = pipeline._get_init_keys(pipeline)  # noqa: SLF001  as in the library, everything else is left out
    if unknown := components.keys() - taken:
        raise TypeError(f"load_pipeline() and {pipeline.__name__} have no argument {', '.join(sorted(unknown))}")
    given: dict[str, Any] = {name: None for name in pipeline._optional_components if name in taken}  # noqa: SLF001
    for name, value in index.items():
        if name not in taken or name in components:
            continue
        given[name] = value
        if isinstance(value, list) and len(value) == 2:
            library, class_name = str(value[0]), value[1]
            given[name] = None if class_name is None else _component(folder / name, library, class_name, wanted, device)
    result = pipeline(**{**given, **components})
    result.register_to_config(_name_or_path=str(folder))
    return result


def _component(folder: Path, library: str, class_name: str, dtype: Any, device: Device) -> Any:
    """Return a part of the pipeline."""
    folder = folder if folder.is_dir() else folder.parent  # older versions wrote everything into one
    if class_name == "CLIPFeatureExtractor":  # of Stable Diffusion v1, as versions of transformers before 5 named it
        class_name = "CLIPImageProcessor"
    places = {"diffusers": diffusers, "transformers": transformers}
    place = places.get(library) or getattr(diffusers.pipelines, library, None)
    kind = _class(place, class_name, object, folder)
    if issubclass(kind, transformers.PreTrainedModel):
        return hf.from_pretrained(folder, kind, dtype="auto" if dtype is None else dtype, device=device)
    if issubclass(kind, diffusers.ModelMixin) and issubclass(kind, diffusers.ConfigMixin):  # not several in one
        return _model(folder, kind, dtype, device)
    if issubclass(kind, nn.Module) or not hasattr(kind, "from_pretrained"):
        raise UnsupportedError(f"{class_name} is neither one model of diffusers nor of transformers", file=str(folder))
    return kind.from_pretrained(str(folder), local_files_only=True)


def _class(place: Any, name: object, base: type, folder: Path) -> Any:
    """Return a public class of the two libraries."""
    found: Any = getattr(place, name, None) if isinstance(name, str) and not name.startswith("_") else None
    known = isinstance(found, type) and found.__module__.split(".")[0] in ("diffusers", "transformers")
    if not known or not issubclass(found, base):
        raise UnsupportedError(
            "the index names a class that diffusers and transformers do not have",
            file=str(folder),
            found=str(name)[:200],
        )
    return found


def _model(folder: Path, kind: Any, dtype: Any, device: Device) -> Any:
    """Return a model of diffusers."""
    config = kind.load_config(str(folder), local_files_only=True)
    if config.get("quantization_config"):
        raise UnsupportedError("the model is quantized, which only the library loads", file=str(folder))
    with local_torch_dtype(dtype or torch.get_default_dtype()), empty_init():  # buffers that no file holds have it too
        model: Any = kind.from_config(config)
    kept = model._keep_in_fp32_modules or []  # noqa: SLF001  of the class that the library takes for an old one
    for name, tensor in model.state_dict(keep_vars=True).items():
        if dtype is not None and tensor.is_floating_point():
            tensor.data = tensor.data.to(torch.float32 if set(kept) & set(name.split(".")) else dtype)
    with open_checkpoint(folder) as checkpoint:
        names = {name: name for name in checkpoint}
        model._fix_state_dict_keys_on_load(names)  # noqa: SLF001  old names of attention layers
        own, ignored = model.state_dict(), model._keys_to_ignore_on_load_unexpected or []  # noqa: SLF001
        unused = {new for new in names if new not in own and any(re.search(each, new) for each in ignored)}
        rename: Any = {old: None if new in unused else new for new, old in names.items() if new != old or new in unused}
        load_into(model, checkpoint, device=device, rename=rename or None)
    model.register_to_config(_name_or_path=str(folder))
    model.eval()
    return model
