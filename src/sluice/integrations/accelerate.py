"""``load_checkpoint_and_dispatch`` of accelerate, with sluice reading the weights.

accelerate reads whole shards into memory and then moves them. Here each tensor goes from the file to its device, and
accelerate adds its hooks.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import torch
from accelerate import dispatch_model, infer_auto_device_map
from accelerate.utils import get_balanced_memory
from torch import nn

from sluice._dtypes import DType, parse_dtype, torch_dtype
from sluice.api.load import load_into
from sluice.sources.remote.location import Remote

__all__ = ["load_checkpoint_and_dispatch"]

#: Words of accelerate that choose a placement.
_WORDS = ("auto", "balanced", "balanced_low_0", "sequential")


def load_checkpoint_and_dispatch(
    model: nn.Module,
    checkpoint: str | os.PathLike[str] | Remote,
    device_map: str | Mapping[str, int | str | torch.device] | None = None,
    max_memory: dict[int | str, int | str] | None = None,
    no_split_module_classes: list[str] | None = None,
    dtype: DType | None = None,
    skip_keys: str | list[str] | None = None,
    *,
    strict: bool = True,
    **options: Any,
) -> nn.Module:
    """Fill a model by its device map and let accelerate move activations between its parts.

    Args:
        model: A model, built under ``sluice.empty_init`` or ``init_empty_weights``.
        checkpoint: Any source of ``sluice.open``.
        device_map: A mapping from module names to devices; ``"auto"`` and the other words of accelerate; None loads to
            the devices of the model and adds no hooks. ``"disk"`` is refused: see ``sluice.stream``.
        max_memory: For the words: most memory of each device.
        no_split_module_classes: For the words: classes whose modules stay whole.
        dtype: Dtype of the weights, as in ``sluice.load_into``.
        skip_keys: Passed to ``dispatch_model``.
        strict: As in ``sluice.load_into``; accelerate itself leaves missing weights on meta.
        options: Further arguments of ``sluice.load_into``.

    Raises:
        MismatchError: Checkpoint and model disagree.
        ValueError: A module would be on disk, or ``device_map`` is another word.

    Example:
        >>> with sluice.empty_init():
        ...     model = Net()
        >>> model = load_checkpoint_and_dispatch(model, "model.pth", device_map="auto")
    """
    placement = None if isinstance(device_map, str) else device_map
    if isinstance(device_map, str):
        if device_map not in _WORDS:
            raise ValueError(f"device_map={device_map!r}: write one of {', '.join(_WORDS)}, or a mapping")
        name = "auto" if dtype is None else parse_dtype(dtype)
        sized = None if name == "auto" else torch_dtype(name)  # accelerate knows fewer names
        sizes: dict[str, Any] = {"no_split_module_classes": no_split_module_classes, "dtype": sized}
        if device_map != "sequential":
            low_zero = device_map == "balanced_low_0"
            max_memory = get_balanced_memory(model, max_memory, low_zero=low_zero, **sizes)
        placement = infer_auto_device_map(model, max_memory, **sizes)
    if placement is not None and "disk" in placement.values():
        raise ValueError('a module would be on disk: run the model with sluice.stream(model, checkpoint, memory="...")')
    load_into(model, checkpoint, device=placement, dtype=dtype, strict=strict, **options)
    return model if placement is None else dispatch_model(model, device_map=dict(placement), skip_keys=skip_keys)
