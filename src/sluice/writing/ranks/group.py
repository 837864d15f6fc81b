"""What a save needs of the process group: steps in which every rank takes part."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Protocol

from sluice._errors import RankError

__all__ = ["LEAD", "Alone", "RankGroup", "together"]

#: Position of the rank that creates files and puts them in place.
LEAD = 0


class RankGroup(Protocol):
    """The ranks that save together."""

    @property
    def position(self) -> int:
        """Position of this rank among them."""
        ...

    @property
    def size(self) -> int:
        """Number of ranks."""
        ...

    def exchange(self, work: Callable[[], bytes], *, last: bool = False) -> list[bytes]:
        """Do the work of one step; return the results of all ranks, once every rank is done with it.

        Args:
            work: The work of this rank.
            last: Whether the save ends with this step.

        Raises:
            RankError: The work failed on a rank, or a rank has died: raised on every rank.
        """
        ...


class Alone:
    """The group of a process that saves by itself."""

    position = LEAD
    size = 1

    def exchange(self, work: Callable[[], bytes], *, last: bool = False) -> list[bytes]:  # noqa: ARG002 - see above
        return [work()]


def together(group: RankGroup, work: Callable[[], bytes]) -> bytes:
    """Run a save, which takes part in the same steps on every rank; return the result of the lead on every rank.

    If it fails on a rank between two steps, the failure is the part of this rank in the next step: the others wait
    there, or at the end.

    Raises:
        RankError: A rank failed.
    """
    result, failure = b"", None
    try:
        result = work()
    except RankError:
        raise
    except BaseException as error:  # noqa: BLE001 - raised in the next step
        failure = error
    return group.exchange(partial(_outcome, result, failure), last=True)[LEAD]


def _outcome(result: bytes, failure: BaseException | None) -> bytes:
    if failure is not None:
        raise failure
    return result
