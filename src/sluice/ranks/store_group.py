"""Decisions of ranks through the store of their process group.

Every process group of torch.distributed has a store (``TCPStore``, ``FileStore``): keys and values that all ranks see,
by which they found each other. A step of a decision is one key for each rank, and one for the verdict, which the first
rank writes after it has read all of the others. The store serves this better than collectives:

- Waiting can be interrupted and bounded. A collective that one rank leaves breaks the process group for all others.
- It is the same for every backend, and for any set of ranks. ``new_group`` would need ranks that do not take part.
- A rank can announce that it has failed while the others read, without their help.

Calls of all functions are numbered for each set of ranks. Each rank publishes in which call it is, so that a rank that
waits can say where the missing one is. While a rank waits or reads, it looks for ranks that have failed: those that
announced it, those of its host whose process has ended or is stopped, and those without a sign of life for minutes. The
first rank writes at most one verdict of a step, so all ranks agree. One window remains: if the process that serves the
store ends right after a verdict, ranks that have not read it count it as a failure.
"""

from __future__ import annotations

import hashlib
import logging
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from typing import Any

import msgspec
from msgspec import Struct

from sluice import _defaults as defaults
from sluice.machine.processes import RunningProcess, state_of, this_process
from sluice.ranks.judgement import Judge, State, StepOutcome

__all__ = ["StoreGroup"]

#: Seconds between two questions to the store: the first and the longest.
_FIRST_PAUSE, _LONGEST_PAUSE = 0.0005, 0.02

_log = logging.getLogger("sluice")


class _Place(Struct, frozen=True, kw_only=True):
    """The call in which a rank is, or was last."""

    #: The process of the rank.
    process: RunningProcess
    #: Name of the public function.
    verb: str
    #: Ranks that take part.
    ranks: tuple[int, ...]
    #: Prefix of the keys of these ranks, and the number of the call.
    name: str
    call: int

    def __str__(self) -> str:
        return f"{self.verb} with ranks {', '.join(map(str, self.ranks))}"


class _Contribution(Struct, frozen=True, kw_only=True):
    """Contribution of a rank to a step."""

    value: bytes
    state: State


# Made when this is imported: see ``formats.strict_json``.
_PLACES = msgspec.json.Decoder(_Place)
_OUTCOMES = msgspec.json.Decoder(StepOutcome)
_CONTRIBUTIONS = msgspec.msgpack.Decoder(_Contribution)

#: Held by the thread of this process that is in a call with the ranks of a name; the others wait for their turns.
_TURNS: defaultdict[str, threading.Lock] = defaultdict(threading.Lock)


