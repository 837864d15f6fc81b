"""Every verb on hostile files: one typed error, nothing imported, no memory held, nothing changed; odd directories."""

from __future__ import annotations

import gc
import os
import socket
import struct
import sys
import tarfile
import threading
import zipfile
from collections.abc import Callable
from functools import partial
from importlib.abc import MetaPathFinder
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

import sluice
from sluice.machine.processes import read_memory
from sluice.testing import assert_peak
from support.hostile_archives import (
    ArchiveRecord,
    Global,
    Raw,
    build_archive,
    encode,
    legacy_file,
    legacy_storage,
    pickled,
    storage,
    tar_header,
    tensor_call,
    torch_archive,
)
from support.leaks import open_files
from support.torch_files import records_of, zipped
from support.watching import watch
from support.work import at_most

MIB = 1 << 20


class Case(NamedTuple):
    """A file, and the error that it raises."""

    content: bytes
    #: Part of the text of the error.
    words: str
    kind: type[sluice.SluiceError] = sluice.FormatError


W = tensor_call(storage("0", 4), shape=(4,))
DATA = {"0": bytes(16)}
GOOD = torch_archive({"w": W}, DATA)
LEGACY_W = tensor_call(legacy_storage("7", 6), shape=(6,))
SIX = {"7": (6, bytes(24))}
LEGACY = legacy_file({"w": LEGACY_W}, SIX)
FIELDS = '{"dtype":"F32","shape":[1],"data_offsets":[0,4]}'


def with_record(name: str, data: bytes = b"") -> bytes:
    return torch_archive({"w": W}, DATA, records={name: data})


def directory_entry(at: int, value: bytes) -> bytes:
    """Change the last entry of the central directory, ``at`` bytes from its start."""
    start = GOOD.rfind(b"PK\1\2") + at
    return GOOD[:start] + value + GOOD[start + len(value) :]


def program(opcodes: bytes) -> bytes:
    return torch_archive(Raw(opcodes), DATA)


def header(text: str) -> bytes:
    raw = text.encode()
    return struct.pack("<Q", len(raw)) + raw + bytes(4)


def zip64_entry(*sizes: int, declared: int | None = None) -> bytes:
    """Return an archive whose last record has a zip64 field of these sizes, with the declared length."""
    extra = struct.pack(f"<HH{len(sizes)}Q", 1, 8 * len(sizes) if declared is None else declared, *sizes)
    record = ArchiveRecord(
        name=b"archive/version", data=b"3\n", nbytes=0xFFFFFFFF, stored_nbytes=0xFFFFFFFF, extra=extra
    )
    plain = ArchiveRecord(name=b"archive/data.pkl", data=pickled({"w": 1}))
    return build_archive([plain, record])


def shape_of(text: str) -> bytes:
    return header(f'{{"a":{FIELDS.replace("[1]", text)}}}')


def tar(*headers: bytes) -> bytes:
    return b"".join(headers) + bytes(1024)


