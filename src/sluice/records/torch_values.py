"""Values of torch that an index holds without torch: equal to their text, and still told apart from text."""

from __future__ import annotations

__all__ = ["TorchSize", "TorchText"]


class TorchText(str):
    """A ``torch.dtype``, ``torch.layout`` or quantization scheme (``"torch.float32"``), or a device (``"cuda:0"``)."""

    __slots__ = ()


class TorchSize(tuple[int, ...]):
    """A ``torch.Size``."""

    __slots__ = ()
