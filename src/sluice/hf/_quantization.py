"""The steps of a load that depend on the library with which weights are quantized."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from msgspec import Struct

from sluice.checkpoint.open_checkpoint import OpenCheckpoint
from sluice.hf._matching import MatchedWeights
from sluice.quantizing.functions import Quantize

__all__ = ["LibraryQuantizer", "Quantizer"]


class Quantizer(Struct, eq=False):
    """The steps of a load that concern quantized weights; those of this class do nothing."""

    def prepare_model(self, model: Any, dtype: Any) -> None:
        """Do the library's work on a model without weights, in the context in which it was built."""

    @contextmanager
    def opened(self, model: Any, checkpoint: OpenCheckpoint) -> Iterator[OpenCheckpoint]:  # noqa: ARG002  others need it
        """Lend the checkpoint, and during the block give a model parameters for the plain tensors of quantized weights.

        If the checkpoint has no such weights, nothing happens.
        """
        yield checkpoint

    def matched(self, model: Any, names: MatchedWeights) -> None:
        """Adapt the weights of the checkpoint and of a model to each other, when their names are matched."""

    def function(self, model: Any) -> Quantize | None:  # noqa: ARG002  as above
        """Return the function that quantizes the weights of a model; None if none are, or those in the checkpoint."""
        return None

    def finish(self, model: Any) -> None:
        """Do the library's work on the loaded model."""


class LibraryQuantizer(Quantizer, eq=False):
    """A quantizer of the library."""

    #: Object of the library.
    quantizer: Any

    @property
    def pre_quantized(self) -> bool:
        """Whether the weights in the checkpoint are quantized."""
        return bool(self.quantizer.pre_quantized)

    def selected(self, model: Any) -> list[str]:
        """Return the names of the parameters that the library would quantize."""
        return [name for name, _ in model.named_parameters() if self.quantizer.param_needs_quantization(model, name)]

    def prepare_model(self, model: Any, dtype: Any) -> None:
        """See ``Quantizer.prepare_model``."""
        self.quantizer.preprocess_model(
            model=model, dtype=dtype, device_map=None, checkpoint_files=None, use_kernels=False
        )

    def finish(self, model: Any) -> None:
        """See ``Quantizer.finish``."""
        model.hf_quantizer = self.quantizer
        self.quantizer.postprocess_model(model)
