"""Hostile and unusual files of each format, with the class and part of the text of the error raised on opening."""

from __future__ import annotations

import io
import struct
import zipfile

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


def subclass(inner: object) -> Call:
    """Return the call that rebuilds a tensor with attributes from these arguments."""
    function = Global("torch._utils", "_rebuild_tensor_v2")
    arguments: tuple[object, ...] = (function, Global("torch", "Tensor"), inner, {})
    return Call(Global("torch._tensor", "_rebuild_from_type_v2"), arguments)


ORDERED = b"ccollections\nOrderedDict\n"
CASES: dict[str, tuple[bytes, type[sluice.SluiceError], str]] = {
    "a version of many digits": (with_record("version", b"9" * 5000), sluice.LimitError, "more than 64 bytes"),
    "a version in other digits": (
        with_record("version", "\u0663".encode()),
        sluice.FormatError,
        "not a number",
    ),
    "a byte order with a line break": (with_record("byteorder", b"little\n"), sluice.UnsupportedError, "byte order"),
    "an alignment in superscript": (with_record(".storage_alignment", "\u00b2".encode()), sluice.FormatError, "align"),
    "an offset without its zip64 field": (directory_entry(42, b"\xff" * 4), sluice.FormatError, "no zip64 field"),
    "a name beyond the directory": (directory_entry(28, b"\xff\xff"), sluice.FormatError, "damaged"),
    "an extra field beyond it": (directory_entry(30, b"\xff\xff"), sluice.FormatError, "damaged"),
    "an entry on another disk": (directory_entry(34, b"\1\0"), sluice.FormatError, "damaged"),
    "a dict in itself": (program(b"}q\0X\1\0\0\0ah\0s"), sluice.UnsupportedError, "contains itself"),
    "a list in its own tuple": (program(b"]q\0h\0\x85a"), sluice.UnsupportedError, "contains itself"),
    "versions that hold the state dict": (
        program(ORDERED + b")Rq\0}X\x09\0\0\0_metadatah\0sb"),
        sluice.UnsupportedError,
        "contains itself",
    ),
    "an id as a line of text": (program(b"Pabc\n"), sluice.UnsupportedError, "PERSID"),
    "an integer of negative length": (program(b"\x8b\xff\xff\xff\xff"), sluice.LimitError, "out of range: -1 bytes"),
    "a size that is a bool": (
        torch_archive({"w": tensor_call(storage("0", 12), shape=(True, 4))}, DATA),
        sluice.FormatError,
        "not a valid integer",
    ),
    "a device with a different number": (
        torch_archive({"w": W, "d": Call(Global("torch", "device"), ("cuda", 10**30))}, DATA),
        sluice.FormatError,
        "torch.device",
    ),
    "a legacy file before an archive": (LEGACY + GOOD, sluice.FormatError, "bytes follow"),
    "an archive's mark before a legacy file": (b"PK\3\4" + LEGACY, sluice.TruncatedError, "end record"),
    "a form feed as white space": (header(f'{{"a":\f{FIELDS}}}'), sluice.FormatError, "not strict JSON"),
    # archives of other programs
    "deflated by another packer": (
        repacked(GOOD, zipfile.ZIP_DEFLATED),
        sluice.UnsupportedError,
        "without compression",
    ),
    "packed with bzip2": (repacked(GOOD, zipfile.ZIP_BZIP2), sluice.UnsupportedError, "method 12"),
    "packed without its directory": (repacked(GOOD, flat=True), sluice.FormatError, "it was packed again"),
    "an archive in an archive": (
        build_archive([ArchiveRecord(name=b"model/pytorch_model.bin", data=GOOD)]),
        sluice.FormatError,
        "found 'model/pytorch_model.bin'. Unpack it",
    ),
    "two state dicts in one archive": (
        build_archive([ArchiveRecord(name=n, data=pickled({})) for n in (b"a/data.pkl", b"b/data.pkl")]),
        sluice.FormatError,
        "'b/data.pkl' is not a plain path",
    ),
    "a program before an archive": (
        b"#!/bin/sh\nexit\0" + GOOD,
        sluice.FormatError,
        "not a recognized checkpoint format",
    ),
    "an archive sent as text": (GOOD.replace(b"\n", b"\r\n"), sluice.FormatError, "end record"),
    "an archive as latin-1 in UTF-8": (GOOD.decode("latin1").encode(), sluice.FormatError, "bytes follow the end"),
    "zip64 sizes that differ": (zip64_entry(2, 3), sluice.FormatError, "two different sizes"),
    "zip64 sizes of nothing": (zip64_entry(), sluice.FormatError, "no zip64 field"),
    "one zip64 size of two": (zip64_entry(2), sluice.FormatError, "no zip64 field"),
    "zip64 sizes beyond their field": (zip64_entry(2, 2, declared=99), sluice.FormatError, "no zip64 field"),
    "zip64 sizes of 2**63": (zip64_entry(2**63, 2**63), sluice.FormatError, "does not end at"),
    # pickles
    "a set of tensors": (program(b"\x8f(" + encode(W) + b"\x90"), sluice.UnsupportedError, "unsupported type Entry"),
    "a frozenset of lists": (program(b"(]\x91"), sluice.UnsupportedError, "unsupported type list"),
    "a tensor as key": (program(b"}" + encode(W) + b"Ns"), sluice.UnsupportedError, "unsupported type Entry"),
    "a parameter of a number": (
        torch_archive(
            {
                "w": Call(
                    Global("torch._utils", "_rebuild_parameter"), (3, True, Call(Global("collections", "OrderedDict")))
                )
            }
        ),
        sluice.FormatError,
        "the data of a parameter is not a tensor",
    ),
    "a tensor with attributes of bad arguments": (
        torch_archive({"w": subclass((1, 2))}, DATA),
        sluice.FormatError,
        "wrong number of arguments",
    ),
    "an id that is a list": (
        program(encode(["storage", Global("torch", "FloatStorage"), "0", "cpu", 12]) + b"Q"),
        sluice.FormatError,
        "persistent id",
    ),
    "an ordered dict of no pairs": (program(ORDERED + b"](K\1K\2e\x85R"), sluice.FormatError, "pairs of key and value"),
    "a size of text": (torch_archive({"s": Call(Global("torch", "Size"), (["a"],))}), sluice.FormatError, "torch.Size"),
    "protocol 0": (torch_archive(b"(dp0\n."), sluice.UnsupportedError, "opcode DICT of protocol 0"),
    "elements for a tensor": (program(encode(W) + b"K\1a"), sluice.FormatError, "passes elements to an object"),
    "attributes for a number": (program(b"K\1}b"), sluice.FormatError, "passes attributes to an object"),
    "a call of a number": (program(b"K\1)R"), sluice.FormatError, "pickle"),
    # legacy files
    "storages in another order": (
        legacy_file(
            {
                "a": tensor_call(legacy_storage("1", 2), shape=(2,)),
                "b": tensor_call(legacy_storage("2", 3), shape=(3,)),
            },
            {"2": (2, bytes(8)), "1": (3, bytes(12))},
        ),
        sluice.FormatError,
        "size of storage '2' does not match",
    ),
    "code in the system information": (
        legacy_file({"w": 1}, system={"little_endian": True, "x": Call(Global("os", "system"), ("x",))}),
        sluice.UnsafeContentError,
        "names os.system outside its object",
    ),
    "a legacy file sent as text": (LEGACY.replace(b"\n", b"\r\n"), sluice.FormatError, "in binary mode"),
    # safetensors files
    "a size in hexadecimal": (shape_of("[0x1]"), sluice.FormatError, "not strict JSON"),
    "a size in other digits": (shape_of("[\u0661]"), sluice.FormatError, "not strict JSON"),
    "half an escape": (header(f'{{"\\u12":{FIELDS}}}'), sluice.FormatError, "not strict JSON"),
    "names in single quotes": (header(f"{{'a':{FIELDS}}}"), sluice.FormatError, "looks like safetensors"),
    "a comment in the header": (header(f'{{"a":/**/{FIELDS}}}'), sluice.FormatError, "not strict JSON"),
    "fields in capitals": (header(f'{{"a":{FIELDS.upper()}}}'), sluice.FormatError, "lacks a field"),
    "a dtype of torch": (
        header(f'{{"a":{FIELDS.replace("F32", "torch.float32")}}}'),
        sluice.UnsupportedError,
        "expected BF16, BOOL",
    ),
    "a header that was never written": (
        header(f'{{"a":{FIELDS}')[:30] + bytes(80),
        sluice.FormatError,
        "not strict JSON",
    ),
}


