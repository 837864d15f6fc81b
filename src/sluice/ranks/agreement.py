"""All ranks or none: the steps of one call that several ranks make together.

::

    with Agreement(group, verb="load_into") as agreement:
        agreement.meet()                              # who takes part, in which function, on which hosts
        job = agreement.attempt(decide, ...)          # a failure is kept as a value and announced
        agreement.settle("plan", proposal, judge)     # every rank raises the same RankError, or none does
        data = agreement.attempt(read, ...)           # no collective; `look` between two reads
        agreement.settle("read", changed=...)         # before anything is installed or renamed
        agreement.attempt(install, data)
        agreement.settle("done", last=True)

Every function begins with the same step, so that ranks that call different ones do not wait for each other.

Nothing between two calls of ``settle`` waits for another rank, and no exception passes a step that others wait for: an
exception that leaves the block is announced, so that the others do not wait for long.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from types import TracebackType
from typing import ParamSpec, Self, TypeVar

import msgspec
from msgspec.structs import replace

from sluice._errors import PartialLoadError, RankError
from sluice._messages import SHOWN, section
from sluice.machine.processes import this_process
from sluice.ranks.judgement import Judge, State, StepOutcome
from sluice.ranks.store_group import StoreGroup

__all__ = ["Agreement", "OtherRankError"]

P = ParamSpec("P")
R = TypeVar("R")


class OtherRankError(Exception):
    """A different rank has failed; raised between two reads to end them."""


class Agreement(AbstractContextManager["Agreement"]):
    """The steps of one call, on this rank."""

    def __init__(self, group: StoreGroup, *, verb: str) -> None:
        """Describe a call; nothing is exchanged yet.

        Args:
            group: The ranks.
            verb: Name of the public function, the same on all ranks.
        """
        self.group = group
        self._verb = verb
        self._failure: BaseException | None = None

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None and not isinstance(error, RankError):
            self.group.warn(_describe(error))
        self.group.leave()

    def __enter__(self) -> Self:
        self.group.join(self._verb)
        return self

    def meet(self) -> tuple[int, ...]:
        """Wait until every rank has called; return the ranks of this host.

        Raises:
            RankError: A rank does not call, or calls a different function.
        """
        value = self.settle("meet", msgspec.json.encode((self._verb, this_process().host)), _judge_calls)
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
        # Not of a rank that failed only because a different one did, perhaps with live tensors half filled.
        if not any(isinstance(each, OtherRankError) for each in (self._failure, self._failure.__cause__)):
            self.group.warn(_describe(self._failure))
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
        judge: Judge = lambda _: StepOutcome(),
        *,
        last: bool = False,
        after: Callable[[Mapping[int, str]], str] | None = None,
        changed: Callable[[], PartialLoadError | None] = lambda: None,
        state: State | None = None,
        undo: Callable[[], str | None] | None = None,
    ) -> bytes:
        """Return the decision of a step if every rank succeeded.

        Args:
            step: Name of the step.
            own: Contribution of this rank to the decision.
            judge: Decides from all contributions.
            last: Whether the call ends with this step.
            after: Returns what holds after failures of ranks as a clause; None for the state of the model on each rank.
            changed: Returns an error that names what changed on this rank, or None.
            state: State of the model on this rank; None for what the error of this rank says.
            undo: Called if a rank failed, before the error is raised; returns what ``after`` does. Not if code of the
                model failed on one, which has seen the new tensors: then all ranks keep them.

        Raises:
            RankError: A rank failed; the same on every rank. Its cause is the error of this rank.
            KeyboardInterrupt: This rank was interrupted; other ranks raise ``RankError``.
        """
        failure = self._failure
        cause = changed() if failure is None or isinstance(failure, OtherRankError) else failure
        state = state or _state_of(cause)
        state = "torn" if undo and state == "changed" else state
        verdict = self.group.decide(step, own, judge, last=last, state=state)
        if not verdict.failed:
            if last and self.group.interrupted:
                raise KeyboardInterrupt
            return verdict.value
        clause = after and after(verdict.failed)
        if undo and set(verdict.states.values()) <= {"untouched"}:
            clause = undo()
        elif undo:
            kept: dict[int, State] = {r: s if r in verdict.failed else "changed" for r, s in verdict.states.items()}
            verdict = replace(verdict, states=kept)
        if self.group.interrupted and failure is None:
            failure = KeyboardInterrupt()
        if failure is not None and not isinstance(failure, Exception):
            raise failure
        raise _rank_error(self._verb, verdict, self.group.ranks, clause) from cause


def _state_of(error: BaseException | None) -> State:
    """Return the state of the model on a rank that raises an error."""
    if not isinstance(error, PartialLoadError):  # an interrupt has the text of one as a note
        return "torn" if getattr(error, "__notes__", None) else "untouched"
    return "torn" if error.torn or error.untouched else "changed"


def _describe(error: BaseException) -> str:
    """Return an error as one line: its class and its text, and those of its cause."""
    text = str(error)
    line = f"{type(error).__name__}: {text}" if text else type(error).__name__
    return f"{line} (because of {_describe(error.__cause__)})" if error.__cause__ is not None else line


def _rank_error(verb: str, verdict: StepOutcome, ranks: tuple[int, ...], after: str | None = None) -> RankError:
    """Return the error that every rank raises.

    Args:
        verb: What failed.
        verdict: Failures by rank, and the state of each rank.
        ranks: Ranks that took part.
        after: What holds now, as a clause; None for the state of the model on each rank.
    """
    alike: defaultdict[str, list[int]] = defaultdict(list)
    for rank, text in sorted(verdict.failed.items()):
        alike[text].append(rank)
    lines = [f"{_listed(members)}: {text}" for text, members in alike.items()]
    what = f"{verb} failed on {len(verdict.failed)} of {len(ranks)} ranks, and {after or _states(verdict, ranks)}"
    text = (
        f"{what}; {lines[0].rstrip('.')}"
        if len(lines) == 1
        else f"{what}\n{section('failures', lines[:SHOWN], lines)}\n"
    )
    states = {state: tuple(r for r in ranks if verdict.states.get(r) == state) for state in _MEANING}
    return RankError(text, ranks=verdict.failed, changed=states["changed"], torn=states["torn"])


_MEANING: Mapping[State, str] = {"changed": "new", "torn": "new in part", "untouched": "unchanged"}


def _states(verdict: StepOutcome, ranks: tuple[int, ...]) -> str:
    """Return the states of the model on all ranks as a clause."""
    if set(verdict.states.values()) <= {"untouched"}:
        return "nothing was changed"
    members: defaultdict[str, list[int]] = defaultdict(list)
    for rank in ranks:
        members[_MEANING[verdict.states[rank]] if rank in verdict.states else "unknown"].append(rank)
    return f"the tensors are {', '.join(f'{meaning} on {_listed(found)}' for meaning, found in members.items())}"


def _listed(ranks: Sequence[int]) -> str:
    return f"rank {', '.join(map(str, ranks))}"


def _judge_calls(answers: Mapping[int, bytes]) -> StepOutcome:
    """Refuse different functions; the value is the host of each rank."""
    calls = {rank: msgspec.json.decode(answer, type=tuple[str, str]) for rank, answer in sorted(answers.items())}
    (first, (expected, _)), *_ = calls.items()
    failed = {r: f"called {verb}, rank {first} {expected}" for r, (verb, _) in calls.items() if verb != expected}
    return StepOutcome(failed=failed, value=msgspec.json.encode({str(rank): host for rank, (_, host) in calls.items()}))
