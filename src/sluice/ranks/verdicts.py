"""Records of the steps that ranks take together."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Literal

from msgspec import Struct

__all__ = ["Judge", "Ruling", "State", "StepOutcome"]


#: State of the model on a rank: as before, filled in part, or filled.
State = Literal["untouched", "torn", "changed"]


class StepOutcome(Struct, frozen=True, kw_only=True):
    """The result of one step, the same on every rank."""

    #: Failures that end the call on every rank, by rank; empty if the step succeeded.
    failed: dict[int, str] = {}
    #: Decision of the judge; empty after a failure.
    value: bytes = b""
    #: After a failure: the tensors of each rank that is known to be at this step, as in ``StoreGroup.decide``.
    states: dict[int, State] = {}


class Ruling(Struct, frozen=True, kw_only=True):
    """The decision of a judge about one step."""

    #: Failures by rank.
    failed: dict[int, str] = {}
    #: Value for every rank.
    value: bytes = b""


#: Pure function from the contribution of each rank to the decision; called on one rank, if no rank failed.
Judge = Callable[[Mapping[int, bytes]], Ruling]