# Small files that declare large objects

LEAVES = {"tensors": encode(W), "numbers": b"K\1", "nothing": b"]", "objects": b"cfoo\nbar\n"}


def doubled(leaf: bytes, levels: int, kind: str, key: str = "a") -> bytes:
    """Return a pickle of nested containers, each with the previous one twice: 2**levels paths."""
    body = b"X" + struct.pack("<I", len(key)) + key.encode() + b"q\0" + leaf + b"q\1"
    for level in range(levels):
        inner = b"h" + bytes([level + 1])
        body += {
            "list": b"](" + 2 * inner + b"e",
            "tuple": b"(" + 2 * inner + b"t",
            "dict": b"}(h\0" + inner + b"X\1\0\0\0b" + inner + b"u",
        }[kind]
        body += b"q" + bytes([level + 2])
    return b"\x80\x02(" + body + b"t."


#: Files of about a kilobyte, each of which exceeds a limit.
BOMBS: dict[str, bytes] = {
    f"{leaf} in 2**{levels} {kind}s": torch_archive(doubled(opcodes, levels, kind), DATA)
    for leaf, opcodes in LEAVES.items()
    for kind in ("list", "tuple", "dict")
    for levels in (18, 23, 40)
}
BOMBS["tensors with long names"] = torch_archive(doubled(LEAVES["tensors"], 16, "dict", key="k" * 300), DATA)
