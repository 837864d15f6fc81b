"""Further hostile files of each family: each gives one typed error at opening, with words that say what is wrong."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import pytest

import sluice
from sluice.testing._archives import Call, Global, Raw, storage, tensor_call, torch_archive
from sluice.testing._legacy_file import legacy_file, legacy_storage

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


ORDERED = b"ccollections\nOrderedDict\n"
CASES: dict[str, tuple[bytes, type[sluice.SluiceError], str]] = {
    "records that differ in case": (with_record("DATA.PKL"), sluice.FormatError, "two records"),
    "a directory as record": (with_record("dir/"), sluice.FormatError, "no plain path"),
    "a record named dot": (with_record("."), sluice.FormatError, "no plain path"),
    "a double slash": (with_record("a//b"), sluice.FormatError, "no plain path"),
    "a long record name": (with_record("a" * 60_000), sluice.LimitError, "longer than"),
    "a version of many digits": (with_record("version", b"9" * 5000), sluice.LimitError, "more than 64 bytes"),
    "a version in other digits": (with_record("version", "\u0663".encode()), sluice.FormatError, "unknown version"),
    "a byte order with a line break": (with_record("byteorder", b"little\n"), sluice.FormatError, "byte order"),
    "an alignment in superscript": (with_record(".storage_alignment", "\u00b2".encode()), sluice.FormatError, "align"),
    "two archives": (GOOD + GOOD, sluice.FormatError, "central directory"),
    "an offset without its zip64 field": (directory_entry(42, b"\xff" * 4), sluice.FormatError, "no zip64 field"),
    "a name beyond the directory": (directory_entry(28, b"\xff\xff"), sluice.FormatError, "damaged"),
    "an extra field beyond it": (directory_entry(30, b"\xff\xff"), sluice.FormatError, "damaged"),
    "an entry on another disk": (directory_entry(34, b"\1\0"), sluice.FormatError, "damaged"),
    "a dict in itself": (program(b"}q\0X\1\0\0\0ah\0s"), sluice.UnsupportedError, "holds itself"),
    "a list in its own tuple": (program(b"]q\0h\0\x85a"), sluice.UnsupportedError, "holds itself"),
    "versions that hold the state dict": (
        program(ORDERED + b")Rq\0}X\x09\0\0\0_metadatah\0sb"),
        sluice.UnsupportedError,
        "holds itself",
    ),
    "an id that is a number": (program(b"K\1Q"), sluice.FormatError, "persistent id"),
    "an id as a line of text": (program(b"Pabc\n"), sluice.UnsafeContentError, "PERSID"),
    "an integer of negative length": (program(b"\x8b\xff\xff\xff\xff"), sluice.LimitError, "integer of -1"),
    "a surrogate in UTF-8": (program(b"}X\3\0\0\0\xed\xa0\x80Ns"), sluice.FormatError, "not UTF-8"),
    "a size that is a bool": (
        torch_archive({"w": tensor_call(storage("0", 12), shape=(True, 4))}, DATA),
        sluice.FormatError,
        "no valid integer",
    ),
    "a device of another number": (
        torch_archive({"w": W, "d": Call(Global("torch", "device"), ("cuda", 10**30))}, DATA),
        sluice.FormatError,
        "torch.device",
    ),
    "a legacy file before an archive": (LEGACY + GOOD, sluice.FormatError, "bytes follow"),
    "an archive's mark before a legacy file": (b"PK\3\4" + LEGACY, sluice.TruncatedError, "end record"),
    "a name given twice by an escape": (
        header(f'{{"a":{FIELDS},"\\u0061":{FIELDS.replace("0,4", "4,8")}}}', bytes(8)),
        sluice.FormatError,
        "given twice",
    ),
    "a negative zero": (header(f'{{"a":{FIELDS.replace("0,4", "-0,4")}}}'), sluice.FormatError, "neither"),
    "a form feed as white space": (header(f'{{"a":\f{FIELDS}}}'), sluice.FormatError, "neither"),
    "overlong UTF-8": (header(b'{"\xc0\x80":' + FIELDS.encode() + b"}"), sluice.FormatError, "not valid JSON"),
    "nothing times 2**63": (
        header('{"a":{"dtype":"F32","shape":[0,9223372036854775807,4],"data_offsets":[0,0]}}', b""),
        sluice.FormatError,
        "larger than torch",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_further_files(tmp_path: Path, case: str) -> None:
    content, kind, words = CASES[case]
    (tmp_path / "f").write_bytes(content)
    with pytest.raises(kind, match=words) as caught:
        sluice.open(tmp_path / "f")
    assert type(caught.value) is kind
    assert caught.value.file == str(tmp_path / "f")


@pytest.mark.parametrize("name", [".", "./m.safetensors", "m.safetensors/", "x\0y", "C:x", "m.safetensors/../m", ""])
def test_further_names_of_shards(tmp_path: Path, name: str) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": name}}))
    with pytest.raises(sluice.PathEscapeError, match="no plain path"):
        sluice.open(tmp_path)
