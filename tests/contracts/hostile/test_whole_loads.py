"""Every verb on hostile files: one typed error, nothing imported, no memory held, nothing changed."""

from __future__ import annotations

import gc
import io
import json
import struct
import sys
import tarfile
import threading
from collections.abc import Callable
from functools import partial
from importlib.abc import MetaPathFinder
from pathlib import Path

import pytest
import torch

import sluice
from sluice.machine.peaks import read_memory
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
    tensor_call,
    torch_archive,
)
from support.hostile_files import CASES, Case
from support.leaks import open_files
from support.work import at_most

MIB = 1 << 20

DATA = {"0": bytes(16)}
W = tensor_call(storage("0", 4), shape=(4,))
SIX = {"7": (6, bytes(24))}
LEGACY_W = tensor_call(legacy_storage("7", 6), shape=(6,))
EVIL = Global("sluice_test_canary", "run")


def safetensors_file(header: object, data: bytes = b"", *, length: int | None = None) -> bytes:
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(raw) if length is None else length) + raw + data


def field(**changes: object) -> dict[str, object]:
    return {"w": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16], **changes}}


def zipped(*records: ArchiveRecord) -> bytes:
    plain = [
        ArchiveRecord(name=b"a/data.pkl", data=pickled({"w": W})),
        ArchiveRecord(name=b"a/data/0", data=bytes(16)),
        ArchiveRecord(name=b"a/version", data=b"3\n"),
    ]
    replaced = {record.name: record for record in records}
    kept = [replaced.pop(record.name, record) for record in plain]
    return build_archive([*kept, *replaced.values()])


def tar(*members: tarfile.TarInfo) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.USTAR_FORMAT) as archive:
        for member in members:
            archive.addfile(member)
    return buffer.getvalue()


def member(name: str, kind: bytes = tarfile.REGTYPE, target: str = "") -> tarfile.TarInfo:
    made = tarfile.TarInfo(name)
    made.type, made.linkname = kind, target
    return made


def huge_member() -> bytes:
    """Return a tar archive whose only member declares 2**62 bytes."""
    made = member("pickle")
    made.size = 2**62
    return made.tobuf(tarfile.GNU_FORMAT) + bytes(1024)


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


