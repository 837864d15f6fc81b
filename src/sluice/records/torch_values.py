"""Values of torch types in an index, without torch: subclasses of str and tuple."""

from __future__ import annotations

__all__ = ["TorchSize", "TorchText"]


class TorchText(str):
    """A ``torch.dtype``, ``torch.layout`` or quantization scheme (``"torch.float32"``), or a device (``"cuda:0"``)."""

    __slots__ = ()


class TorchSize(tuple[int, ...]):
    """A ``torch.Size``."""

    __slots__ = ()
