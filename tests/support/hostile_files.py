"""Hostile and unusual files of each format, with the class and part of the text of the error raised on opening."""

from __future__ import annotations

import io
import struct
import tarfile
import zipfile
from typing import NamedTuple

import sluice
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


def header(text: str | bytes, data: bytes = bytes(4)) -> bytes:
    raw = text if isinstance(text, bytes) else text.encode()
    return struct.pack("<Q", len(raw)) + raw + data


def repacked(content: bytes, method: int = zipfile.ZIP_STORED, *, flat: bool = False) -> bytes:
    """Return an archive of the records as other programs write it."""
    made = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(content)) as old, zipfile.ZipFile(made, "w", method) as new:
        for name in old.namelist():
            new.writestr(name.partition("/")[2] if flat else name, old.read(name))
    return made.getvalue()


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


def zipped(record: ArchiveRecord) -> bytes:
    """Return an archive with this record, in place of the one of its name."""
    plain = [
        ArchiveRecord(name=b"a/data.pkl", data=pickled({"w": W})),
        ArchiveRecord(name=b"a/data/0", data=DATA["0"]),
        ArchiveRecord(name=b"a/version", data=b"3\n"),
    ]
    return build_archive({each.name: each for each in (*plain, record)}.values())


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
    "a legacy file before an archive": Case(LEGACY + GOOD, "bytes follow"),
    "an archive's mark before a legacy file": Case(b"PK\3\4" + LEGACY, "end record", sluice.TruncatedError),
    "a form feed as white space": Case(header(f'{{"a":\f{FIELDS}}}'), "not strict JSON"),
    "brackets without end": Case(header('{"a":' + "[" * 1_000_000), "not strict JSON"),
    # archives of other programs
    "deflated by another packer": Case(
        repacked(GOOD, zipfile.ZIP_DEFLATED), "without compression", sluice.UnsupportedError
    ),
    "packed with bzip2": Case(repacked(GOOD, zipfile.ZIP_BZIP2), "method 12", sluice.UnsupportedError),
    "packed without its directory": Case(repacked(GOOD, flat=True), "it was packed again"),
    "an archive in an archive": Case(
        build_archive([ArchiveRecord(name=b"model/pytorch_model.bin", data=GOOD)]),
        "found 'model/pytorch_model.bin'. Unpack it",
    ),
    "two state dicts in one archive": Case(
        build_archive([ArchiveRecord(name=n, data=pickled({})) for n in (b"a/data.pkl", b"b/data.pkl")]),
        "'b/data.pkl' is not a plain path",
    ),
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
    "attributes for a number": Case(program(b"K\1}b"), "passes attributes to an object"),
    "a call of a number": Case(program(b"K\1)R"), "pickle"),
    "a legacy file sent as text": Case(LEGACY.replace(b"\n", b"\r\n"), "in binary mode"),
    "a size in other digits": Case(shape_of("[\u0661]"), "not strict JSON"),
    "names in single quotes": Case(header(f"{{'a':{FIELDS}}}"), "looks like safetensors"),
    "fields in capitals": Case(header(f'{{"a":{FIELDS.upper()}}}'), "lacks a field"),
    "a dtype of torch": Case(
        header(f'{{"a":{FIELDS.replace("F32", "torch.float32")}}}'), "expected BF16, BOOL", sluice.UnsupportedError
    ),
    "a header that was never written": Case(header(f'{{"a":{FIELDS}')[:30] + bytes(80), "not strict JSON"),
    # names, sizes and counts that lie
    "compressed": Case(
        zipped(ArchiveRecord(name=b"a/data/0", data=bytes(9), method=8)), "compressed", sluice.UnsupportedError
    ),
    "other local name": Case(
        zipped(ArchiveRecord(name=b"a/data/0", data=DATA["0"], local_name=b"a/data/1")),
        "does not match the central directory",
    ),
    "upwards": Case(zipped(ArchiveRecord(name=b"a/../x", data=b"")), "not a plain path"),
    "long record": Case(torch_archive({"w": W}, {"0": bytes(17)}), "does not match"),
    "no pickle": Case(torch_archive({"w": W}, DATA, records={"data.pkl": None}), "no data.pkl"),
    "compressed bomb": Case(
        zipped(ArchiveRecord(name=b"a/data.pkl", data=bytes(9), method=8, nbytes=10**9)),
        "is compressed and has more than 100000000 bytes; found 1000000000",
        sluice.LimitError,
    ),
    "recursion": Case(
        torch_archive(b"\x80\x02" + b"]" * 300 + b"a" * 299 + b"."), "depth|deep|nest", sluice.LimitError
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
    "cut": Case(header(f'{{"a":{FIELDS}}}', bytes(3)), "before the end of its last tensor", sluice.TruncatedError),
    "bool": Case(shape_of("[true]"), "not strict JSON"),
    "wrong size": Case(shape_of("[5]"), "do not match the shape and dtype"),
    "surrogate": Case(header(f'{{"\\ud800":{FIELDS}}}'), "not strict JSON"),
    # tar archives
    "tar upwards": Case(tar(member("pickle"), member("../storages")), "'../storages'", sluice.PathEscapeError),
    "tar hard link": Case(tar(member("storages"), member("pickle", tarfile.LNKTYPE, "x")), "a link"),
    "tar device": Case(tar(member("pickle", tarfile.CHRTYPE)), "a link, a device or sparse"),
    "tar sparse": Case(tar(member("storages", tarfile.GNUTYPE_SPARSE)), "a link, a device or sparse"),
    "tar size": Case(huge_member(), "past the end of the file; found 4611686018427387904 bytes"),
    "tar of one name": Case(tar(member("m.bin"), member("./m.bin")), "have the name 'm.bin'"),
}
