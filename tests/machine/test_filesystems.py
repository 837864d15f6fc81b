"""Types of file systems from the table of mounts."""

from __future__ import annotations

import sys
from pathlib import Path

import psutil
import pytest

from sluice.machine import filesystems


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
