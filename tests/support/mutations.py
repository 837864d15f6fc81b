"""Mutated checkpoint files: seeded generators, and comparison with the reference libraries.

``judge_torch`` and ``judge_safetensors`` compare the result for a file with the reference, and return the verdict:

- ``same``: both accept it, with the same result, bit for bit.
- ``refused``: both refuse it.
- ``stricter``: sluice refuses what the reference accepts.
- ``inert``: sluice accepts it with a placeholder for an object that it never builds, or notes the parts that it
  drops; the tensors are not compared, because the reference either refuses the file or builds the object.
- ``beyond``: sluice accepts what the reference refuses: opcodes of protocols 3 to 5.

Everything else is an ``AssertionError``.
"""

from __future__ import annotations

import io
import pickle
import random
import re
import struct
import tempfile
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import safetensors.torch
import torch

from sluice._dtypes import torch_dtype
from sluice._errors import CheckpointError
from sluice.entries import tree as _tree
from sluice.records import Entry, Index
from sluice.sources.protocol import Source
from support.hostile_archives import (
    ArchiveRecord,
    build_archive,
    legacy_file,
    legacy_storage,
    storage,
    tensor_call,
    torch_archive,
)
from support.oracles import bits, loaded, located, same
from support.torch_files import records_of, saved

# Files to start from


def _saved(protocol: int, *, legacy: bool = False) -> bytes:
    base = torch.arange(12.0).reshape(3, 4)
    value = OrderedDict(
        base=base,
        view=base[1:, ::2],
        short=torch.arange(5, dtype=torch.int16),
        parameter=torch.nn.Parameter(torch.ones(2)),
        empty=torch.empty(0, 3),
        plain={"step": 3, "list": [1.5, None, "text"], "tuple": (True, b"x")},
        tied=base,
    )
    return saved(value, protocol, legacy=legacy)


#: Small files of each format.
SMALL: dict[str, Callable[[], bytes]] = {
    "zip": lambda: torch_archive(
        {"a": tensor_call(storage("0", 6), shape=(2, 3)), "n": [1, None, "x"]}, {"0": struct.pack("<6f", *range(6))}
    ),
    "zip of torch": lambda: saved({"a": torch.arange(3.0), "b": torch.ones(2, dtype=torch.int16)}),
    "legacy": lambda: legacy_file(
        {
            "w": tensor_call(legacy_storage("7", 6), shape=(6,)),
            "v": tensor_call(legacy_storage("7", 6), shape=(2, 2), offset=2),
        },
        {"7": (6, bytes(24))},
    ),
    "safetensors": lambda: safetensors.torch.save(
        {"a": torch.arange(3.0), "\u00e9": torch.ones(2, dtype=torch.int16)}, {"k": "v\n"}
    ),
}


# Mutations


def edit(content: bytes, choose: random.Random, first: int = 0, last: int | None = None) -> bytes:
    """Return the bytes with one to three changes: changed, deleted or duplicated bytes."""
    changed = bytearray(content)
    for _ in range(choose.choice([1, 1, 1, 2, 3])):
        end = len(changed) if last is None else min(last, len(changed))
        position, other = choose.randrange(first, end), choose.randrange(first, end)
        length = choose.choice([1, 1, 2, 4, 8, 20])
        kept = choose.choice([0, length, length])
        bit = changed[position] ^ (1 << choose.randrange(8))
        new = choose.choice(
            [b"", bytes([bit]), bytes([choose.choice([0, 255])]), bytes(changed[other : other + length])]
        )
        if kept == length:
            new = (new * length)[:length] or bytes(length)
        changed[position : position + kept] = new
    return bytes(changed)


def _edit_record(content: bytes, choose: random.Random) -> bytes:
    """Change the pickle of an archive and write a valid archive around it, so that the change is parsed."""
    records = records_of(content)
    name = next(name for name in records if name.endswith("data.pkl"))
    records[name] = edit(records[name], choose)
    if choose.random() < 0.1:
        other = choose.choice(list(records))
        records[other] = edit(records[other], choose) if records[other] else b"x"
    made = [
        ArchiveRecord(name=name.encode(), data=data, crc=choose.choice([None, 0]) if data else 0)
        for name, data in records.items()
    ]
    return build_archive(made, zip64=choose.random() < 0.2)