class StoreGroup:
    """One call of a public function by several ranks."""

    def __init__(
        self,
        store: Any,
        rank: int,
        ranks: Iterable[int],
        *,
        state: Callable[[RunningProcess, RunningProcess], str] = state_of,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
        turns: threading.Lock | None = None,
    ) -> None:
        """Describe the ranks; nothing is exchanged yet.

        Args:
            store: The store of the process group, a ``torch.distributed.Store``.
            rank: Rank of this process.
            ranks: Ranks that take part.
            state: Tells whether a process still runs.
            clock: Seconds.
            sleep: Waits for some seconds.
            turns: Held during the call; None for the lock of these ranks in this process.
        """
        self.rank, self.ranks = rank, tuple(sorted(ranks))
        self._store, self._state, self._clock, self._sleep = store, state, clock, sleep
        members = ",".join(map(str, self.ranks)).encode()
        self._name = f"sluice/{hashlib.blake2b(members, digest_size=8).hexdigest()}"
        self._process = this_process()
        self._places: dict[int, _Place] = {}
        #: Signs of life: what was last seen of each rank, and when.
        self._seen: dict[int, tuple[bytes, float]] = {}
        self._stopped: dict[int, float] = {}
        self._sought: dict[int, float] = {}
        self._looked = self._pulsed = self._clock()
        self._keys: list[str] = []
        self._warned = False
        self._turns = _TURNS[self._name] if turns is None else turns
        self._verb, self._call = "", 0
        #: Whether an interrupt arrived while this rank waited, which a successful verdict does not show.
        self.interrupted = False

    def join(self, verb: str) -> None:
        """Begin a call, or join the one that other ranks began; every call ends with ``leave``.

        Threads of one process take turns.

        Args:
            verb: Name of the public function, for the other ranks.
        """
        self._verb = verb
        self._turns.acquire()
        try:
            self._call = int(self._store.add(f"{self._name}/calls", 0))
            place = _Place(process=self._process, verb=verb, ranks=self.ranks, name=self._name, call=self._call)
            self._store.set(f"sluice/rank/{self.rank}", msgspec.json.encode(place))
        except RuntimeError:
            pass  # the first step fails with what the store says
        except BaseException:
            self.leave()
            raise

    def leave(self) -> None:
        """End the part of this rank in the call; other ranks may still wait for its verdict."""
        self._turns.release()

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
        interrupted = False
        while True:
            try:
                if not self._store.check([self._key(f"{step}/{self.rank}")]):
                    contribution = _Contribution(value=own, state=state)
                    self._set(f"{step}/{self.rank}", msgspec.msgpack.encode(contribution))
                leads = self.rank == self.ranks[0]  # this rank writes the verdicts
                verdict = self._lead(step, judge, last=last) if leads else self._follow(step, state)
            except KeyboardInterrupt:
                # A value from here on: the verdict may have been written with this rank's contribution.
                if interrupted:
                    raise
                interrupted = self.interrupted = True
                self.warn("KeyboardInterrupt")
                continue
            except RuntimeError as error:  # torch's errors of a store
                return StepOutcome(failed=self._without_store(error), states={self.rank: state})
            if last or verdict.failed:
                with suppress(RuntimeError):  # the verdict holds without the store
                    self._forget()
            return verdict

    def warn(self, text: str) -> None:
        """Announce that this rank has failed; the next verdict contains it. It does not wait."""
        if self._warned:
            return
        self._warned = True
        with suppress(RuntimeError):  # without a store no rank can be told
            self._announce(f"warning/{self.rank}", text)

    def look(self) -> bool:
        """Return whether a rank has failed, as far as known without waiting; also tell that this rank is alive."""
        now = self._clock()
        if now - self._looked < defaults.RANK_LOOK_SECONDS:
            return False
        self._looked = now
        self._pulse(now)
        if self._store.check([self._key("warnings")]):
            return True
        lost = {rank: text for rank in self.ranks if (text := self._lost(rank, now))}
        for rank, text in lost.items():  # ranks of other hosts do not see it
            self._announce(f"lost/{rank}", text)
        return bool(lost)

    def _lead(self, step: str, judge: Judge, *, last: bool) -> StepOutcome:
        """Collect the contributions and write the verdict, unless it was written before an interrupt."""
        known = self._known_verdict(step)
        if known is not None:
            return known
        answers, failed = self._collect(step)
        verdict = StepOutcome(failed=failed)
        if not failed:
            verdict = judge({rank: answer.value for rank, answer in answers.items()})
        if verdict.failed:
            states = {rank: answer.state for rank, answer in answers.items()}
            verdict = StepOutcome(failed=verdict.failed, states=states)
        if last or verdict.failed:
            self._close()  # before the verdict: a rank that has it begins the next call
        self._set("end" if verdict.failed else f"{step}/verdict", msgspec.json.encode(verdict))
        return verdict

    def _known_verdict(self, step: str) -> StepOutcome | None:
        """Return the verdict of a step, or of the failure that ended the call at any step, if there is one."""
        for name in (f"{step}/verdict", "end"):
            if self._store.check([self._key(name)]):
                return _OUTCOMES.decode(self._store.get(self._key(name)))
        return None

    def _collect(self, step: str) -> tuple[dict[int, _Contribution], dict[int, str]]:
        """Wait for every contribution, after a failure for a short time only; return them and the failures."""
        answers: dict[int, _Contribution] = {}
        failed: dict[int, str] = {}
        missing = set(self.ranks)
        failed_at: float | None = None

        def complete() -> bool:
            nonlocal failed_at
            for rank in sorted(missing):
                if self._store.check([self._key(f"{step}/{rank}")]):
                    value = self._store.get(self._key(f"{step}/{rank}"))
                    answers[rank] = _CONTRIBUTIONS.decode(value)
                    missing.discard(rank)
            now = self._clock()
            failed.update(self._warnings())
            lost = {rank: text for rank in missing if (text := self._absent(rank, now))}
            failed.update(lost)
            missing.difference_update(lost)
            if failed and failed_at is None:
                failed_at = now
            return not missing or (failed_at is not None and now - failed_at > defaults.RANK_FAREWELL_SECONDS)

        self._wait(step, complete)
        return answers, failed

    def _follow(self, step: str, state: State) -> StepOutcome:
        """Wait for the verdict."""
        leader = self.ranks[0]
        absent = ""

        def complete() -> bool:
            nonlocal absent
            absent = "" if self._known_verdict(step) else self._absent(leader, self._clock())
            return bool(absent) or self._known_verdict(step) is not None

        self._wait(step, complete)
        known = self._known_verdict(step)  # the leader may have written it right before its end
        if known is not None:
            return known
        self._close()  # the leader comes too late for this call, and begins the next one
        self.warn(f"gave up waiting for rank {leader}, which {absent}")
        return StepOutcome(failed={leader: absent}, states={self.rank: state})

    def _close(self) -> None:
        """End the call for all ranks, once."""
        if self._store.add(self._key("closed"), 1) == 1:
            self._store.add(f"{self._name}/calls", 1)
        self._keys.append(self._key("closed"))

    def _wait(self, step: str, complete: Callable[[], bool]) -> None:
        """Return when a condition holds; say that this rank is alive, and after a while for whom it waits."""
        pause, began, patience = _FIRST_PAUSE, self._clock(), defaults.RANK_WORD_SECONDS
        while not complete():
            now = self._clock()
            self._pulse(now)
            if now - began >= patience:
                _log.warning(
                    "sluice.%s on rank %d has waited %.0f s: %s", self._verb, self.rank, now - began, self._whom(step)
                )
                patience *= 2
            self._sleep(pause)
            pause = min(pause * 1.3, _LONGEST_PAUSE)

    def _whom(self, step: str) -> str:
        """Return the ranks that have not contributed to a step, and where they are."""
        missing = [rank for rank in self.ranks if not self._store.check([self._key(f"{step}/{rank}")])]
        texts = [f"rank {rank} {self._whereabouts(rank)}" for rank in missing[:8]]
        if len(missing) > 8:
            texts.append(f"{len(missing) - 8} more")
        return "; ".join(texts) or f"rank {self.ranks[0]} decides"

    def _whereabouts(self, rank: int) -> str:
        place = self._place_of(rank)
        if place is None:
            return "has not called sluice yet"
        if place.name == self._name and place.call == self._call:
            return f"works (process {place.process.pid} of {place.process.hostname})"
        is_open = int(self._store.add(f"{place.name}/calls", 0)) <= place.call
        return f"is in {place}" if is_open else f"has not called sluice.{self._verb} yet"

    def _pulse(self, now: float) -> None:
        if now - self._pulsed >= defaults.RANK_PULSE_SECONDS:
            self._pulsed = now
            self._set(f"pulse/{self.rank}", str(now).encode())

    def _warnings(self) -> Mapping[int, str]:
        """Return the failures that ranks have announced, and those that ranks of their hosts have."""
        if not self._store.check([self._key("warnings")]):
            return {}
        found: dict[int, str] = {}
        for kind in ("lost", "warning"):
            for rank in self.ranks:
                key = self._key(f"{kind}/{rank}")
                if self._store.check([key]):
                    found[rank] = self._store.get(key).decode()
        return found

    def _absent(self, rank: int, now: float) -> str:
        """Return why a rank will not contribute; empty if it may."""
        return self._lost(rank, now) or self._silence(rank, now)

    def _lost(self, rank: int, now: float) -> str:
        """Return whether the process of a rank is gone or stopped, as a clause; empty if it runs."""
        place = None if rank == self.rank else self._place_of(rank)
        if place is None:
            return ""
        process = place.process
        state = self._state(process, self._process)
        if state == "gone":
            return f"ended: process {process.pid} of {process.hostname} is gone"
        if state != "stopped":
            self._stopped.pop(rank, None)
        elif now - self._stopped.setdefault(rank, now) >= defaults.RANK_STOPPED_SECONDS:
            return f"is stopped: process {process.pid} of {process.hostname}"
        return ""

    def _silence(self, rank: int, now: float) -> str:
        """Return a description if a rank has given no sign of life for long."""
        if rank == self.rank:
            return ""
        key = self._key(f"pulse/{rank}")
        last, since = self._seen.get(rank, (b"", now))
        self._seen.setdefault(rank, (last, since))
        if now - since >= defaults.RANK_PULSE_SECONDS:
            value = self._store.get(key) if self._store.check([key]) else b""
            if value != last:
                self._seen[rank] = value, now
            elif now - since >= defaults.RANK_PATIENCE_SECONDS:
                place = self._place_of(rank)
                joined = place is not None and (place.name, place.call) == (self._name, self._call)
                what = "has given no sign of life" if joined else "did not call this function"
                return f"{what} for {defaults.RANK_PATIENCE_SECONDS:.0f} seconds"
        return ""

    def _place_of(self, rank: int) -> _Place | None:
        """Return where a rank is; None if it has not called anything yet. Asked four times a second at most."""
        known = self._places.get(rank)
        if known is not None and (known.name, known.call) == (self._name, self._call):
            return known
        now = self._clock()
        if now - self._sought.get(rank, float("-inf")) >= defaults.RANK_SEEK_SECONDS:
            self._sought[rank] = now
            key = f"sluice/rank/{rank}"
            if self._store.check([key]):
                self._places[rank] = _PLACES.decode(self._store.get(key))
        return self._places.get(rank)

    def _without_store(self, error: RuntimeError) -> dict[int, str]:
        """Return the failure that ended the store: that of the first rank if its process is gone."""
        known = self._places.get(self.ranks[0])
        gone = known is not None and self._state(known.process, self._process) == "gone"
        why = f"ended: process {known.process.pid} of {known.process.hostname} is gone; " if known and gone else ""
        return {self.ranks[0]: f"{why}the store of the process group does not answer: {error}"}

    def _announce(self, name: str, text: str) -> None:
        self._set(name, text.encode(errors="backslashreplace"))  # paths may not be UTF-8
        self._store.add(self._key("warnings"), 1)
        self._keys.append(self._key("warnings"))

    def _key(self, name: str) -> str:
        return f"{self._name}/{self._call}/{name}"

    def _set(self, name: str, value: bytes) -> None:
        key = self._key(name)
        self._store.set(key, value)
        self._keys.append(key)

    def _forget(self) -> None:
        """Delete what this rank wrote for the call before this one, which no rank reads any more."""
        self._set(f"keys/{self.rank}", msgspec.json.encode(sorted(set(self._keys))))
        before = f"{self._name}/{self._call - 1}/keys/{self.rank}"
        if self._store.check([before]):
            for key in (*msgspec.json.decode(self._store.get(before), type=list[str]), before):
                self._store.delete_key(key)
