"""Small loads: the system files that each opens, and that no thread is started."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest
import torch

import sluice
from sluice.machine import filesystems

MIB = 1 << 20


def test_a_second_small_load_opens_few_system_files_and_starts_no_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.save(torch.nn.Linear(4, 4).state_dict(), tmp_path / "f.pth")
    sluice.load_into(torch.nn.Linear(4, 4), tmp_path / "f.pth")
    opened: list[str] = []
    open_file = os.open

    def recorded(path: str, *arguments: int) -> int:
        opened.append(str(path))
        return open_file(path, *arguments)

    def no_thread(self: threading.Thread) -> None:
        raise AssertionError(f"{self.name} was started")

    monkeypatch.setattr(os, "open", recorded)
    monkeypatch.setattr(threading.Thread, "start", no_thread)
    monkeypatch.setattr(filesystems, "_mounted_type", lambda _: pytest.fail("the mounts were searched again"))
    sluice.load_into(torch.nn.Linear(4, 4), tmp_path / "f.pth")
    system = [path for path in opened if path.startswith(("/proc/", "/sys/")) and "/cgroup" not in path]
    expected = ["/proc/self/clear_refs", "/proc/self/status", "/proc/meminfo", "/proc/self/status"]
    assert system == (expected if os.path.exists("/proc/self/clear_refs") else [])
    assert [path for path in opened if path.endswith(".pth")] == [str(tmp_path / "f.pth")]


def test_a_load_with_readers_is_sampled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = torch.nn.Linear(MIB, 9, bias=False)  # more than one thread reads if it is cached
    torch.save(model.state_dict(), tmp_path / "f.pth")
    started: list[str] = []
    start = threading.Thread.start

    def recorded(self: threading.Thread) -> None:
        started.append(self.name)
        start(self)

    monkeypatch.setattr(threading.Thread, "start", recorded)
    sluice.load_into(model, tmp_path / "f.pth")
    assert {"sluice-sampler-0", "sluice-reader-0"} <= set(started)
