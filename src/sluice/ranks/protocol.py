"""The protocol between an agreement of ranks and torch.distributed, and the records that cross it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Literal, Protocol

from msgspec import Struct

__all__ = ["Group", "Judge", "Ruling", "State", "StepOutcome"]


#: State of the model on a rank: as before, filled in part, or filled.
State = Literal["untouched", "torn", "changed"]


class StepOutcome(Struct, frozen=True, kw_only=True):
    """The result of one step, the same on every rank."""

    #: Failures that end the call on every rank, by rank; empty if the step succeeded.
    failed: dict[int, str] = {}
    #: Decision of the judge; empty after a failure.
    value: bytes = b""
    #: After a failure: the tensors of each rank that is known to be at this step, as in ``Group.decide``.
    states: dict[int, State] = {}
    #: After a failure: ranks of which several threads make such calls.
    crowded: tuple[int, ...] = ()


class Ruling(Struct, frozen=True, kw_only=True):
    """The decision of a judge about one step."""

    #: Failures by rank.
    failed: dict[int, str] = {}
    #: Value for every rank.
    value: bytes = b""


#: Pure function from the contribution of each rank to the decision; called on one rank, if no rank failed.
Judge = Callable[[Mapping[int, bytes]], Ruling]


class Group(Protocol):
    """The ranks that take part in one call of a public function."""

    @property
    def rank(self) -> int:
        """Rank of this process in the default process group."""
        ...

    @property
    def ranks(self) -> tuple[int, ...]:
        """Ranks that take part, ascending."""
        ...

    @property
    def interrupted(self) -> bool:
        """Whether an interrupt arrived while this rank waited; a successful verdict does not show it."""
        ...

    def join(self, verb: str) -> None:
        """Begin a call, or join the one that other ranks began; every call ends with ``leave``.

        Args:
            verb: Name of the public function, for the other ranks.
        """
        ...

    def leave(self) -> None:
        """End the part of this rank in the call; other ranks may still wait for its verdict."""
        ...

    def decide(
        self, step: str, own: bytes, judge: Judge, *, last: bool = False, state: State = "untouched"
    ) -> StepOutcome:
        """Contribute to a step and return its verdict, when every rank has contributed or one has failed.

        Args:
            step: Name of the step, the same on every rank.
            own: Contribution of this rank.
            judge: Decides from all contributions; the same on every rank.
            last: Whether the call ends with this step.
            state: What this rank has done to its model.

        Raises:
            KeyboardInterrupt: A second interrupt arrived while waiting; a first one makes this rank fail.
        """
        ...

    def warn(self, text: str) -> None:
        """Announce that this rank has failed; the next verdict contains it. It does not wait."""
        ...

    def look(self, *, now: bool = False) -> bool:
        """Return whether a rank has failed, as far as known without waiting; also tell that this rank is alive.

        Args:
            now: Whether to ask even if that was done less than a second ago.
        """
        ...
