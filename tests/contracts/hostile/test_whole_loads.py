"""Every verb on hostile files: one typed error, nothing imported, no memory held, nothing changed."""

from __future__ import annotations

import gc
import sys
import threading
from collections.abc import Callable
from functools import partial
from importlib.abc import MetaPathFinder
from pathlib import Path

import pytest
import torch

import sluice
from sluice.machine.processes import read_memory
from sluice.testing import assert_peak
from support.hostile_archives import Global, Raw, encode, legacy_file, torch_archive
from support.hostile_files import CASES, DATA, LEGACY_W, SIX, W
from support.leaks import open_files
from support.work import at_most

MIB = 1 << 20

EVIL = Global("sluice_test_canary", "run")


def routes(arguments: object = ("touch",)) -> dict[str, Raw]:
    """Return a pickle for each way to name a global and call it."""
    name = encode(EVIL)
    stacked = encode(EVIL.module) + encode(EVIL.name) + b"\x93"
    call = encode(arguments)
    return {
        "GLOBAL REDUCE": Raw(name + call + b"R"),
        "STACK_GLOBAL REDUCE": Raw(stacked + call + b"R"),
        "NEWOBJ": Raw(name + call + b"\x81"),
        "NEWOBJ_EX": Raw(name + call + b"}\x92"),
        "INST": Raw(b"(" + b"isluice_test_canary\nrun\n"),
        "OBJ": Raw(b"(" + name + b"o"),
        "BUILD": Raw(name + b")\x81" + encode({"x": 1}) + b"b"),
        "EXT1": Raw(b"\x82\x01"),
        "EXT2": Raw(b"\x83\x01\x00"),
        "EXT4": Raw(b"\x84\x01\x00\x00\x00"),
        "global as a value": Raw(name),
    }


class Canary(MetaPathFinder):
    """Records every attempt to import the module that the files name."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def find_spec(self, fullname: str, path: object = None, target: object = None) -> None:  # noqa: ARG002 - the base's
        if fullname.startswith("sluice_test_canary"):
            self.asked.append(fullname)


def verbs(path: Path) -> dict[str, Callable[[], object]]:
    """Return the verbs that load a file; ``open`` may succeed if only a part is damaged."""

    def load_into() -> None:
        model = torch.nn.ParameterDict({"w": torch.nn.Parameter(torch.full((4,), 7.0))})
        try:
            sluice.load_into(model, path)
        finally:
            assert model["w"].detach().eq(7).all()

    def load_into_meta() -> None:
        model = torch.nn.ParameterDict({"w": torch.nn.Parameter(torch.empty(4, device="meta"))})
        try:
            sluice.load_into(model, path)
        finally:
            assert model["w"].is_meta

    return {"load_state_dict": lambda: sluice.load_state_dict(path), "live": load_into, "meta": load_into_meta}


@pytest.mark.parametrize("route", routes())
@pytest.mark.parametrize("legacy", [False, True], ids=["zip", "legacy"])
def test_no_route_to_a_global_imports_or_calls_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, route: str, legacy: bool
) -> None:
    value = {"w": LEGACY_W if legacy else W, "x": routes()[route]}
    (tmp_path / "f").write_bytes(legacy_file(value, SIX) if legacy else torch_archive(value, DATA))
    canary = Canary()
    monkeypatch.setattr(sys, "meta_path", [canary, *sys.meta_path])
    for load in verbs(tmp_path / "f").values():
        with pytest.raises(sluice.UnsafeContentError) as caught:
            load()
        assert caught.value.file == str(tmp_path / "f")
        assert "never runs code" in str(caught.value)
    assert canary.asked == []


@pytest.mark.parametrize("name", CASES)
def test_every_verb_names_the_problem_and_its_place(tmp_path: Path, name: str) -> None:
    content, words, kind = CASES[name]
    path = tmp_path / "f"
    path.write_bytes(content)
    before = set(tmp_path.iterdir())
    for load in verbs(path).values():
        with at_most(2_000_000), assert_peak(64 * MIB), pytest.raises(kind, match=words) as caught:
            load()
        assert caught.value.file == str(path)
        assert str(path) in str(caught.value)
        assert isinstance(caught.value, sluice.CheckpointError)
    assert set(tmp_path.iterdir()) == before


def test_a_thousand_failing_opens_and_loads_leave_nothing_behind(tmp_path: Path) -> None:
    paths = []
    for number, (content, _, _) in enumerate(CASES.values()):
        paths.append(tmp_path / f"{number}.pth")
        paths[-1].write_bytes(content)

    def fail(rounds: int) -> int:
        failures = 0
        for _ in range(rounds):
            for number, path in enumerate(paths):
                load = list(verbs(path).values())[number % 3] if number % 2 else partial(sluice.open, path)
                with pytest.raises(sluice.SluiceError):
                    load()
                failures += 1
        return failures

    fail(3)  # caches of regular expressions, of the allocator and of torch
    gc.collect()
    descriptors, threads, resident = open_files(), threading.active_count(), read_memory().total_bytes
    assert fail(1 + 1000 // len(paths)) >= 1000
    gc.collect()
    assert open_files() == descriptors
    assert threading.active_count() == threads
    assert read_memory().total_bytes - resident < 5 * MIB
