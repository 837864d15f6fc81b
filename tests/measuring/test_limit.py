"""Programs under a hard memory limit: their outcome, cleanup, and errors if limits are not permitted."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from sluice.machine.cgroups import memory_groups
from sluice.measuring import LimitedGroup, limited_group, memory_limit_refusal, run_limited
from sluice.measuring._limit import _parents
from support.directories import write_texts

MIB = 1 << 20

TAKE = "import sys; room = bytearray(int(sys.argv[1])); print(len(room))"


def take(nbytes: int) -> list[str]:
    return [sys.executable, "-c", TAKE, str(nbytes)]


@pytest.fixture
def permitted() -> None:
    if reason := memory_limit_refusal():
        pytest.skip(reason)


def test_a_program_that_takes_more_is_killed_and_reported(permitted: None) -> None:
    done = run_limited(take(160 * MIB), 96 * MIB)
    assert done.oom_killed
    assert done.returncode < 0
    assert done.stdout == ""
    assert done.peak_bytes is not None
    assert 90 * MIB <= done.peak_bytes <= 96 * MIB


def test_a_program_that_fits_ends_by_itself(permitted: None) -> None:
    done = run_limited(take(64 * MIB), 160 * MIB)
    assert (done.returncode, done.oom_killed, done.stdout) == (0, False, f"{64 * MIB}\n")
    assert done.peak_bytes is not None
    assert done.peak_bytes >= 64 * MIB


def test_arguments_reach_the_program_unchanged_and_an_error_of_it_is_its_own(permitted: None) -> None:
    arguments = ["$HOME; exit 3", "a b", "'", "*"]
    done = run_limited([sys.executable, "-c", "import sys; sys.exit(str(sys.argv[1:]))", *arguments], 160 * MIB)
    assert (done.returncode, done.oom_killed, done.stderr) == (1, False, f"{arguments}\n")
    assert done.peak_bytes is not None
    assert done.peak_bytes > MIB  # the interpreter counts: the program joins the group before it starts


def test_a_group_kills_its_processes_and_is_removed(permitted: None) -> None:
    with limited_group(160 * MIB) as group:
        process = subprocess.Popen(group.command(["sleep", "100"]))
        while str(process.pid) not in (group.path / "cgroup.procs").read_text().split():
            assert process.poll() is None
    assert process.wait(timeout=90) < 0
    assert not group.path.exists()


def test_a_program_that_takes_too_long_is_killed(permitted: None) -> None:
    with pytest.raises(subprocess.TimeoutExpired):
        run_limited(["sleep", "100"], 160 * MIB, timeout_seconds=0.2)


def test_a_limit_is_positive_and_needs_control_groups(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="positive"), limited_group(0):
        pass
    with pytest.raises(PermissionError, match="this process sees none"), limited_group(MIB, root=tmp_path):
        pass


def test_a_refusal_states_place_and_need_and_leaves_nothing(tmp_path: Path) -> None:
    """A directory that is not a control group: the kernel creates no files in its subdirectories."""
    root = write_texts(
        tmp_path,
        {
            "proc/self/cgroup": "4:memory:/job\n",
            "sys/fs/cgroup/memory/job/memory.limit_in_bytes": "9223372036854771712\n",
            "sys/fs/cgroup/memory/job/memory.usage_in_bytes": "1\n",
        },
    )
    with (
        pytest.raises(PermissionError, match=r"run as root.*refused below .*memory/job"),
        limited_group(MIB, root=root),
    ):
        pass
    assert sorted(path.name for path in (root / "sys/fs/cgroup/memory/job").iterdir()) == [
        "memory.limit_in_bytes",
        "memory.usage_in_bytes",
    ]


def test_version_2_creates_its_group_below_one_that_has_the_controller(tmp_path: Path) -> None:
    """The process's own group has processes, so only groups below its ancestors can have a memory controller."""
    root = write_texts(
        tmp_path,
        {
            "proc/self/cgroup": "0::/slice/service\n",
            "sys/fs/cgroup/slice/service/memory.current": "1\n",
            "sys/fs/cgroup/slice/service/cgroup.subtree_control": "\n",
            "sys/fs/cgroup/slice/memory.current": "1\n",
            "sys/fs/cgroup/slice/cgroup.subtree_control": "cpu memory\n",
            "sys/fs/cgroup/cgroup.subtree_control": "cpu memory pids\n",
        },
    )
    mount = root / "sys/fs/cgroup"
    assert list(_parents(memory_groups(root))) == [mount / "slice", mount]


@pytest.mark.parametrize(
    ("version", "files"),
    [
        (1, {"memory.oom_control": "under_oom 0\noom_kill 2\n", "memory.max_usage_in_bytes": "4096\n"}),
        (2, {"memory.events": "oom 5\noom_kill 2\noom_group_kill 0\n", "memory.peak": "4096\n"}),
        (2, {"memory.events": "oom_kill 2\n"}),  # an old kernel does not tell the peak
    ],
)
def test_both_versions_tell_kills_and_peak(tmp_path: Path, version: int, files: dict[str, str]) -> None:
    group = LimitedGroup(version=version, path=write_texts(tmp_path, files), limit_bytes=8192)
    assert (group.oom_kills, group.peak_bytes) == (2, 4096 if len(files) == 2 else None)
