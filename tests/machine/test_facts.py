from __future__ import annotations

import errno
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from sluice.benchmark.machine import make_cold
from sluice.machine import cgroups, filesystems
from sluice.machine import facts as _facts
from sluice.machine.cgroups import cgroup_headroom, memory_groups
from sluice.machine.facts import file_facts, probe_cache
from sluice.sources.local import LocalFile
from support.directories import write_texts
from support.sources import MemorySource
from support.watching import watch

MIB = 1 << 20


@pytest.fixture
def file(tmp_path: Path) -> Iterator[LocalFile]:
    (tmp_path / "f").write_bytes(b"x" * 300_000)
    source = LocalFile(tmp_path / "f")
    yield source
    source.close()


#: Files of the kernel below /proc and /sys/fs/cgroup, and what the limits leave.
CGROUPS: dict[str, tuple[dict[str, str], int | None]] = {
    "the tightest ancestor of v2 counts, and reclaimable pages are free": (
        {
            "proc/self/cgroup": "0::/pod/cri:container\n",
            "sys/fs/cgroup/pod/cri:container/memory.max": "max\n",
            "sys/fs/cgroup/pod/cri:container/memory.current": f"{100 * MIB}\n",
            "sys/fs/cgroup/pod/memory.max": f"{500 * MIB}\n",
            "sys/fs/cgroup/pod/memory.current": f"{300 * MIB}\n",
            "sys/fs/cgroup/pod/memory.stat": f"anon 1\ninactive_file {50 * MIB}\n",
        },
        250 * MIB,
    ),
    "v1 and its unlimited value": (
        {
            "proc/self/cgroup": "9:cpu,cpuacct:/x\n4:memory:/job\n0::/\n",
            "sys/fs/cgroup/memory/job/memory.limit_in_bytes": f"{64 * MIB}\n",
            "sys/fs/cgroup/memory/job/memory.usage_in_bytes": f"{60 * MIB}\n",
            "sys/fs/cgroup/memory/job/memory.stat": f"total_inactive_file {MIB}\n",
            "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
            "sys/fs/cgroup/memory/memory.usage_in_bytes": "1\n",
        },
        5 * MIB,
    ),
    "a group hidden by a namespace is skipped": (
        {
            "proc/self/cgroup": "0::/not/visible/here\n",
            "sys/fs/cgroup/memory.max": f"{10 * MIB}\n",
            "sys/fs/cgroup/memory.current": f"{4 * MIB}\n",
        },
        6 * MIB,
    ),
    "no control groups": ({}, None),
}


@pytest.mark.parametrize(("files", "left"), CGROUPS.values(), ids=CGROUPS)
def test_what_control_groups_leave(tmp_path: Path, files: dict[str, str], left: int | None) -> None:
    root = write_texts(tmp_path, files)
    assert cgroup_headroom(root) == left
    assert {group.version for group in memory_groups(root)} <= {1 if "limit_in_bytes" in str(files) else 2}


@contextmanager
def cold_file(path: Path, nbytes: int) -> Iterator[int]:
    """Open a file whose pages are not cached, for random reads."""
    path.write_bytes(bytes(nbytes))
    if not make_cold(path):
        pytest.skip("this file system keeps all files in memory")
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_RANDOM)
        yield descriptor
    finally:
        os.close(descriptor)


def count_no_pages(monkeypatch: pytest.MonkeyPatch, *, but: str = "") -> None:
    """Make the kernel refuse to count cached pages, except by one function."""
    for name in {"cached_bytes", "resident_bytes"} - {but}:
        monkeypatch.setattr(_facts, name, lambda *_: 0)


