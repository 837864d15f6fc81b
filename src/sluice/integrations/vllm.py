"""``--load-format sluice`` of vLLM: weights in the order of their files, with a bounded amount of host memory.

vLLM calls ``register``, an entry point of its plugins, in each of its processes. It downloads and chooses the files as
with ``--load-format auto``, and its models place, divide and quantize what they are given.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Generator
from typing import Any

import torch

from sluice.integrations._weights import weights

__all__ = ["register"]


def register() -> None:
    """Make the load format known to this process."""
    from vllm.model_executor.model_loader import DefaultModelLoader, register_model_loader
    from vllm.model_executor.model_loader.ep_weight_filter import should_skip_weight

    class SluiceVllmLoader(DefaultModelLoader):  # type: ignore[misc]  # vllm may not be installed
        """The default loader, whose files are read by sluice."""

        counter_before_loading_weights: float

        def __init__(self, load_config: Any) -> None:
            load_config = copy.copy(load_config)
            load_config.load_format = "hf"  # what the default loader chooses files by
            super().__init__(load_config)

        def _get_weights_iterator(self, source: Any) -> Generator[tuple[str, torch.Tensor], None, None]:
            """Yield names and tensors; experts of other ranks and weights that the model does not use are not read."""
            self.counter_before_loading_weights = self.counter_before_loading_weights or time.perf_counter()
            files = self._prepare_weights(
                source.model_or_path,
                source.subfolder,
                source.revision,
                source.fall_back_to_pt,
                source.allow_patterns_overrides,
            )[1]

            def skip(name: str) -> bool:
                unused = source.is_unused_weight is not None and source.is_unused_weight(name)
                return bool(unused or should_skip_weight(name, self.local_expert_ids))

            for name, tensor in weights(sorted(files), skip=skip):
                yield source.prefix + name, tensor

    register_model_loader("sluice")(SluiceVllmLoader)
