"""Models that a library wrapped, sharded or quantized: advice if a load refuses them.

Only names of types are compared: none of the libraries is imported. The advice is added to the error of a load that
failed, so that a model of which every name fits is never refused here, with one exception: ``refuse_quantized``.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator

import torch
from torch import nn

from sluice._errors import MismatchError
from sluice._messages import SHOWN, section

__all__ = ["advice_for", "refuse_flattened", "refuse_quantized"]

_FSDP1 = (
    "The model is wrapped in FullyShardedDataParallel, which flattens and divides its parameters: load into the model "
    "before it is wrapped; FullyShardedDataParallel(model, sync_module_states=True) sends the weights to all ranks."
)
_ZERO3 = (
    "DeepSpeed's ZeRO-3 divided the parameters over ranks: load into the model before deepspeed.initialize, or inside "
    "deepspeed.zero.GatheredParameters."
)
_PEFT = (
    "The model has adapters of peft. Those on the meta device have no values: load base weights before get_peft_model; "
    "give the state dict of adapters, sluice.load_state_dict(source), to peft.set_peft_model_state_dict."
)
_BITSANDBYTES = (
    "The model is quantized by bitsandbytes: load into it before its parameters are quantized, which happens when they "
    "move to their device, or build it without weights (sluice.empty_init) and load with quantize='bitsandbytes'."
)
_TORCHAO = (
    "The model is quantized by torchao: load plain weights into it before torchao.quantization.quantize_(model, ...), "
    "and saved quantized weights after it, while the model is on the meta device."
)
_QUANTIZED = "The model is quantized: load into the model with floating-point weights, and quantize it afterwards."

#: Advice by package of a parameter's or module's type.
_PACKAGES = {
    "peft": _PEFT,
    "bitsandbytes": _BITSANDBYTES,
    "torchao": _TORCHAO,
    **dict.fromkeys(("hqq", "optimum.quanto", "auto_gptq", "gptqmodel", "awq", "quanto"), _QUANTIZED),
    "torch.ao.nn.quantized": _QUANTIZED,
    "torch.distributed.fsdp.fully_sharded_data_parallel": _FSDP1,
}


def advice_for(module: nn.Module) -> str | None:
    """Return what to do about a model of a known kind that cannot be loaded into; None for ordinary models."""
    found = dict.fromkeys(_advices(module))
    # A wrapped model can have several kinds; the outermost decides, and modules come before their parameters.
    return next(iter(found), None)


def refuse_flattened(module: nn.Module) -> None:
    """Refuse a model of FSDP1 of which the names do not fit, without the list of its names.

    Raises:
        MismatchError: A part of the module is a ``FullyShardedDataParallel``.
    """
    fsdp = sys.modules.get("torch.distributed.fsdp.fully_sharded_data_parallel")
    if fsdp is not None and any(isinstance(part, fsdp.FullyShardedDataParallel) for part in module.modules()):
        problem, _, advice = _FSDP1.partition(": ")
        raise MismatchError(problem[0].lower() + problem[1:], advice=advice[0].upper() + advice[1:])


def _advices(module: nn.Module) -> Iterator[str]:
    for part in module.modules():
        yield from _of_type(type(part))
    for parameter in module.parameters():
        if hasattr(parameter, "ds_id"):
            yield _ZERO3
        yield from _of_type(type(parameter))


def _of_type(kind: type) -> Iterator[str]:
    for base in kind.__mro__:
        module = base.__module__
        if module.startswith(("torch.nn.", "builtins")):
            continue
        for package, advice in _PACKAGES.items():
            if module == package or module.startswith(f"{package}."):
                yield advice


def refuse_quantized(tensors: Iterable[tuple[str, torch.Tensor, str]]) -> None:
    """Refuse to cast floating-point weights of a file to the integers of quantized parameters, without their scales.

    Args:
        tensors: Name and tensor of the module, and the dtype of its entry in the file.

    Raises:
        MismatchError: There are such parameters.
    """
    wrong = [
        f"{name!r} is {tensor.dtype} in the module, {dtype} in the checkpoint"
        for name, tensor, dtype in tensors
        if type(tensor).__module__.partition(".")[0] == "bitsandbytes"
        and not tensor.is_floating_point()
        and "float" in dtype
    ]
    if wrong:
        text = section("quantized, but not in the checkpoint", wrong[:SHOWN], wrong)
        raise MismatchError(f"the checkpoint does not fit the module\n{text}\nNothing was read")