def zips(count: int, seed: int) -> Iterator[bytes]:
    """Yield mutated zip files: half with a changed pickle, a quarter changed at their end, a quarter anywhere."""
    choose, small = random.Random(seed), SMALL["zip"]()
    records = [ArchiveRecord(name=name.encode(), data=data) for name, data in records_of(small).items()]
    bases = [_saved(2), _saved(2), small, build_archive(records, zip64=True)]
    for number in range(count):
        content = choose.choice(bases)
        if number % 2:
            yield _edit_record(content, choose)
        elif number % 4:
            yield edit(content, choose, first=max(0, content.rfind(b"PK\1\2", 0, len(content) // 2 + 1)))
        else:
            yield edit(content, choose)


def legacies(count: int, seed: int) -> Iterator[bytes]:
    """Yield mutated legacy files; few of them have a changed magic number."""
    choose = random.Random(seed)
    bases = [SMALL["legacy"](), *(_saved(protocol, legacy=True) for protocol in (2, 2, 3, 4))]
    for number in range(count):
        yield edit(choose.choice(bases), choose, first=0 if number % 50 == 0 else 15)


_NAMES = ['"a"', '"b"', '"dtype"', '"shape"', '"data_offsets"', '"__metadata__"', '"format"', '"pt"', '""', '"\\u0061"']
_DTYPES = ['"F32"', '"F16"', '"BF16"', '"I64"', '"U8"', '"BOOL"', '"F4"', '"F8_E4M3"', '"C64"', '"F6_E2M3"', '"f32"']
_VALUES = ["0", "1", "2", "4", "8", "16", "24", "-1", "1.0", "1e1", "00", "18446744073709551616", "true", "null", "NaN"]
_SIGNS = ["{", "}", "[", "]", "[]", "{}", ",", ":", " ", "\n", "\t", "\\", "\x00", "\ufeff", "\ud800"]
_TOKENS = [*_NAMES, *_DTYPES, *_VALUES, *_SIGNS]
_SPLIT = re.compile(r'"(?:[^"\\]|\\.)*"|-?[0-9]+|.', re.DOTALL)

_HEADERS = [
    '{"a":{"dtype":"F32","shape":[2,1],"data_offsets":[0,8]},"b":{"dtype":"I64","shape":[],"data_offsets":[8,16]}}',
    '{"__metadata__":{"format":"pt"},"x":{"dtype":"BF16","shape":[4],"data_offsets":[0,8]}}',
    '{"e":{"dtype":"F32","shape":[0,3],"data_offsets":[0,0]},"f":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}',
    '{"q":{"dtype":"F4","shape":[2,4],"data_offsets":[0,4]},"t":{"shape":[1],"dtype":"BOOL","data_offsets":[4,5]}}',
    (
        '{"\\u00e9":{"dtype":"U8","shape":[3],"data_offsets":[0,3]}, '
        '"n" : {"dtype":"F8_E4M3","shape":[1],"data_offsets":[3,4]} }'
    ),
    "{}",
]
_DATA_BYTES = [16, 8, 4, 5, 4, 0]


def headers(count: int, seed: int) -> Iterator[bytes]:
    """Yield safetensors files with mutated headers: tokens changed, deleted or added, bytes, length and data."""
    choose = random.Random(seed)
    for _ in range(count):
        which = choose.randrange(len(_HEADERS))
        data = bytes(index % 2 for index in range(_DATA_BYTES[which]))  # booleans too must be 0 or 1
        kind = choose.random()
        tokens = _SPLIT.findall(_HEADERS[which])
        if kind < 0.75:
            for _ in range(choose.choice([1, 1, 1, 2, 3])):
                position = choose.randrange(len(tokens))
                width = choose.choice([0, 1, 1, 1, 2, 8])
                tokens[position : position + width] = choose.choices(_TOKENS, k=choose.choice([0, 1, 1, 1, 2]))
                tokens = tokens or [" "]
        header = "".join(tokens).encode("utf-8", "surrogatepass")
        if 0.75 <= kind < 0.9:
            header = edit(header, choose)
        length = len(header) + (choose.choice([-2, -1, 1, 2, 2**31, 2**62]) if kind > 0.97 else 0)
        if 0.9 < kind < 0.97:
            data = data[: choose.randrange(len(data) + 1)] + bytes(choose.randrange(3))
        yield struct.pack("<Q", max(0, length)) + header + data


# Comparisons


def _read(content: bytes) -> tuple[Source, Index] | CheckpointError:
    try:
        return located(content)
    except CheckpointError as error:
        return error


def judge_torch(content: bytes) -> str:
    """Compare a zip or legacy file with ``torch.load(weights_only=True)``."""
    ours = _read(content)
    with warnings.catch_warnings(action="ignore"):  # about protocols and experimental dtypes
        try:
            theirs = torch.load(io.BytesIO(content), weights_only=True, map_location="cpu")
            refusal = None
        except Exception as error:  # noqa: BLE001 - it raises any exception of its parts
            theirs, refusal = None, error
    if isinstance(ours, CheckpointError):
        return "refused" if refusal else "stricter"
    source, index = ours
    if index.notes or (isinstance(index.tree, dict) and _tree.opaques(index.tree)):
        return "inert"
    if refusal is not None:
        _check_beyond(content, source, index, refusal)
        return "beyond"
    assert same(loaded(source, index), theirs), content
    return "same"


def _check_beyond(content: bytes, source: Source, index: Index, refusal: Exception) -> None:
    """Check that torch refuses opcodes, and that the result of its unrestricted loader is equal."""
    assert "Unsupported operand" in str(refusal), f"accepted what torch refuses with {refusal!r}: {content!r}"
    with warnings.catch_warnings(action="ignore"):
        try:  # the file names nothing but tensors and plain values: sluice would have kept a placeholder
            expected = torch.load(io.BytesIO(content), weights_only=False)
        except (pickle.UnpicklingError, RuntimeError):
            return
    assert same(loaded(source, index), expected), content


def _check_that_torch_has_none(opened: Any, name: str) -> None:
    """Check that safetensors cannot return an unsupported tensor to torch either."""
    try:
        opened.get_tensor(name)
    except Exception:  # noqa: BLE001 - its own or torch's
        return
    raise AssertionError(f"safetensors reads {name!r}")


def judge_safetensors(content: bytes) -> str:
    """Compare a safetensors file with the result of its library."""
    ours = _read(content)
    with tempfile.NamedTemporaryFile(suffix=".safetensors") as file:
        Path(file.name).write_bytes(content)
        try:
            with safetensors.safe_open(file.name, "pt") as opened:
                skipped = set() if isinstance(ours, CheckpointError) else _tree.opaques(ours[1].tree).keys()
                names = opened.keys()
                theirs = {name: opened.get_tensor(name) for name in names if name not in skipped}
                metadata = opened.metadata() or {}
                for name in skipped:
                    _check_that_torch_has_none(opened, name)
            refusal = None
        except Exception as error:  # noqa: BLE001 - its own, and torch's for sizes that it cannot hold
            theirs, metadata, refusal = {}, {}, error
    if isinstance(ours, CheckpointError):
        return "refused" if refusal else "stricter"
    assert refusal is None, (refusal, content)
    source, index = ours
    assert isinstance(index.tree, dict)
    assert {name for name in index.tree if name not in _tree.opaques(index.tree)} == theirs.keys(), content
    assert index.metadata == metadata, content
    found = loaded(source, index)
    for name, tensor in theirs.items():
        entry = index.tree[name]
        assert isinstance(entry, Entry)
        assert (torch_dtype(entry.dtype), entry.shape) == (tensor.dtype, tuple(tensor.shape)), content
        assert bits(found[name]) == bits(tensor), content
    return "same"


#: Generator and comparison of each format.
FORMATS: dict[str, tuple[Callable[[int, int], Iterator[bytes]], Callable[[bytes], str]]] = {
    "zip": (zips, judge_torch),
    "legacy": (legacies, judge_torch),
    "safetensors": (headers, judge_safetensors),
}


def edits(content: bytes) -> Iterator[bytes]:
    """Yield the content with each byte set to 0, 0xFF, ^0x80 and ^0x01."""
    for position, byte in enumerate(content):
        for value in {0, 0xFF, byte ^ 0x80, byte ^ 0x01} - {byte}:
            yield content[:position] + bytes([value]) + content[position + 1 :]
