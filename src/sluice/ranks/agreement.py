"""All ranks or none: the steps of one call that several ranks make together.

::

    with Agreement(group) as agreement:
        agreement.meet()                              # who takes part, on which hosts
        job = agreement.attempt(decide, ...)          # a failure is kept as a value and announced
        agreement.settle("plan", proposal, judge)     # every rank raises the same RankError, or none does
        data = agreement.attempt(read, ...)           # no collective; `look` between two reads
        agreement.settle("read")                      # before anything is installed or renamed
        agreement.attempt(install, data)
        agreement.settle("done", last=True)

Nothing between two calls of ``settle`` waits for another rank, and no exception passes a step that others wait for: an
exception that leaves the block is announced, so that the others do not wait for long.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from types import TracebackType
from typing import ParamSpec, Self, TypeVar

import msgspec

from sluice._errors import RankError
from sluice._messages import SHOWN, section
from sluice.machine.processes import this_process
from sluice.ranks.protocol import Group, Judge, Ruling

__all__ = ["Agreement", "OtherRankError"]

P = ParamSpec("P")
R = TypeVar("R")

#: State of the model, the optimizer or the file after a failure, as a clause.
_AFTER = {
    "meet": "nothing was read or changed",
    "plan": "nothing was read or changed",
    "share": "nothing was read or changed",
    "read": "nothing was installed",
    "done": "all data is in place on the other ranks",
}


class OtherRankError(Exception):
    """A different rank has failed; raised between two reads to end them."""


class Agreement(AbstractContextManager["Agreement"]):
    """The steps of one call, on this rank."""

    def __init__(self, group: Group, *, verb: str = "load") -> None:
        """Take part in a call; nothing is exchanged yet.

        Args:
            group: The ranks.
            verb: What fails, for messages.
        """
        self.group = group
        self._verb = verb
        self._failure: BaseException | None = None

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None and not isinstance(error, RankError):
            self.group.warn(describe(error))

    def __enter__(self) -> Self:
        return self

    def meet(self) -> tuple[int, ...]:
        """Wait until every rank has called; return the ranks of this host.

        Raises:
            RankError: A rank does not call.
        """
        value = self.settle("meet", this_process().host.encode(), _judge_hosts)
        hosts: dict[str, str] = msgspec.json.decode(value, type=dict[str, str])
        own = hosts[str(self.group.rank)]
        return tuple(rank for rank in self.group.ranks if hosts[str(rank)] == own)

    def attempt(self, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R | None:
        """Call a function; keep what it raises for the next ``settle``, announce it, and return None."""
        if self._failure is not None:
            return None
        try:
            return function(*args, **kwargs)
        except BaseException as error:  # noqa: BLE001  raised by the next ``settle``, when every rank knows
            self._failure = error
        if not isinstance(self._failure, OtherRankError):
            self.group.warn(describe(self._failure))
        return None

    def look(self) -> None:
        """End what this rank does if another one has failed; called between two reads.

        Raises:
            OtherRankError: It has.
        """
        if self.group.look():
            raise OtherRankError("a different rank has failed")

    def settle(
        self,
        step: str,
        own: bytes = b"",
        judge: Judge | None = None,
        *,
        last: bool = False,
        after: Callable[[Mapping[int, str]], str] | None = None,
        changed: Callable[[], BaseException | None] = lambda: None,
    ) -> bytes:
        """Return the decision of a step if every rank succeeded.

        Args:
            step: Name of the step.
            own: Contribution of this rank to the decision.
            judge: Decides from all contributions.
            last: Whether the call ends with this step.
            after: Returns the state after failures of ranks as a clause; None for that of the steps of a load.
            changed: Called after a failure; returns an error that names what changed on this rank, or None.

        Raises:
            RankError: A rank failed; the same on every rank. Its cause is the error of this rank.
            KeyboardInterrupt: This rank was interrupted; other ranks raise ``RankError``.
        """
        verdict = self.group.decide(step, own, judge or _accept, last=last)
        failure = self._failure
        if not verdict.failed:
            if last and self.group.interrupted:
                raise KeyboardInterrupt
            return verdict.value
        if self.group.interrupted and failure is None:
            failure = KeyboardInterrupt()
        if failure is not None and not isinstance(failure, Exception):
            raise failure
        cause = changed() if failure is None or isinstance(failure, OtherRankError) else failure
        state = _AFTER[step] if after is None else after(verdict.failed)
        raise rank_error(self._verb, verdict.failed, self.group.ranks, state) from cause


def describe(error: BaseException) -> str:
    """Return an error as one line: its class and its text, and those of its cause."""
    text = str(error)
    line = f"{type(error).__name__}: {text}" if text else type(error).__name__
    return f"{line} (because of {describe(error.__cause__)})" if error.__cause__ is not None else line


def rank_error(verb: str, failed: Mapping[int, str], ranks: tuple[int, ...], after: str) -> RankError:
    """Return the error that every rank raises.

    Args:
        verb: What failed.
        failed: Failures by rank.
        ranks: Ranks that took part.
        after: What holds now, as a clause.
    """
    alike: defaultdict[str, list[int]] = defaultdict(list)
    for rank, text in sorted(failed.items()):
        alike[text].append(rank)
    lines = [f"rank {', '.join(map(str, members))}: {text}" for text, members in alike.items()]
    what = f"the {verb} failed on {len(failed)} of {len(ranks)} ranks, and {after}"
    text = (
        f"{what}; {lines[0].rstrip('.')}"
        if len(lines) == 1
        else f"{what}\n{section('failures', lines[:SHOWN], lines)}\n"
    )
    return RankError(text, ranks=failed)


def _accept(_: Mapping[int, bytes]) -> Ruling:
    return Ruling()


def _judge_hosts(answers: Mapping[int, bytes]) -> Ruling:
    return Ruling(value=msgspec.json.encode({str(rank): host.decode() for rank, host in answers.items()}))
