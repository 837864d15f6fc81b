"""Small loads: the system files that each opens, and that no thread is started."""

from __future__ import annotations

import gc
import math
import os
import sys
import threading
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import sluice
from sluice.machine import facts, filesystems
from support.watching import watch
from support.work import functions_entered

MIB = 1 << 20


def test_a_second_small_load_opens_few_system_files_and_starts_no_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.save(torch.nn.Linear(4, 4).state_dict(), tmp_path / "f.pth")
    sluice.load_into(torch.nn.Linear(4, 4), tmp_path / "f.pth")
    opened: list[str] = []
    watch(monkeypatch, os, "open", lambda path, *_: opened.append(str(path)))
    monkeypatch.setattr(threading.Thread, "start", lambda thread: pytest.fail(f"{thread.name} was started"))
    monkeypatch.setattr(filesystems, "_mounted_type", lambda _: pytest.fail("the mounts were searched again"))
    sluice.load_into(torch.nn.Linear(4, 4), tmp_path / "f.pth")
    system = [path for path in opened if path.startswith(("/proc/", "/sys/")) and "/cgroup" not in path]
    expected = ["/proc/self/clear_refs", "/proc/self/status", "/proc/meminfo", "/proc/self/status"]
    assert system == (expected if os.path.exists("/proc/self/clear_refs") else [])
    assert [path for path in opened if path.endswith(".pth")] == [str(tmp_path / "f.pth")]


@pytest.mark.parametrize(("suffix", "files", "functions"), [(".safetensors", 55, 310), (".pth", 63, 410)])
def test_a_second_load_of_eight_tensors_enters_few_functions(
    tmp_path: Path, suffix: str, files: int, functions: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The bounds are what such a load takes now, with a margin for other versions of Python. They are only lowered.
    monkeypatch.setattr(facts, "_unlimited_until", math.inf)  # on a busy machine this time ends between the loads
    monkeypatch.delitem(sys.modules, "peft", raising=False)  # if other tests import it, its wrappers are looked for
    path = tmp_path / f"f{suffix}"
    model = torch.nn.Sequential(*[torch.nn.Linear(4, 4) for _ in range(4)])
    torch.save(model.state_dict(), path) if suffix == ".pth" else save_file(model.state_dict(), path)
    sluice.load_into(model, path)
    gc.collect()  # not within: finalizers of other tests enter functions, too
    with functions_entered(Path(sluice.__file__).parent) as entered:
        sluice.load_into(model, path)
    found = sorted({file for file, _ in entered})
    assert len(found) <= files, found
    assert len(entered) <= functions


def test_a_load_with_readers_is_sampled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = torch.nn.Linear(MIB, 9, bias=False)  # more than one thread reads if it is cached
    torch.save(model.state_dict(), tmp_path / "f.pth")
    started: list[str] = []
    watch(monkeypatch, threading.Thread, "start", lambda thread: started.append(thread.name))
    sluice.load_into(model, tmp_path / "f.pth")
    assert {"sluice-sampler-0", "sluice-reader-0"} <= set(started)
