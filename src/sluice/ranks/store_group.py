"""Decisions of ranks through the store of their process group.

Every process group of torch.distributed has a store (``TCPStore``, ``FileStore``): keys and values that all ranks see,
by which they found each other. A step of a decision is one key for each rank, and one for the verdict, which the first
rank writes after it has read all of the others. The store serves this better than collectives:

- Waiting can be interrupted and bounded. A collective that one rank leaves breaks the process group for all others.
- It is the same for every backend, and for any set of ranks. ``new_group`` would need ranks that do not take part.
- A rank can announce that it has failed while the others read, without their help.

While a rank waits or reads, it looks for ranks that have failed: those that announced it, those of its host whose
process has ended or is stopped, and those without a sign of life for minutes. The first rank writes at most one verdict
of a step, so all ranks agree. One window remains: if the process that serves the store ends right after a verdict,
ranks that have not read it count it as a failure.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from typing import Any, Protocol

import msgspec

from sluice import _defaults as defaults
from sluice.machine.processes import RunningProcess, state_of, this_process
from sluice.ranks.protocol import Judge, Verdict

__all__ = ["Store", "StoreGroup"]

#: Seconds between two questions to the store: the first and the longest.
_FIRST_PAUSE, _LONGEST_PAUSE = 0.0005, 0.02


class Store(Protocol):
    """The methods of ``torch.distributed.Store`` that are used."""

    def set(self, key: str, value: Any) -> None:
        """Set a value."""
        ...

    def get(self, key: str) -> bytes:
        """Return a value, waiting for it."""
        ...

    def add(self, key: str, amount: int) -> int:
        """Add to a number, 0 at first, and return the result."""
        ...

    def check(self, keys: list[str]) -> bool:
        """Return whether all keys have values."""
        ...

    def delete_key(self, key: str) -> bool:
        """Delete a value."""
        ...


class StoreGroup:
    """One call of a public function by several ranks; see ``protocol.Group``."""

    def __init__(
        self,
        store: Store,
        rank: int,
        ranks: Iterable[int],
        *,
        state: Callable[[RunningProcess, RunningProcess], str] = state_of,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """Join the call that is in progress, or begin one.

        Args:
            store: The store of the process group.
            rank: Rank of this process.
            ranks: Ranks that take part.
            state: Tells whether a process still runs.
            clock: Seconds.
            sleep: Waits for some seconds.
        """
        self.rank, self.ranks = rank, tuple(sorted(ranks))
        self._store, self._state, self._clock, self._sleep = store, state, clock, sleep
        members = ",".join(map(str, self.ranks)).encode()
        self._name = f"sluice/{hashlib.blake2b(members, digest_size=8).hexdigest()}"
        self._process = this_process()
        self._processes: dict[int, RunningProcess] = {}
        #: Signs of life: what was last seen of each rank, and when.
        self._seen: dict[int, tuple[bytes, float]] = {}
        self._stopped: dict[int, float] = {}
        self._looked = self._pulsed = self._clock()
        self._keys: list[str] = []
        self._warned = False
        #: Whether an interrupt arrived while this rank waited, which a successful verdict does not show.
        self.interrupted = False
        self._call = int(self._store.add(f"{self._name}/calls", 0))
        self._set(f"process/{rank}", msgspec.json.encode(self._process))

    @property
    def leads(self) -> bool:
        """Whether this rank writes the verdicts."""
        return self.rank == self.ranks[0]

    def decide(self, step: str, own: bytes, judge: Judge, *, last: bool = False) -> Verdict:
        """See ``Group.decide``."""
        interrupted = False
        while True:
            try:
                if not self._store.check([self._key(f"{step}/{self.rank}")]):
                    self._set(f"{step}/{self.rank}", own)
                verdict = self._lead(step, judge, last=last) if self.leads else self._follow(step)
            except KeyboardInterrupt:
                # A value from here on: the verdict may have been written with this rank's contribution.
                if interrupted:
                    raise
                interrupted = self.interrupted = True
                self.warn("KeyboardInterrupt")
                continue
            except RuntimeError as error:  # torch's errors of a store
                return Verdict(failed=self._without_store(error))
            if last or verdict.failed:
                with suppress(RuntimeError):  # the verdict holds without the store
                    self._forget()
            return verdict

    def warn(self, text: str) -> None:
        """See ``Group.warn``."""
        if self._warned:
            return
        self._warned = True
        with suppress(RuntimeError):  # without a store no rank can be told
            self._set(f"warning/{self.rank}", text.encode())
            self._announce()

    def look(self, *, now: bool = False) -> bool:
        """See ``Group.look``."""
        time_now = self._clock()
        if not now and time_now - self._looked < defaults.RANK_LOOK_SECONDS:
            return False
        self._looked = time_now
        self._pulse(time_now)
        if self._store.check([self._key("warnings")]):
            return True
        lost = {rank: text for rank in self.ranks if (text := self._lost(rank, time_now))}
        for rank, text in lost.items():  # ranks of other hosts do not see it
            self._set(f"lost/{rank}", text.encode())
        if lost:
            self._announce()
        return bool(lost)

    def _lead(self, step: str, judge: Judge, *, last: bool) -> Verdict:
        """Collect the contributions and write the verdict, unless it was written before an interrupt."""
        known = self._known_verdict(step)
        if known is not None:
            return known
        answers, failed = self._collect(step)
        if failed:
            verdict = Verdict(failed=failed)
        else:
            ruling = judge(answers)
            verdict = Verdict(failed=ruling.failed, value=b"" if ruling.failed else ruling.value)
        if last or verdict.failed:
            self._store.add(f"{self._name}/calls", 1)  # before the verdict: a rank that has it begins the next call
        self._set("end" if verdict.failed else f"{step}/verdict", msgspec.json.encode(verdict))
        return verdict

    def _known_verdict(self, step: str) -> Verdict | None:
        """Return the verdict of a step, or of the failure that ended the call at any step, if there is one."""
        for name in (f"{step}/verdict", "end"):
            if self._store.check([self._key(name)]):
                return msgspec.json.decode(self._store.get(self._key(name)), type=Verdict)
        return None

    def _collect(self, step: str) -> tuple[dict[int, bytes], dict[int, str]]:
        """Wait for every contribution; return them and the failures."""
        answers: dict[int, bytes] = {}
        failed: dict[int, str] = {}
        missing = set(self.ranks)
        warned_at: float | None = None

        def complete() -> bool:
            nonlocal warned_at
            for rank in sorted(missing):
                if self._store.check([self._key(f"{step}/{rank}")]):
                    answers[rank] = self._store.get(self._key(f"{step}/{rank}"))
                    missing.discard(rank)
            now = self._clock()
            failed.update(self._warnings())
            failed.update({rank: text for rank in missing if (text := self._lost(rank, now, silent=True))})
            missing.difference_update(failed)
            if failed and warned_at is None:
                warned_at = now
            return not missing or (warned_at is not None and now - warned_at > defaults.RANK_FAREWELL_SECONDS)

        self._wait(complete)
        return answers, failed

    def _follow(self, step: str) -> Verdict:
        """Wait for the verdict."""
        leader = self.ranks[0]
        lost: dict[int, str] = {}

        def complete() -> bool:
            if self._known_verdict(step) is not None:
                return True
            text = self._lost(leader, self._clock(), silent=True)
            if text:
                lost[leader] = text
            return bool(text)

        self._wait(complete)
        known = self._known_verdict(step)  # the leader may have written it right before its end
        if known is not None:
            return known
        self.warn(f"gave up waiting for rank {leader}, which {lost[leader]}")
        return Verdict(failed=lost)

    def _wait(self, complete: Callable[[], bool]) -> None:
        """Return when a condition holds; say that this rank is alive meanwhile."""
        pause = _FIRST_PAUSE
        while not complete():
            self._pulse(self._clock())
            self._sleep(pause)
            pause = min(pause * 1.3, _LONGEST_PAUSE)

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

    def _lost(self, rank: int, now: float, *, silent: bool = False) -> str:
        """Return why a rank will not answer; empty if it may.

        Args:
            rank: The rank.
            now: Seconds.
            silent: Whether a rank that gives no sign of life counts.
        """
        if rank == self.rank:
            return ""
        process = self._process_of(rank)
        state = "unknown" if process is None else self._state(process, self._process)
        if state == "gone":
            return f"ended: process {process.pid} of {process.hostname} is gone" if process else ""
        if state != "stopped":
            self._stopped.pop(rank, None)
        elif process and now - self._stopped.setdefault(rank, now) >= defaults.RANK_STOPPED_SECONDS:
            return f"is stopped: process {process.pid} of {process.hostname}"
        return self._silence(rank, now) if silent else ""

    def _silence(self, rank: int, now: float) -> str:
        """Return a description if a rank has given no sign of life for long."""
        key = self._key(f"pulse/{rank}")
        last, since = self._seen.get(rank, (b"", now))
        self._seen.setdefault(rank, (last, since))
        if now - since >= defaults.RANK_PULSE_SECONDS:
            value = self._store.get(key) if self._store.check([key]) else b""
            if value != last:
                self._seen[rank] = value, now
            elif now - since >= defaults.RANK_PATIENCE_SECONDS:
                joined = "has given no sign of life" if rank in self._processes else "did not call this function"
                return f"{joined} for {defaults.RANK_PATIENCE_SECONDS:.0f} seconds"
        return ""

    def _process_of(self, rank: int) -> RunningProcess | None:
        """Return the process of a rank, if it has joined the call."""
        if rank not in self._processes:
            key = self._key(f"process/{rank}")
            if not self._store.check([key]):
                return None
            self._processes[rank] = msgspec.json.decode(self._store.get(key), type=RunningProcess)
        return self._processes[rank]

    def _without_store(self, error: RuntimeError) -> dict[int, str]:
        """Return the failure that ended the store: that of the first rank if its process is gone."""
        known = self._processes.get(self.ranks[0])
        gone = known is not None and self._state(known, self._process) == "gone"
        why = f"ended: process {known.pid} of {known.hostname} is gone; " if known and gone else ""
        return {self.ranks[0]: f"{why}the store of the process group does not answer: {error}"}

    def _announce(self) -> None:
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
