"""Models that are quantized while they are loaded, or were quantized before, as ``quantization_config`` says."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from msgspec import Struct

from sluice._errors import UnsupportedError
from sluice._messages import type_of
from sluice.checkpoint.open_checkpoint import OpenCheckpoint
from sluice.hf._matching import MatchedWeights
from sluice.quantizing.functions import Quantize

__all__ = ["LibraryQuantizer", "Quantizer", "find_quantizer"]


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
    values = found if isinstance(found, dict) else vars(found)
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
    # Here, not above: most models need neither.
    if method == "torchao":
        from sluice.hf._torchao import TorchAoQuantizer

        return TorchAoQuantizer(quantizer)
    from sluice.hf._bitsandbytes import BitsAndBytesQuantizer

    return BitsAndBytesQuantizer(quantizer)