BAD: dict[str, Case] = {
    # zip
    "duplicate record": Case(
        build_archive([ArchiveRecord(name=b"a/data.pkl", data=pickled({}))] * 2), "two records have the name"
    ),
    "compressed": Case(
        zipped(ArchiveRecord(name=b"a/data/0", data=bytes(9), method=8)), "compressed", sluice.UnsupportedError
    ),
    "encrypted": Case(
        zipped(ArchiveRecord(name=b"a/data/0", data=bytes(16), flags=1)), "encrypted", sluice.UnsupportedError
    ),
    "other local name": Case(
        zipped(ArchiveRecord(name=b"a/data/0", data=bytes(16), local_name=b"a/data/1")),
        "does not match the central directory",
    ),
    "upwards": Case(zipped(ArchiveRecord(name=b"a/../x", data=b"")), "not a plain path"),
    "absolute": Case(zipped(ArchiveRecord(name=b"/x", data=b"")), "not a plain path"),
    "backslash": Case(zipped(ArchiveRecord(name=b"a/x\\y", data=b"")), "not a plain path"),
    "NUL": Case(zipped(ArchiveRecord(name=b"a/x\0", data=b"")), "not a plain path"),
    "two directories": Case(zipped(ArchiveRecord(name=b"b/x", data=b"")), "not a plain path"),
    "short record": Case(torch_archive({"w": W}, {"0": bytes(15)}), "does not match"),
    "long record": Case(torch_archive({"w": W}, {"0": bytes(17)}), "does not match"),
    "no record": Case(torch_archive({"w": W}, {}), "no record for storage '0'"),
    "no pickle": Case(torch_archive({"w": W}, DATA, records={"data.pkl": None}), "no data.pkl"),
    "program": Case(torch_archive({"w": W}, DATA, records={"constants.pkl": b""}), "not hold a module"),
    "program bomb": Case(
        zipped(ArchiveRecord(name=b"a/constants.pkl"), ArchiveRecord(name=b"a/code/x.py", method=8, nbytes=2**31)),
        "not hold a module|more than 100000000 bytes",
        sluice.CheckpointError,
    ),
    "exported program": Case(
        torch_archive({}, records={"archive_format": b"pt2", "data/weights/m_weights_config.json": b"{}"}),
        "not strict JSON",
    ),
    "byte order": Case(
        torch_archive({"w": W}, DATA, records={"byteorder": b"middle"}), "byte order", sluice.UnsupportedError
    ),
    "alignment": Case(
        torch_archive({"w": W}, DATA, records={".storage_alignment": b"1e9"}), "invalid storage alignment"
    ),
    "version": Case(
        torch_archive({"w": W}, DATA, records={"version": b"99"}), "format version", sluice.UnsupportedError
    ),
    "comment": Case(
        build_archive([ArchiveRecord(name=b"a/data.pkl")], comment=b"PK\5\6"), "bytes follow the end of the archive"
    ),
    "end record in a comment": Case(
        build_archive([ArchiveRecord(name=b"a/data.pkl")], comment=build_archive([])),
        "central directory is not at the offset in the end record",
    ),
    "compressed bomb": Case(
        zipped(ArchiveRecord(name=b"a/data.pkl", data=bytes(9), method=8, nbytes=10**9)),
        "is compressed and has more than 100000000 bytes; found 1000000000",
        sluice.LimitError,
    ),
    "trailing bytes": Case(torch_archive({"w": W}, DATA) + bytes(70_000), "bytes follow"),
    "appended archive": Case(2 * torch_archive({"w": W}, DATA), "bytes precede the archive"),
    "million records": Case(
        build_archive([ArchiveRecord(name=b"a/b")], entries=0xFFFF, zip64=False), "central directory"
    ),
    # pickle
    "second pickle": Case(torch_archive(2 * pickled({"w": W}), DATA), "bytes follow the pickle"),
    "huge text": Case(
        torch_archive(b"\x80\x04\x8d" + b"\xff" * 7 + b"\x7f."), "than the pickle holds", sluice.TruncatedError
    ),
    "huge bytes": Case(torch_archive(b"\x80\x02B\xff\xff\xff\xff."), "than the pickle holds", sluice.TruncatedError),
    "memo gap": Case(torch_archive(b"\x80\x02Nr\xff\xff\xff\xff."), "memo index is larger"),
    "underflow": Case(torch_archive(b"\x80\x02R."), "more than the stack"),
    "no mark": Case(torch_archive(b"\x80\x02Nt."), "more than the stack"),
    "recursion": Case(
        torch_archive(b"\x80\x02" + b"]" * 300 + b"a" * 299 + b"."), "depth|deep|nest", sluice.LimitError
    ),
    "colliding keys": Case(
        torch_archive({"w": W, "keys": {number * (2**61 - 1) * 2: 0 for number in range(1, 20)}}, DATA),
        "more than 61 bits",
        sluice.LimitError,
    ),
    "past its storage": Case(
        torch_archive({"w": tensor_call(storage("0", 4), shape=(5,))}, DATA), "past the end of its storage"
    ),
    "negative size": Case(
        torch_archive({"w": tensor_call(storage("0", 4), shape=(-1,), stride=(1,))}, DATA), "not a valid integer"
    ),
    "65 dimensions": Case(
        torch_archive({"w": tensor_call(storage("0", 4), shape=(1,) * 65)}, DATA), "more than 64 dimensions"
    ),
    "too many bytes to count": Case(
        torch_archive({"w": tensor_call(storage("0", 4), shape=(2**62, 4), stride=(0, 0))}, DATA),
        "more bytes than torch can count",
    ),
    "numel that wraps": Case(
        torch_archive({"w": tensor_call(storage("0", 2**62 + 4), shape=(4,))}, DATA), "does not match"
    ),
    # legacy
    "count": Case(legacy_file({"w": LEGACY_W}, {"7": (7, bytes(24))}), "does not match"),
    "huge count": Case(
        legacy_file({"w": tensor_call(legacy_storage("7", 2**40), shape=(4,))}, {"7": (2**40, bytes(24))}),
        "before the end of its last storage",
        sluice.TruncatedError,
    ),
    "no keys": Case(legacy_file({"w": LEGACY_W}, SIX, keys=[]), "does not contain '7'"),
    "legacy tail": Case(legacy_file({"w": LEGACY_W}, SIX, trailing=b"x"), "bytes follow"),
    "tar": Case(tar(member("storages"), member("pickle")), "tar archive", sluice.UnsupportedError),
    "tar upwards": Case(tar(member("pickle"), member("../storages")), "'../storages'", sluice.PathEscapeError),
    "tar absolute": Case(
        tar(member("/etc/x"), member("pickle")), "outside the target directory", sluice.PathEscapeError
    ),
    "tar link": Case(tar(member("pickle", tarfile.SYMTYPE, "/etc/passwd")), "a link, a device or sparse"),
    "tar hard link": Case(tar(member("storages"), member("pickle", tarfile.LNKTYPE, "x")), "a link"),
    "tar device": Case(tar(member("pickle", tarfile.CHRTYPE)), "a link, a device or sparse"),
    "tar sparse": Case(tar(member("storages", tarfile.GNUTYPE_SPARSE)), "a link, a device or sparse"),
    "tar size": Case(huge_member(), "past the end of the file; found 4611686018427387904 bytes"),
    "tar of one name": Case(tar(member("m.bin"), member("./m.bin")), "have the name 'm.bin'"),
    "tar without a checkpoint": Case(tar(member("readme.md")), "holds no recognized checkpoint"),
    "tar garbage": Case(tar(member("a"))[:512] + b"x" * 1024, "a damaged header"),
    # safetensors
    "header of 2^62": Case(safetensors_file({}, length=2**62), "inside its header", sluice.TruncatedError),
    "hole": Case(safetensors_file(field(data_offsets=[4, 20]), bytes(20)), "belong to no tensor"),
    "cut": Case(safetensors_file(field(), bytes(15)), "before the end of its last tensor", sluice.TruncatedError),
    "trailing": Case(safetensors_file(field(), bytes(17)), "bytes follow the last tensor"),
    "bool": Case(safetensors_file(field(shape=[True, 4]), bytes(16)), "not strict JSON"),
    "float": Case(safetensors_file(field(shape=[4.0]), bytes(16)), "not strict JSON"),
    "wrong size": Case(safetensors_file(field(shape=[5]), bytes(16)), "do not match the shape and dtype"),
    "dtype": Case(safetensors_file(field(dtype="F5"), bytes(16)), "unknown dtype", sluice.UnsupportedError),
    "surrogate": Case(
        safetensors_file(b'{"\\ud800":{"dtype":"F32","shape":[4],"data_offsets":[0,16]}}', bytes(16)), "not strict JSON"
    ),
    "deep JSON": Case(safetensors_file(b'{"a":' + b"[" * 5000 + b"]" * 5000 + b"}"), "not strict JSON"),
}


@pytest.mark.parametrize("name", [*CASES, *BAD])
def test_every_verb_names_the_problem_and_its_place(tmp_path: Path, name: str) -> None:
    content, words, kind = (CASES | BAD)[name]
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
    for number, (content, _, _) in enumerate(BAD.values()):
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