ORDERED = b"ccollections\nOrderedDict\n"
CASES: dict[str, Case] = {
    "a version in other digits": Case(with_record("version", "\u0663".encode()), "not a number"),
    "a byte order with a line break": Case(
        with_record("byteorder", b"little\n"), "byte order", sluice.UnsupportedError
    ),
    "a name beyond the directory": Case(directory_entry(28, b"\xff\xff"), "damaged"),
    "an extra field beyond it": Case(directory_entry(30, b"\xff\xff"), "damaged"),
    "an entry on another disk": Case(directory_entry(34, b"\1\0"), "damaged"),
    "versions that hold the state dict": Case(
        program(ORDERED + b")Rq\0}X\x09\0\0\0_metadatah\0sb"), "contains itself", sluice.UnsupportedError
    ),
    "an integer of negative length": Case(
        program(b"\x8b\xff\xff\xff\xff"), "out of range: -1 bytes", sluice.LimitError
    ),
    "a size that is a bool": Case(
        torch_archive({"w": tensor_call(storage("0", 4), shape=(True, 4))}, DATA), "not a valid integer"
    ),
    "an archive's mark before a legacy file": Case(b"PK\3\4" + LEGACY, "end record", sluice.TruncatedError),
    "a form feed as white space": Case(header(f'{{"a":\f{FIELDS}}}'), "not strict JSON"),
    "brackets without end": Case(header('{"a":' + "[" * 1_000_000), "not strict JSON"),
    # archives of other programs
    "deflated by another packer": Case(
        zipped(records_of(GOOD), zipfile.ZIP_DEFLATED), "without compression", sluice.UnsupportedError
    ),
    "packed with bzip2": Case(zipped(records_of(GOOD), zipfile.ZIP_BZIP2), "method 12", sluice.UnsupportedError),
    "a program before an archive": Case(b"#!/bin/sh\nexit\0" + GOOD, "not a recognized checkpoint format"),
    "an archive sent as text": Case(GOOD.replace(b"\n", b"\r\n"), "end record"),
    "an archive as latin-1 in UTF-8": Case(GOOD.decode("latin1").encode(), "bytes follow the end"),
    "zip64 sizes that differ": Case(zip64_entry(2, 3), "two different sizes"),
    "zip64 sizes of nothing": Case(zip64_entry(), "no zip64 field"),
    "one zip64 size of two": Case(zip64_entry(2), "no zip64 field"),
    "zip64 sizes beyond their field": Case(zip64_entry(2, 2, declared=99), "no zip64 field"),
    "zip64 sizes of 2**63": Case(zip64_entry(2**63, 2**63), "does not end at"),
    "a frozenset of lists": Case(program(b"(]\x91"), "unsupported type list", sluice.UnsupportedError),
    "an id that is a list": Case(
        program(encode(["storage", Global("torch", "FloatStorage"), "0", "cpu", 4]) + b"Q"), "persistent id"
    ),
    "an ordered dict of no pairs": Case(program(ORDERED + b"](K\1K\2e\x85R"), "pairs of key and value"),
    "protocol 0": Case(torch_archive(b"(dp0\n."), "opcode DICT of protocol 0", sluice.UnsupportedError),
    "elements for a tensor": Case(program(encode(W) + b"K\1a"), "passes elements to an object"),
    "a legacy file sent as text": Case(LEGACY.replace(b"\n", b"\r\n"), "in binary mode"),
    "a size in other digits": Case(shape_of("[\u0661]"), "not strict JSON"),
    "names in single quotes": Case(header(f"{{'a':{FIELDS}}}"), "looks like safetensors"),
    "fields in capitals": Case(header(f'{{"a":{FIELDS.upper()}}}'), "lacks a field"),
    "a dtype of torch": Case(
        header(f'{{"a":{FIELDS.replace("F32", "torch.float32")}}}'), "expected BF16, BOOL", sluice.UnsupportedError
    ),
    # names, sizes and counts that lie
    "no pickle": Case(torch_archive({"w": W}, DATA, records={"data.pkl": None}), "no data.pkl"),
    "compressed bomb": Case(
        build_archive(
            [
                ArchiveRecord(name=b"a/data.pkl", data=bytes(9), method=8, nbytes=10**9),
                ArchiveRecord(name=b"a/version", data=b"3\n"),
            ]
        ),
        "is compressed and has more than 100000000 bytes; found 1000000000",
        sluice.LimitError,
    ),
    "65 dimensions": Case(
        torch_archive({"w": tensor_call(storage("0", 4), shape=(1,) * 65)}, DATA), "more than 64 dimensions"
    ),
    "numel that wraps": Case(
        torch_archive({"w": tensor_call(storage("0", 2**62 + 4), shape=(4,))}, DATA), "does not match"
    ),
    "huge count": Case(
        legacy_file({"w": tensor_call(legacy_storage("7", 2**40), shape=(4,))}, {"7": (2**40, bytes(24))}),
        "before the end of its last storage",
        sluice.TruncatedError,
    ),
    "no keys": Case(legacy_file({"w": LEGACY_W}, SIX, keys=[]), "does not contain '7'"),
    "bool": Case(shape_of("[true]"), "not strict JSON"),
    "wrong size": Case(shape_of("[5]"), "do not match the shape and dtype"),
    "surrogate": Case(header(f'{{"\\ud800":{FIELDS}}}'), "not strict JSON"),
    # tar archives
    "tar upwards": Case(tar(tar_header("pickle"), tar_header("../storages")), "'../storages'", sluice.PathEscapeError),
    "tar sparse": Case(tar(tar_header("storages", kind=tarfile.GNUTYPE_SPARSE)), "a link, a device or sparse"),
    "tar size": Case(tar(tar_header("pickle", 2**62)), "past the end of the file; found 4611686018427387904 bytes"),
    "tar of one name": Case(tar(tar_header("m.bin"), tar_header("./m.bin")), "have the name 'm.bin'"),
}


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


def test_a_directory_with_special_files_next_to_a_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # the name of a socket is short
    torch.save({"w": torch.ones(4)}, tmp_path / "pytorch_model.bin")
    for name in ("a.safetensors", "b.bin", "c.pt", "d.index.json.x", ".metadata.tmp", "e"):
        os.mkfifo(name)
    for name in ("loop", "up.safetensors", "x.pt"):
        (tmp_path / name).symlink_to(name)
    (tmp_path / "self").symlink_to(".")
    (tmp_path / "null.bin").symlink_to(os.devnull)
    (tmp_path / "folder.safetensors").mkdir()
    (tmp_path / "unreadable.pt").write_bytes(b"x")
    (tmp_path / "unreadable.pt").chmod(0)
    (tmp_path / os.fsdecode(b"not-utf-8-\xff.safetensors")).touch()
    with socket.socket(socket.AF_UNIX) as unix:
        unix.bind("s.pt")
    opened: list[str] = []
    watch(monkeypatch, os, "open", lambda path, *_: opened.append(str(path)))
    assert sluice.load_state_dict(tmp_path)["w"].eq(1).all()
    ours = [path for path in opened if path.startswith(str(tmp_path))]
    assert set(ours) == {str(tmp_path / "pytorch_model.bin")}
