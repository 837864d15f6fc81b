"""The steps of a save, in which every rank of a process group takes part."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from contextlib import suppress

import msgspec

from sluice._errors import RankError
from sluice.ranks.agreement import Agreement
from sluice.ranks.judgement import StepOutcome

__all__ = ["LEAD", "RankGroup", "together"]

_INTACT = "existing files are intact"
_REPLACED = "the new files are in place"

#: Position of the rank that creates files and puts them in place.
LEAD = 0


class RankGroup:
    """The ranks that save together, whose steps are those of an agreement, by number; without one this process alone.

    A rank that fails joins the step in which the others wait.
    """

    #: Position of this rank among them, and their number.
    position, size = LEAD, 1

    def __init__(self, agreement: Agreement | None = None) -> None:
        """Take part in a save."""
        #: Hidden paths of files of the save, which this rank removes if it fails: the lead may have died.
        self.hidden: list[str] = []
        self._agreement = agreement
        self._step = 0
        if agreement is not None:
            ranks = agreement.group.ranks
            self.position, self.size = ranks.index(agreement.group.rank), len(ranks)

    def look(self) -> None:
        """Raise an exception that ends the work of this rank if a different one has failed; it does not wait."""
        if self._agreement is not None:
            self._agreement.look()

    def exchange(self, work: Callable[[], bytes], *, last: bool = False) -> list[bytes]:
        """Do the work of one step; return the results of all ranks, once every rank is done with it.

        Args:
            work: The work of this rank.
            last: Whether the save ends with this step.

        Raises:
            RankError: The work failed on a rank, or a rank has died: raised on every rank.
        """
        if self._agreement is None:
            return [work()]
        own = self._agreement.attempt(work)
        self._step += 1
        lead = self._agreement.group.ranks[LEAD]

        def after(failed: Mapping[int, str]) -> str:
            return _REPLACED if last and own is not None and lead not in failed else _INTACT

        value = self._agreement.settle(f"save {self._step}", own or b"", _collect, last=last, after=after)
        return msgspec.msgpack.decode(value, type=list[bytes])


def _collect(answers: Mapping[int, bytes]) -> StepOutcome:
    return StepOutcome(value=msgspec.msgpack.encode([answers[rank] for rank in sorted(answers)]))


def together(group: RankGroup, work: Callable[[], bytes]) -> bytes:
    """Run a save, which takes part in the same steps on every rank; return the result of the lead on every rank.

    If it fails on a rank between two steps, the failure is the part of this rank in the next step: the others wait
    there, or at the end. Files that have lost their hidden names cannot be put in place any more.

    Raises:
        RankError: A rank failed.
    """
    result, failure = b"", None

    def outcome() -> bytes:
        if failure is not None:
            raise failure
        return result

    try:
        try:
            result = work()
        except RankError:
            raise
        except BaseException as error:  # noqa: BLE001 - raised in the next step
            failure = error
        return group.exchange(outcome, last=True)[LEAD]
    except BaseException:
        for path in group.hidden:
            with suppress(OSError):
                os.unlink(path)
        raise
