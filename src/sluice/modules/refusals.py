"""The error for values that a constructor needs and that cannot be computed."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import nn

from sluice._errors import EmptyInitError
from sluice.modules.histories import History

__all__ = ["refusal"]

#: Directories whose frames are not the constructor's.
_NOT_CONSTRUCTORS = (str(Path(torch.__file__).parent), str(Path(__file__).parents[1]))


def refusal(func: Callable[..., Any], history: History | None, reason: str) -> EmptyInitError:
    """Return the error, with the innermost line that belongs neither to torch nor to sluice."""
    frame: FrameType | None = sys._getframe()  # noqa: SLF001  the public way builds the whole stack
    while frame is not None and frame.f_code.co_filename.startswith(_NOT_CONSTRUCTORS):
        frame = frame.f_back
    where = "the constructor"
    if frame is not None:
        owner = frame.f_locals.get("self")
        name = f"{type(owner).__name__}." if isinstance(owner, nn.Module) else ""
        where = f"{name}{frame.f_code.co_name} ({frame.f_code.co_filename}, line {frame.f_lineno})"
    what = history.owner if history is not None and history.owner else "a parameter or buffer"
    return EmptyInitError(
        f"{where} needs the values of {what} in {getattr(func, '__name__', func)}(), and under empty_init() {reason}"
    )
