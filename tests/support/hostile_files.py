"""Hostile and unusual files of each format, with the class and part of the text of the error raised on opening."""

from __future__ import annotations

import io
import struct
import zipfile
from typing import NamedTuple

import sluice
from support.hostile_archives import (
    ArchiveRecord,
    Call,
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


W = tensor_call(storage("0", 12), shape=(3, 4))
DATA = {"0": bytes(48)}
GOOD = torch_archive({"w": W}, DATA)
LEGACY = legacy_file({"w": tensor_call(legacy_storage("7", 6), shape=(6,))}, {"7": (6, bytes(24))})
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


ORDERED = b"ccollections\nOrderedDict\n"
CASES: dict[str, Case] = {
    "a version of many digits": Case(with_record("version", b"9" * 5000), "more than 64 bytes", sluice.LimitError),
    "a version in other digits": Case(with_record("version", "\u0663".encode()), "not a number"),
    "a byte order with a line break": Case(
        with_record("byteorder", b"little\n"), "byte order", sluice.UnsupportedError
    ),
    "an alignment in superscript": Case(with_record(".storage_alignment", "\u00b2".encode()), "align"),
    "an offset without its zip64 field": Case(directory_entry(42, b"\xff" * 4), "no zip64 field"),
    "a name beyond the directory": Case(directory_entry(28, b"\xff\xff"), "damaged"),
    "an extra field beyond it": Case(directory_entry(30, b"\xff\xff"), "damaged"),
    "an entry on another disk": Case(directory_entry(34, b"\1\0"), "damaged"),
    "a dict in itself": Case(program(b"}q\0X\1\0\0\0ah\0s"), "contains itself", sluice.UnsupportedError),
    "a list in its own tuple": Case(program(b"]q\0h\0\x85a"), "contains itself", sluice.UnsupportedError),
    "versions that hold the state dict": Case(
        program(ORDERED + b")Rq\0}X\x09\0\0\0_metadatah\0sb"), "contains itself", sluice.UnsupportedError
    ),
    "an id as a line of text": Case(program(b"Pabc\n"), "PERSID", sluice.UnsupportedError),
    "an integer of negative length": Case(
        program(b"\x8b\xff\xff\xff\xff"), "out of range: -1 bytes", sluice.LimitError
    ),
    "a size that is a bool": Case(
        torch_archive({"w": tensor_call(storage("0", 12), shape=(True, 4))}, DATA), "not a valid integer"
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
    # pickles
    "a set of tensors": Case(
        program(b"\x8f(" + encode(W) + b"\x90"), "unsupported type Entry", sluice.UnsupportedError
    ),
    "a frozenset of lists": Case(program(b"(]\x91"), "unsupported type list", sluice.UnsupportedError),
    "a tensor as key": Case(program(b"}" + encode(W) + b"Ns"), "unsupported type Entry", sluice.UnsupportedError),
    "an id that is a list": Case(
        program(encode(["storage", Global("torch", "FloatStorage"), "0", "cpu", 12]) + b"Q"), "persistent id"
    ),
    "an ordered dict of no pairs": Case(program(ORDERED + b"](K\1K\2e\x85R"), "pairs of key and value"),
    "protocol 0": Case(torch_archive(b"(dp0\n."), "opcode DICT of protocol 0", sluice.UnsupportedError),
    "elements for a tensor": Case(program(encode(W) + b"K\1a"), "passes elements to an object"),
    "attributes for a number": Case(program(b"K\1}b"), "passes attributes to an object"),
    "a call of a number": Case(program(b"K\1)R"), "pickle"),
    # legacy files
    "storages in another order": Case(
        legacy_file(
            {
                "a": tensor_call(legacy_storage("1", 2), shape=(2,)),
                "b": tensor_call(legacy_storage("2", 3), shape=(3,)),
            },
            {"2": (2, bytes(8)), "1": (3, bytes(12))},
        ),
        "size of storage '2' does not match",
    ),
    "code in the system information": Case(
        legacy_file({"w": 1}, system={"little_endian": True, "x": Call(Global("os", "system"), ("x",))}),
        "names os.system outside its object",
        sluice.UnsafeContentError,
    ),
    "a legacy file sent as text": Case(LEGACY.replace(b"\n", b"\r\n"), "in binary mode"),
    # safetensors files
    "a size in hexadecimal": Case(shape_of("[0x1]"), "not strict JSON"),
    "a size in other digits": Case(shape_of("[\u0661]"), "not strict JSON"),
    "half an escape": Case(header(f'{{"\\u12":{FIELDS}}}'), "not strict JSON"),
    "names in single quotes": Case(header(f"{{'a':{FIELDS}}}"), "looks like safetensors"),
    "a comment in the header": Case(header(f'{{"a":/**/{FIELDS}}}'), "not strict JSON"),
    "fields in capitals": Case(header(f'{{"a":{FIELDS.upper()}}}'), "lacks a field"),
    "a dtype of torch": Case(
        header(f'{{"a":{FIELDS.replace("F32", "torch.float32")}}}'), "expected BF16, BOOL", sluice.UnsupportedError
    ),
    "a header that was never written": Case(header(f'{{"a":{FIELDS}')[:30] + bytes(80), "not strict JSON"),
}
