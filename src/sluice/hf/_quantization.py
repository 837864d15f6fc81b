"""Models that are quantized while they are loaded, or were quantized before, as ``quantization_config`` says."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from msgspec import Struct, field
from torch import nn

from sluice._errors import UnsupportedError
from sluice._messages import type_of
from sluice.checkpoint.open_checkpoint import OpenCheckpoint
from sluice.loading.quantized_models import opened_model

__all__ = ["QuantizeSelected", "Quantizer"]


class Quantizer(Struct, eq=False):
    """The library's quantizer of a load."""

    #: Object of the library.
    quantizer: Any
    #: Names of the parameters that it took, quantized or not.
    taken: set[str] = field(default_factory=set)

    @classmethod
    def prepare(cls, library: Any, config: Any, argument: Any, path: str) -> Quantizer | None:
        """Return the quantizer for the caller's argument or the directory's configuration, which gets it.

        Raises:
            TypeError: The argument is not a configuration of the library.
            UnsupportedError: It is not for torchao, or it changes which weights are tied.
        """
        found = argument if argument is not None else getattr(config, "quantization_config", None)
        if not found:
            return None
        values = found if isinstance(found, dict) else vars(found)
        method = values.get("quant_method")
        if method is None and found is argument:
            raise TypeError(
                f"quantization_config is {type_of(argument)}; write TorchAoConfig(...) of transformers around a "
                "configuration of torchao"
            )
        if (method := str(getattr(method, "value", method))) != "torchao":
            problem = "quantization_config describes a model that sluice does not load"
            raise UnsupportedError(problem, file=path, expected="torchao", found=method)
        if values.get("untie_embedding_weights"):
            raise UnsupportedError("quantization_config: untie_embedding_weights is not supported", file=path)
        try:
            quantizer, _, _ = library.get_hf_quantizer(config, argument, None, True, {})
        except Exception as error:  # the library's code may raise anything for what a file says
            raise UnsupportedError(f"transformers refuses the quantization_config: {error}", file=path) from error
        return cls(quantizer)

    def prepare_model(self, model: Any, dtype: Any) -> None:
        """Do the library's work on a model without weights."""
        self.quantizer.preprocess_model(
            model=model, dtype=dtype, device_map=None, checkpoint_files=None, use_kernels=False
        )

    @contextmanager
    def opened(self, model: Any, checkpoint: OpenCheckpoint) -> Iterator[OpenCheckpoint]:
        """Lend the checkpoint, and during the block give a model parameters for the plain tensors of quantized weights.

        The model is quantized for that here, without memory. If the checkpoint has no such weights, nothing happens.
        """
        if not self.quantizer.pre_quantized:
            yield checkpoint
            return
        self._quantize_selected(model)(model)
        with opened_model(model, nullcontext(checkpoint), dtype=None) as (opening, _), opening as opened:
            yield opened

    def function(self, model: Any) -> QuantizeSelected | None:
        """Return the function that quantizes the weights of a tied model; None if those in the checkpoint are."""
        return None if self.quantizer.pre_quantized else self._quantize_selected(model)

    def _quantize_selected(self, model: Any) -> QuantizeSelected:
        names = {name for name, _ in model.named_parameters() if self.quantizer.param_needs_quantization(model, name)}
        return QuantizeSelected(self.quantizer.get_quantize_ops(), names, self.taken)

    def finish(self, model: Any) -> None:
        """Do the library's work on the loaded model."""
        for name, parameter in model.named_parameters():
            if name in self.taken and not self.quantizer.pre_quantized:
                parameter.requires_grad_(requires_grad=False)
        model.hf_quantizer = self.quantizer
        self.quantizer.postprocess_model(model)


class QuantizeSelected(Struct, frozen=True, eq=False):
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
        left = self.operation.convert(
            {name: parameter.detach()}, model=_Root(root), full_layer_name=name, missing_keys=set()
        )
        if not left:
            self.taken.add(name)
        if type(module.get_parameter(own).data) is torch.Tensor:  # no quantization for this module
            module.register_parameter(own, parameter)


class _Root:
    """The part of a model of the library that its operation asks for."""

    def __init__(self, root: nn.Module) -> None:
        self.get_submodule = root.get_submodule

    def get_input_embeddings(self) -> None:
        """Return none: embeddings are treated as other weights."""
