"""The steps of a load that depend on the library with which weights are quantized, and those for torchao."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import torch
from msgspec import Struct, field
from torch import nn

from sluice.checkpoint.open_checkpoint import OpenCheckpoint
from sluice.hf._matching import MatchedWeights
from sluice.quantizing.functions import Quantize

__all__ = ["Quantizer", "TorchAoQuantizer"]


class Quantizer(Struct, eq=False):
    """The steps of a load that concern quantized weights; without a quantizer of the library they do nothing."""

    #: Object of the library.
    quantizer: Any = None

    @property
    def pre_quantized(self) -> bool:
        """Whether the weights in the checkpoint are quantized."""
        return bool(self.quantizer.pre_quantized)

    def selected(self, model: Any) -> list[str]:
        """Return the names of the parameters that the library would quantize, which have no memory yet."""
        empty = (name for name, parameter in model.named_parameters() if parameter.is_meta)
        return [name for name in empty if self.quantizer.param_needs_quantization(model, name)]

    def prepare_model(self, model: Any, dtype: Any) -> None:
        """Do the library's work on a model without weights, in the context in which it was built."""
        if self.quantizer is not None:
            self.quantizer.preprocess_model(
                model=model, dtype=dtype, device_map=None, checkpoint_files=None, use_kernels=False
            )

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
        if self.quantizer is not None:
            model.hf_quantizer = self.quantizer
            self.quantizer.postprocess_model(model)


class TorchAoQuantizer(Quantizer):
    """The library's quantizer of a load whose weights are those of torchao."""

    #: Names of the parameters that it took, quantized or not.
    taken: set[str] = field(default_factory=set)

    @contextmanager
    def opened(self, model: Any, checkpoint: OpenCheckpoint) -> Iterator[OpenCheckpoint]:
        """See ``Quantizer.opened``: the model is quantized here, without memory."""
        if not self.pre_quantized:
            yield checkpoint
            return
        from sluice.quantizing.saved import opened_model  # here, not above: most models do without

        self._quantize_selected(model)(model)
        with opened_model(model, nullcontext(checkpoint), dtype=None) as (opening, _), opening as opened:
            yield opened

    def function(self, model: Any) -> Quantize | None:
        """See ``Quantizer.function``; the model is tied."""
        return None if self.pre_quantized else self._quantize_selected(model)

    def finish(self, model: Any) -> None:
        """See ``Quantizer.finish``."""
        for name, parameter in model.named_parameters():
            if name in self.taken and not self.pre_quantized:
                parameter.requires_grad_(requires_grad=False)
        super().finish(model)

    def _quantize_selected(self, model: Any) -> _QuantizeSelected:
        return _QuantizeSelected(self.quantizer.get_quantize_ops(), set(self.selected(model)), self.taken)


class _QuantizeSelected(Struct, frozen=True, eq=False):
    """Quantizes the parameters of some names below a root in place."""

    #: Operation of the library on one parameter.
    operation: Any
    #: Names of the parameters.
    names: set[str]
    #: Gets those that the operation took.
    taken: set[str]

    def __call__(self, root: nn.Module) -> None:
        for path, module in list(root.named_modules()):
            for own, parameter in list(module.named_parameters(recurse=False)):
                name = f"{path}.{own}".lstrip(".")
                if name in self.names:
                    self._quantize(root, module, own, name, parameter)

    def _quantize(self, root: nn.Module, module: nn.Module, own: str, name: str, parameter: nn.Parameter) -> None:
        # Without input embeddings: they are treated as other weights.
        model = SimpleNamespace(get_submodule=root.get_submodule, get_input_embeddings=lambda: None)
        weights = {name: parameter.detach()}
        left = self.operation.convert(weights, model=model, full_layer_name=name, missing_keys=set())
        if not left:
            self.taken.add(name)
        if type(module.get_parameter(own).data) is torch.Tensor:  # no quantization for this module
            module.register_parameter(own, parameter)
