"""The quantizer of a load, chosen by ``quantization_config``: for the load, or of weights quantized before."""

from __future__ import annotations

from typing import Any

from sluice._errors import UnsupportedError
from sluice._messages import type_of
from sluice.hf._quantization import Quantizer

__all__ = ["find_quantizer"]


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
