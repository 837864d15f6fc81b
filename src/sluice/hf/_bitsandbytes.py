"""Models of bitsandbytes: quantized while they are loaded, or from directories that hold quantized weights.

A saved weight in 4 bits is several tensors: ``weight``, ``weight.absmax``, ``weight.quant_map`` and others, and a JSON
text, in ``weight.quant_state.bitsandbytes__nf4``, with its shape and dtype. One in 8 bits is ``weight``, ``SCB`` and
``weight_format``. During a load, the layer has a parameter for each; afterwards the library makes its weight of them.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import msgspec
import torch
from msgspec import Struct, field
from msgspec.structs import replace
from torch import nn

from sluice._errors import MismatchError
from sluice.checkpoint.open_checkpoint import OpenCheckpoint
from sluice.entries.assembly import permute, reshape
from sluice.hf._hub import bitsandbytes_operations
from sluice.hf._matching import MatchedWeights
from sluice.hf._quantization import Quantizer
from sluice.quantizing.functions import Quantize, quantize_layers, quantized_form

__all__ = ["BitsAndBytesQuantizer"]

#: Largest JSON text of a weight; those of the library have 100 to 300 bytes.
_TEXT_BYTES = 4096

#: The parameter that holds it.
_TEXT = "_weight_quant_state"

#: Dtypes that it may name.
_DTYPES = {"float16", "bfloat16", "float32"}

#: Names of the further tensors of a weight in 4 bits. Parameters get names without dots.
_SAVED = re.compile(
    r"\.weight\.(absmax|quant_map|nested_absmax|nested_quant_map|quant_state)(\.bitsandbytes__(nf4|fp4))?$"
)


class BitsAndBytesQuantizer(Quantizer):
    """The library's quantizer of a load whose layers are those of bitsandbytes."""

    #: Paths of the layers that are quantized.
    layers: list[str] = field(default_factory=list)

    def prepare_model(self, model: Any, dtype: Any) -> None:
        """See ``Quantizer.prepare_model``: the library replaces layers."""
        super().prepare_model(model, dtype)
        self.layers = [name.rpartition(".")[0] for name in self.selected(model)]

    @contextmanager
    def opened(self, model: Any, checkpoint: OpenCheckpoint) -> Iterator[OpenCheckpoint]:
        """See ``Quantizer.opened``."""
        if not self.pre_quantized:
            yield checkpoint
            return
        weights = {path: model.get_submodule(path).weight for path in self.layers}
        for path, weight in weights.items():
            for name, tensor in _plain_tensors(weight).items():
                model.get_submodule(path).register_parameter(name, nn.Parameter(tensor, requires_grad=False))
        view = OpenCheckpoint.open(checkpoint)
        tree: Any = view.index.tree  # with names that fit parameters, which have no dots
        tree = {_SAVED.sub(r"._weight_\1", name) if isinstance(name, str) else name: tree[name] for name in tree}
        view.index = replace(view.index, tree=tree)
        yield view
        for path, weight in weights.items():
            self._close(model, path, weight, checkpoint.path)

    def matched(self, model: Any, names: MatchedWeights) -> None:
        """See ``Quantizer.matched``: the size of texts, and transposed weights of the library's ``Conv1D``."""
        for path in self.layers:
            layer, weight = model.get_submodule(path), f"{path}.weight"
            text = names.entries.get(f"{path}.{_TEXT}")
            if self.pre_quantized:
                # Scales in rows and columns: a model that has computed on some processors is saved so.
                for name in (f"{path}._weight_absmax", f"{path}._weight_nested_absmax"):
                    if (scales := names.entries.get(name)) is not None:
                        names.entries[name] = reshape(scales, (math.prod(scales.shape),))
                if text is not None and len(text.shape) == 1 and text.shape[0] <= _TEXT_BYTES:
                    place = torch.empty(text.shape, dtype=torch.uint8, device="meta")
                    layer.register_parameter(_TEXT, nn.Parameter(place, requires_grad=False))
            elif layer.source_cls is not nn.Linear and weight in names.entries:
                names.entries[weight] = permute(names.entries[weight], (1, 0))

    def function(self, model: Any) -> Quantize | None:  # noqa: ARG002  as the other class has it
        """See ``Quantizer.function``."""
        return None if self.pre_quantized else quantize_layers

    def finish(self, model: Any) -> None:
        """See ``Quantizer.finish``."""
        for path in self.layers:
            weight = model.get_submodule(path).weight
            if getattr(weight, "bnb_quantized", False):  # may be stored as floating-point numbers
                weight.requires_grad_(requires_grad=False)
        super().finish(model)

    def _close(self, model: Any, path: str, weight: Any, file: str) -> None:
        """Replace the parameters of a layer by the weight that the library makes of them.

        Raises:
            MismatchError: The text does not describe the weight of the layer.
        """
        layer = model.get_submodule(path)
        held = layer._parameters  # noqa: SLF001  the temporary names too
        loaded = {name: held[name].data for name in _plain_tensors(weight)}
        layer.weight = weight
        for name in loaded.keys() - {"weight"}:
            del held[name]
        if loaded.pop("weight_format", torch.zeros((), device="cpu")) != 0:
            raise MismatchError("a quantized weight is not stored row by row", file=file, tensor=f"{path}.weight")
        if (text := loaded.get(_TEXT)) is not None:
            name = f"{path}.weight"
            _Description.check(text, weight, layer, name, file)
            loaded[f"_weight_quant_state.bitsandbytes__{weight.quant_type}"] = loaded.pop(_TEXT)
        in_4_bits, in_8_bits = bitsandbytes_operations()
        operation = in_8_bits if "SCB" in loaded else in_4_bits
        made = operation(self.quantizer).convert(
            {name.replace("_weight_", "weight."): tensor for name, tensor in loaded.items()},
            model=model,
            full_layer_name=f"{path}.weight",
        )
        layer.weight = made["weight"]


