"""The identity of processes, and whether they still run."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest
from msgspec.structs import replace

from sluice.machine.processes import _state_and_start, state_of, this_process
from support.waiting import wait_until

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="/proc is Linux")


def test_a_process_is_known_by_its_number_its_start_and_its_host() -> None:
    own = this_process()
    assert state_of(own, own) == "running"
    assert own.pid == os.getpid()
    assert own.host.endswith(own.hostname)
    assert state_of(replace(own, started=own.started + 1), own) == "gone"  # another process with the same number
    assert state_of(replace(own, namespace="other"), own) == "unknown"  # on a different host
    assert state_of(replace(own, namespace=""), replace(own, namespace="")) == "unknown"  # not on Linux


def test_stopped_ended_and_reaped() -> None:
    own = this_process()
    with subprocess.Popen(["sleep", "60"]) as child:
        other = replace(own, pid=child.pid, started=_state_and_start(child.pid)[1])
        child.send_signal(signal.SIGSTOP)
        wait_until(lambda: state_of(other, own) == "stopped", "the child to stop")
        child.kill()
        wait_until(lambda: state_of(other, own) == "gone", "the child to end")  # a zombie until its parent asks
        child.wait()
        assert state_of(other, own) == "gone"