@pytest.mark.parametrize(
    ("answers", "expected"),
    [
        ([1, BlockingIOError(), 1], (True, False, True)),
        ([OSError(errno.ENOTSUP, "not supported")], ()),
        ([1, OSError(errno.EINVAL, "old kernel")], ()),
    ],
)
def test_probes_read_one_byte_each_and_stop_if_the_kernel_does_not_answer(
    file: LocalFile,
    monkeypatch: pytest.MonkeyPatch,
    answers: list[int | OSError],
    expected: tuple[bool, ...],
) -> None:
    asked: list[tuple[int, int, int]] = []

    def preadv(_: int, buffers: list[bytearray], offset: int, flags: int = 0) -> int:
        asked.append((offset, len(buffers[0]), flags))
        answer = answers[len(asked) - 1]
        if isinstance(answer, OSError):
            raise answer
        return answer

    count_no_pages(monkeypatch)
    monkeypatch.setattr(os, "preadv", preadv)
    monkeypatch.setattr(os, "RWF_NOWAIT", 8, raising=False)
    monkeypatch.setattr(_facts, "filesystem_type", lambda _: "ext4")
    monkeypatch.setattr(_facts, "_opens_direct", lambda _: True)
    monkeypatch.setattr("sluice._defaults.SERIAL_BYTES", 1)
    monkeypatch.setattr("sluice._defaults.PROBE_STEP_BYTES", 102_400)
    assert file_facts(file).cached == expected
    assert [(offset // 102_400, *rest) for offset, *rest in asked] == [(i, 1, 8) for i in range(len(asked))]


@pytest.fixture
def like_overlay(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make every file system count no pages and refuse reads without waiting, as overlay does."""

    def refuse(_descriptor: int, _buffers: list[bytearray], _offset: int, flags: int = 0) -> None:
        if flags:
            raise OSError(errno.EOPNOTSUPP, "not supported")

    count_no_pages(monkeypatch, but="resident_bytes")
    watch(monkeypatch, os, "preadv", refuse)


@pytest.mark.usefixtures("like_overlay")
def test_file_systems_that_answer_no_probe_are_asked_through_a_mapping(tmp_path: Path) -> None:
    with cold_file(tmp_path / "f", 8 * MIB + 1) as descriptor:
        found = probe_cache(descriptor, range(0, 8 * MIB + 1, MIB))
        assert found == (4096 / MIB, *(0.0,) * 8)  # the byte that shows whether pages are counted
        os.pread(descriptor, MIB, 2 * MIB)
        os.pread(descriptor, 1, 8 * MIB)
        found = probe_cache(descriptor, range(0, 8 * MIB + 1, MIB))
        assert found == (4096 / MIB, 0.0, 1.0, 0.0, 0.0, 0.0, 0.0, 0.0, 1.0)


@pytest.mark.usefixtures("like_overlay")
@pytest.mark.parametrize(("owner", "writer"), [(True, False), (False, True), (False, False)])
def test_only_who_owns_a_file_or_may_write_to_it_asks_through_a_mapping(
    file: LocalFile, monkeypatch: pytest.MonkeyPatch, owner: bool, writer: bool
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: os.stat(file.path).st_uid if owner else 4_294_967_294)
    monkeypatch.setattr(os, "access", lambda *_, **__: writer)
    with file.lend() as descriptor:
        found = probe_cache(descriptor, range(0, 300_000, MIB))
    assert found == ((True,) if owner or writer else ())


@pytest.mark.parametrize("counts_pages", ["cached_bytes", "resident_bytes", ""])
def test_neither_headers_nor_earlier_probes_make_a_cold_file_look_cached(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, counts_pages: str
) -> None:
    step = 2 * MIB
    count_no_pages(monkeypatch, but=counts_pages)
    with cold_file(tmp_path / "f", 16 * MIB) as descriptor:
        if counts_pages and _facts._counter(descriptor) is None:
            pytest.skip("this kernel does not count cached pages")
        # Read-ahead differs between systems: of 32 samples, a few positions may coincide. On a busy machine pages that
        # were dropped a moment ago may still be there: then the file is made cold again.
        for _ in range(3):
            probes = [probe_cache(descriptor, range(0, 16 * MIB, step)) for _ in range(4)]
            few = sum(map(sum, probes)) <= (4 * 4096 / step if counts_pages else 8)
            if few or not make_cold(tmp_path / "f"):
                break
        assert few, probes
        for offset in range(0, 16 * MIB, step):
            os.pread(descriptor, 4096, offset)
        assert not counts_pages or probe_cache(descriptor, range(0, 16 * MIB, step)) == (4096 / step,) * 8
        assert len(os.pread(descriptor, 16 * MIB, 0)) == 16 * MIB
        assert all(probe_cache(descriptor, range(0, 16 * MIB, step)))


def test_large_files_are_probed_at_larger_steps(file: LocalFile, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sluice._defaults.PROBES_PER_FILE", 4)
    monkeypatch.setattr("sluice._defaults.PROBE_STEP_BYTES", 4096)
    step = file_facts(file).probe_step_bytes
    assert step % 4096 == 0
    assert -(-300_000 // step) <= 4


def test_small_files_network_file_systems_and_other_sources_are_read_buffered(
    file: LocalFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    small, other = file_facts(file), file_facts(MemorySource(b"x"))
    assert (small.direct_io, small.cached) == (False, ())
    assert (other.filesystem, other.direct_io, other.cached) == ("memory", False, ())
    monkeypatch.setattr(_facts, "filesystem_type", lambda _: "nfs4")
    monkeypatch.setattr("sluice._defaults.SERIAL_BYTES", 1)
    assert not file_facts(file).direct_io


def test_a_device_that_is_mounted_again_with_another_file_system_is_asked_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mounts = iter(["ext4", "xfs"])
    numbers = iter([1, 1, 2])
    monkeypatch.setattr(filesystems, "_known", {})
    monkeypatch.setattr(filesystems, "_mounted_type", lambda _: next(mounts))
    monkeypatch.setattr(filesystems, "_type_number", lambda _: next(numbers))
    assert [filesystems.filesystem_type(str(tmp_path)) for _ in range(3)] == ["ext4", "ext4", "xfs"]


def test_a_control_group_without_a_limit_is_not_asked_for_its_usage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    group = "sys/fs/cgroup/pod"
    root = write_texts(
        tmp_path, {"proc/self/cgroup": "0::/pod\n", f"{group}/memory.max": "max\n", f"{group}/memory.current": "1\n"}
    )
    asked: list[str] = []
    watch(monkeypatch, cgroups, "read_system_file", asked.append)
    assert cgroup_headroom(root) is None
    # Neither for its usage, nor is the root of the hierarchy asked for its limit: it never has one.
    assert [path.removeprefix(str(root)) for path in asked] == ["/proc/self/cgroup", f"/{group}/memory.max"]
    write_texts(tmp_path, {f"{group}/memory.max": "3\n"})  # a limit can be set while the process runs
    assert cgroup_headroom(root) == 2


@pytest.mark.parametrize("filesystem", ["tmpfs", "ramfs"])
def test_files_in_memory_are_cached_and_their_pages_are_not_counted(
    file: LocalFile, monkeypatch: pytest.MonkeyPatch, filesystem: str
) -> None:
    monkeypatch.setattr(_facts, "filesystem_type", lambda _: filesystem)
    monkeypatch.setattr(_facts, "probe_cache", lambda *_: pytest.fail("counted"))
    monkeypatch.setattr("sluice._defaults.SERIAL_BYTES", 1)
    monkeypatch.setattr("sluice._defaults.PROBE_STEP_BYTES", 102_400)
    known = file_facts(file)
    assert (known.direct_io, known.cached) == (False, (1.0, 1.0, 1.0))


def test_spaces_and_other_bytes_of_mount_points_are_unescaped(tmp_path: Path) -> None:
    table = tmp_path / "mounts"
    table.write_bytes(
        b"/dev/sda1 / ext4 rw 0 0\nhost:/a /mnt/two\\040words\\134 nfs4 rw 0 0\nnone /caf\xc3\xa9 tmpfs rw 0 0\n"
    )
    assert filesystems._mounts(str(table)) == [("/", "ext4"), ("/mnt/two words\\", "nfs4"), ("/café", "tmpfs")]


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's table")
def test_the_table_has_what_psutil_finds() -> None:
    found = [(each.mountpoint, each.fstype) for each in psutil.disk_partitions(all=True)]
    assert filesystems._mounts() == found