def _plain_tensors(weight: Any) -> dict[str, torch.Tensor]:
    """Return the tensors, on the meta device, that the file has for a weight; the text as long as none."""
    form: Any = quantized_form(weight)
    plain = {"weight": form.data.as_subclass(torch.Tensor)}
    if (state := getattr(form, "quant_state", None)) is None:
        return plain | {"SCB": form.SCB, "weight_format": torch.empty((), dtype=torch.uint8, device="meta")}
    plain |= {"_weight_absmax": state.absmax, "_weight_quant_map": state.code}
    if state.nested:
        plain |= {"_weight_nested_absmax": state.state2.absmax, "_weight_nested_quant_map": state.state2.code}
    return plain | {_TEXT: torch.empty(0, dtype=torch.uint8, device="meta")}


class _Description(Struct, frozen=True):
    """The text of a weight."""

    shape: tuple[int, ...]
    dtype: str
    quant_type: str
    blocksize: int
    nested_blocksize: int | None = None
    nested_dtype: str | None = None
    nested_offset: float | None = None

    @classmethod
    def check(cls, text: torch.Tensor, weight: Any, layer: Any, name: str, file: str) -> None:
        """Refuse a description that does not fit the layer, and names that are not dtypes.

        Raises:
            MismatchError: It is one, or damaged.
        """
        try:
            own = _DESCRIPTIONS.decode(bytes(text.tolist()))
        except (msgspec.MsgspecError, ValueError) as error:  # ValueError if it is not UTF-8
            problem = f"the description of a quantized weight is damaged: {error}"
            raise MismatchError(problem, file=file, tensor=name) from error
        state = quantized_form(weight).quant_state
        found = (own.shape, own.quant_type, own.blocksize, own.nested_blocksize)
        nested = state.state2.blocksize if state.nested else None
        expected = ((layer.out_features, layer.in_features), state.quant_type, state.blocksize, nested)
        dtypes = {own.dtype, own.nested_dtype or "float32"}
        if found != expected or not dtypes <= _DTYPES or (own.nested_offset is None) is state.nested:
            problem = "the description of a quantized weight does not fit its layer"
            raise MismatchError(problem, file=file, tensor=name, expected=str(expected), found=str(own))


_DESCRIPTIONS = msgspec.json.Decoder(_Description)  # made when this is imported: see formats.strict_json
