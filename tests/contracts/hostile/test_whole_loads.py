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
from support.hostile_files import CASES
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


BAD: dict[str, tuple[bytes, type[sluice.SluiceError], str]] = {
    # zip
    "duplicate record": (
        build_archive([ArchiveRecord(name=b"a/data.pkl", data=pickled({}))] * 2),
        sluice.FormatError,
        "two records have the name",
    ),
    "compressed": (
        zipped(ArchiveRecord(name=b"a/data/0", data=bytes(9), method=8)),
        sluice.UnsupportedError,
        "compressed",
    ),
    "encrypted": (
        zipped(ArchiveRecord(name=b"a/data/0", data=bytes(16), flags=1)),
        sluice.UnsupportedError,
        "encrypted",
    ),
    "other local name": (
        zipped(ArchiveRecord(name=b"a/data/0", data=bytes(16), local_name=b"a/data/1")),
        sluice.FormatError,
        "does not match the central directory",
    ),
    "upwards": (zipped(ArchiveRecord(name=b"a/../x", data=b"")), sluice.FormatError, "not a plain path"),
    "absolute": (zipped(ArchiveRecord(name=b"/x", data=b"")), sluice.FormatError, "not a plain path"),
    "backslash": (zipped(ArchiveRecord(name=b"a/x\\y", data=b"")), sluice.FormatError, "not a plain path"),
    "NUL": (zipped(ArchiveRecord(name=b"a/x\0", data=b"")), sluice.FormatError, "not a plain path"),
    "two directories": (zipped(ArchiveRecord(name=b"b/x", data=b"")), sluice.FormatError, "not a plain path"),
    "short record": (torch_archive({"w": W}, {"0": bytes(15)}), sluice.FormatError, "does not match"),
    "long record": (torch_archive({"w": W}, {"0": bytes(17)}), sluice.FormatError, "does not match"),
    "no record": (torch_archive({"w": W}, {}), sluice.FormatError, "no record for storage '0'"),
    "no pickle": (torch_archive({"w": W}, DATA, records={"data.pkl": None}), sluice.FormatError, "no data.pkl"),
    "program": (torch_archive({"w": W}, DATA, records={"constants.pkl": b""}), sluice.FormatError, "not hold a module"),
    "program bomb": (
        zipped(ArchiveRecord(name=b"a/constants.pkl"), ArchiveRecord(name=b"a/code/x.py", method=8, nbytes=2**31)),
        sluice.CheckpointError,
        "not hold a module|more than 100000000 bytes",
    ),
    "exported program": (
        torch_archive({}, records={"archive_format": b"pt2", "data/weights/m_weights_config.json": b"{}"}),
        sluice.FormatError,
        "not strict JSON",
    ),
    "byte order": (
        torch_archive({"w": W}, DATA, records={"byteorder": b"middle"}),
        sluice.UnsupportedError,
        "byte order",
    ),
    "alignment": (
        torch_archive({"w": W}, DATA, records={".storage_alignment": b"1e9"}),
        sluice.FormatError,
        "invalid storage alignment",
    ),
    "version": (torch_archive({"w": W}, DATA, records={"version": b"99"}), sluice.UnsupportedError, "format version"),
    "comment": (
        build_archive([ArchiveRecord(name=b"a/data.pkl")], comment=b"PK\5\6"),
        sluice.FormatError,
        "bytes follow the end of the archive",
    ),
    "end record in a comment": (
        build_archive([ArchiveRecord(name=b"a/data.pkl")], comment=build_archive([])),
        sluice.FormatError,
        "central directory is not at the offset in the end record",
    ),
    "compressed bomb": (
        zipped(ArchiveRecord(name=b"a/data.pkl", data=bytes(9), method=8, nbytes=10**9)),
        sluice.LimitError,
        "is compressed and has more than 100000000 bytes; found 1000000000",
    ),
    "trailing bytes": (torch_archive({"w": W}, DATA) + bytes(70_000), sluice.FormatError, "bytes follow"),
    "appended archive": (2 * torch_archive({"w": W}, DATA), sluice.FormatError, "bytes precede the archive"),
    "million records": (
        build_archive([ArchiveRecord(name=b"a/b")], entries=0xFFFF, zip64=False),
        sluice.FormatError,
        "central directory",
    ),
    # pickle
    "second pickle": (torch_archive(2 * pickled({"w": W}), DATA), sluice.FormatError, "bytes follow the pickle"),
    "huge text": (
        torch_archive(b"\x80\x04\x8d" + b"\xff" * 7 + b"\x7f."),
        sluice.TruncatedError,
        "than the pickle holds",
    ),
    "huge bytes": (torch_archive(b"\x80\x02B\xff\xff\xff\xff."), sluice.TruncatedError, "than the pickle holds"),
    "memo gap": (torch_archive(b"\x80\x02Nr\xff\xff\xff\xff."), sluice.FormatError, "memo index is larger"),
    "underflow": (torch_archive(b"\x80\x02R."), sluice.FormatError, "more than the stack"),
    "no mark": (torch_archive(b"\x80\x02Nt."), sluice.FormatError, "more than the stack"),
    "recursion": (torch_archive(b"\x80\x02" + b"]" * 300 + b"a" * 299 + b"."), sluice.LimitError, "depth|deep|nest"),
    "colliding keys": (
        torch_archive({"w": W, "keys": {number * (2**61 - 1) * 2: 0 for number in range(1, 20)}}, DATA),
        sluice.LimitError,
        "more than 61 bits",
    ),
    "past its storage": (
        torch_archive({"w": tensor_call(storage("0", 4), shape=(5,))}, DATA),
        sluice.FormatError,
        "past the end of its storage",
    ),
    "negative size": (
        torch_archive({"w": tensor_call(storage("0", 4), shape=(-1,), stride=(1,))}, DATA),
        sluice.FormatError,
        "not a valid integer",
    ),
    "65 dimensions": (
        torch_archive({"w": tensor_call(storage("0", 4), shape=(1,) * 65)}, DATA),
        sluice.FormatError,
        "more than 64 dimensions",
    ),
    "too many bytes to count": (
        torch_archive({"w": tensor_call(storage("0", 4), shape=(2**62, 4), stride=(0, 0))}, DATA),
        sluice.FormatError,
        "more bytes than torch can count",
    ),
    "numel that wraps": (
        torch_archive({"w": tensor_call(storage("0", 2**62 + 4), shape=(4,))}, DATA),
        sluice.FormatError,
        "does not match",
    ),
    # legacy
    "count": (legacy_file({"w": LEGACY_W}, {"7": (7, bytes(24))}), sluice.FormatError, "does not match"),
    "huge count": (
        legacy_file({"w": tensor_call(legacy_storage("7", 2**40), shape=(4,))}, {"7": (2**40, bytes(24))}),
        sluice.TruncatedError,
        "before the end of its last storage",
    ),
    "no keys": (legacy_file({"w": LEGACY_W}, SIX, keys=[]), sluice.FormatError, "does not contain '7'"),
    "legacy tail": (legacy_file({"w": LEGACY_W}, SIX, trailing=b"x"), sluice.FormatError, "bytes follow"),
    "tar": (tar(member("storages"), member("pickle")), sluice.UnsupportedError, "tar archive"),
    "tar upwards": (tar(member("pickle"), member("../storages")), sluice.PathEscapeError, "'../storages'"),
    "tar absolute": (tar(member("/etc/x"), member("pickle")), sluice.PathEscapeError, "outside the target directory"),
    "tar link": (
        tar(member("pickle", tarfile.SYMTYPE, "/etc/passwd")),
        sluice.FormatError,
        "a link, a device or sparse",
    ),
    "tar hard link": (tar(member("storages"), member("pickle", tarfile.LNKTYPE, "x")), sluice.FormatError, "a link"),
    "tar device": (tar(member("pickle", tarfile.CHRTYPE)), sluice.FormatError, "a link, a device or sparse"),
    "tar sparse": (tar(member("storages", tarfile.GNUTYPE_SPARSE)), sluice.FormatError, "a link, a device or sparse"),
    "tar size": (huge_member(), sluice.FormatError, "past the end of the file; found 4611686018427387904 bytes"),
    "tar of one name": (
        tar(member("m.bin"), member("./m.bin")),
        sluice.FormatError,
        "have the name 'm.bin'",
    ),
    "tar without a checkpoint": (tar(member("readme.md")), sluice.FormatError, "holds no recognized checkpoint"),
    "tar garbage": (tar(member("a"))[:512] + b"x" * 1024, sluice.FormatError, "a damaged header"),
    # safetensors
    "header of 2^62": (safetensors_file({}, length=2**62), sluice.TruncatedError, "inside its header"),
    "hole": (safetensors_file(field(data_offsets=[4, 20]), bytes(20)), sluice.FormatError, "belong to no tensor"),
    "cut": (safetensors_file(field(), bytes(15)), sluice.TruncatedError, "before the end of its last tensor"),
    "trailing": (safetensors_file(field(), bytes(17)), sluice.FormatError, "bytes follow the last tensor"),
    "bool": (safetensors_file(field(shape=[True, 4]), bytes(16)), sluice.FormatError, "not strict JSON"),
    "float": (safetensors_file(field(shape=[4.0]), bytes(16)), sluice.FormatError, "not strict JSON"),
    "wrong size": (
        safetensors_file(field(shape=[5]), bytes(16)),
        sluice.FormatError,
        "do not match the shape and dtype",
    ),
    "dtype": (safetensors_file(field(dtype="F5"), bytes(16)), sluice.UnsupportedError, "unknown dtype"),
    "surrogate": (
        safetensors_file(b'{"\\ud800":{"dtype":"F32","shape":[4],"data_offsets":[0,16]}}', bytes(16)),
        sluice.FormatError,
        "not strict JSON",
    ),
    "deep JSON": (
        safetensors_file(b'{"a":' + b"[" * 5000 + b"]" * 5000 + b"}"),
        sluice.FormatError,
        "not strict JSON",
    ),
}


@pytest.mark.parametrize("name", [*CASES, *BAD])
def test_every_verb_names_the_problem_and_its_place(tmp_path: Path, name: str) -> None:
    content, kind, words = (CASES | BAD)[name]
    path = tmp_path / "f"
    path.write_bytes(content)
    before = set(tmp_path.iterdir())
    for load in verbs(path).values():
        with at_most(2_000_000), pytest.raises(kind, match=words) as caught:
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
