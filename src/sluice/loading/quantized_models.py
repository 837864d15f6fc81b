"""Loads of saved quantized weights into models that were quantized on the meta device."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

from torch import nn

from sluice.checkpoint.open_checkpoint import OpenCheckpoint
from sluice.quantizing.saved import OpenedWeight, check_described, opened_weights
from sluice.quantizing.wrapped import with_inner_tensors

__all__ = ["opened_model"]


@contextmanager
def opened_model(
    model: nn.Module, opening: AbstractContextManager[OpenCheckpoint], *, dtype: str | None, finish: bool = True
) -> Iterator[tuple[AbstractContextManager[OpenCheckpoint], tuple[OpenedWeight, ...]]]:
    """Give a model parameters for the plain tensors of its quantized weights, during the block.

    Args:
        model: The model.
        opening: Opens the checkpoint.
        dtype: The argument of the load.
        finish: Whether the weights consist of the loaded tensors after the block; otherwise the model is unchanged.

    Yields:
        What opens the checkpoint for the load, and the quantized weights.

    Raises:
        MismatchError: The checkpoint describes its quantized weights, and they are not those of the model.
        ValueError: ``dtype`` would cast the scales of quantized weights.
    """
    if dtype not in {None, "auto"}:
        raise ValueError(f"dtype={dtype!r} would cast the scales of quantized weights: leave it out")
    with opening as checkpoint:
        plain, wrapped = with_inner_tensors(checkpoint)
        check_described(model, checkpoint.metadata, wrapped, checkpoint.path)
        with opened_weights(model, finish=finish) as weights:
            yield nullcontext(plain), weights
