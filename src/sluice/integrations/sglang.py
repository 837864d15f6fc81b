"""``SluiceModelLoader`` of sglang: weights in the order of their files, with a bounded amount of host memory.

sglang takes a class in place of a load format: ``Engine(model_path=..., load_format=SluiceModelLoader)``. Its command
line knows only its own formats. Files are downloaded and chosen as with ``"auto"``, and its models place, divide and
quantize what they are given.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Iterator
from typing import Any

import torch
from sglang.srt.configs.load_config import LoadFormat
from sglang.srt.model_loader.loader import DefaultModelLoader
from sglang.srt.model_loader.weight_utils import maybe_add_mtp_safetensors

from sluice.integrations._weights import weights

__all__ = ["SluiceModelLoader"]


class SluiceModelLoader(DefaultModelLoader):  # type: ignore[misc]  # sglang may not be installed
    """The default loader, whose files are read by sluice.

    Example:
        >>> engine = sglang.Engine(model_path="org/model", load_format=SluiceModelLoader)
    """

    counter_before_loading_weights: float

    def __init__(self, load_config: Any) -> None:
        load_config = copy.copy(load_config)
        load_config.load_format = LoadFormat.AUTO  # what the default loader chooses files by
        super().__init__(load_config)

    def _get_weights_iterator(
        self, source: Any, *, resolved_source: Any = None, **_prefetch: Any
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Return names and tensors."""
        if resolved_source is not None:
            files = resolved_source.weight_files
        else:
            folder, files, are_safetensors = self._prepare_weights(
                source.model_or_path, source.revision, source.fall_back_to_pt, source.allow_patterns_overrides
            )
            if are_safetensors and source.model_config is not None:
                index = "model.safetensors.index.json"
                files = maybe_add_mtp_safetensors(files, folder, index, source.model_config.hf_config)
        found = weights(files)
        if self.load_config.draft_model_idx is not None:
            filtered: Iterator[tuple[str, torch.Tensor]]
            filtered = self._filter_mtp_weights(found, source.prefix, self.load_config.draft_model_idx)
            return filtered
        self.counter_before_loading_weights = self.counter_before_loading_weights or time.perf_counter()
        return ((source.prefix + name, tensor) for name, tensor in found)
