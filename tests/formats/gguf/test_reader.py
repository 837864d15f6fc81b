"""The index of GGUF files: healthy ones, and what is refused."""

from __future__ import annotations

import struct
import tracemalloc

import pytest
import torch

from sluice._errors import CheckpointError, FormatError, LimitError, TruncatedError, UnsupportedError
from sluice._options import Limits
from sluice.engine.packs import DECODERS
from sluice.formats.gguf import reader
from sluice.formats.gguf.header import TYPES
from sluice.formats.gguf.reader import GgufFormat
from sluice.records import Entry, Index, UnsupportedValue
from support.gguf_files import Tensor, array, gguf_bytes, number, packed, plain, text
from support.sources import MemorySource, RecordingSource

ONE = plain(torch.ones(3, 2))
Q8 = packed((4, 64))[0]


def index(content: bytes, limits: Limits | None = None) -> Index:
    return GgufFormat().read_index(MemorySource(content), limits or Limits())


def tree(found: Index) -> dict[str, Entry]:
    assert isinstance(found.tree, dict)
    return found.tree


@pytest.mark.parametrize(("version", "alignment"), [(2, 32), (3, 32), (3, 8), (3, 4096)])
def test_tensors_and_where_they_are(version: int, alignment: int) -> None:
    given = number(4, "I", alignment)
    metadata: dict[str | bytes, bytes] = {"general.alignment": given} if alignment != 32 else {}
    content = gguf_bytes(
        {"b": ONE, "w": Q8, "empty": plain(torch.ones(0, 4))}, metadata, version=version, alignment=alignment
    )
    found = index(content)
    entries = tree(found)
    assert (entries["b"].dtype, entries["b"].shape, entries["b"].stride) == ("float32", (3, 2), (2, 1))
    assert (entries["w"].dtype, entries["w"].shape, entries["w"].nbytes) == ("float32", (4, 64), 1024)
    packing = entries["w"].elements.packing
    assert packing is not None
    assert (packing.name, packing.elements, packing.nbytes) == ("Q8_0", 32, 34)
    for name, (_, _, data) in {"b": ONE, "w": Q8}.items():
        storage = found.storages[entries[name].storage]
        assert storage.offset % alignment == 0
        assert content[storage.offset : storage.offset + storage.nbytes] == data


def test_metadata_is_text() -> None:
    metadata: dict[str | bytes, bytes] = {
        "general.architecture": struct.pack("<I", 8) + text("llama"),
        "context": number(4, "I", 4096),
        "epsilon": number(6, "f", 0.5),
        "flag": number(7, "?", True),
        "few": array(5, 3, struct.pack("<3i", 1, -2, 3)),
        "many": array(6, 100, bytes(400)),
        "tokens": array(8, 3, text("a") + text("") + text("xyz")),
        "long": struct.pack("<I", 8) + text("x" * 100_000),
        "odd": struct.pack("<I", 8) + text(b"\xff"),
    }
    assert index(gguf_bytes({"b": ONE}, metadata)).metadata == {
        "version": "3",
        "general.architecture": "llama",
        "context": "4096",
        "epsilon": "0.5",
        "flag": "True",
        "few": "[1, -2, 3]",
        "many": "array of 100 numbers",
        "tokens": "array of 3 texts",
        "long": "text of 100000 bytes",
        "odd": "\N{REPLACEMENT CHARACTER}",
    }


def test_a_vocabulary_takes_no_memory_and_few_reads() -> None:
    words = b"".join(text(f"word {i}") for i in range(60_000))
    metadata: dict[str | bytes, bytes] = {
        "tokens": array(8, 60_000, words),
        "scores": array(6, 1 << 20, bytes(4 << 20)),
    }
    source = RecordingSource(MemorySource(gguf_bytes({"b": ONE}, metadata)))
    tracemalloc.start()
    try:
        GgufFormat().read_index(source, Limits())
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert source.read_bytes < len(words) + (1 << 20)  # the numbers are passed over
    assert len(source.reads) < 12
    assert peak < 3 << 20


def test_types_that_are_not_decoded_refuse_their_tensor_only() -> None:
    tensors: dict[str, Tensor] = {"q8": ((2, 256), 15, bytes(584)), "new": ((2, 256), 99, b""), "b": ONE}
    entries = tree(index(gguf_bytes(tensors)))
    assert entries["b"].shape == (3, 2)
    for name, kind in (("q8", "Q8_K"), ("new", "type 99")):
        leaf = entries[name]
        assert isinstance(leaf, UnsupportedValue)
        assert leaf.qualified_name == kind
        assert "llama-quantize" in str(leaf.advice)


def test_types_of_the_package_are_refused_without_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader, "find_spec", lambda _: None)
    leaf = tree(index(gguf_bytes({"iq": ((2, 256), 23, bytes(272))})))["iq"]
    assert isinstance(leaf, UnsupportedValue)
    assert "sluice[gguf]" in str(leaf.advice)


def test_every_packed_type_has_a_decoder() -> None:
    stored = [each.stored for each in TYPES.values() if each.stored is not None and not each.package]
    assert sorted(elements.packing.name for elements in stored if elements.packing) == sorted(DECODERS)


REFUSED: list[tuple[str, bytes, type[CheckpointError], str]] = [
    ("short", b"GGUF\3\0\0\0", TruncatedError, "inside its header"),
    ("magic", b"GGUX" + bytes(40), FormatError, "not a GGUF file"),
    ("version 1", gguf_bytes({}, version=1), UnsupportedError, "version of GGUF"),
    ("version 4", gguf_bytes({}, version=4), UnsupportedError, "version of GGUF"),
    ("big-endian", gguf_bytes({"b": ONE}, version=3 << 24), UnsupportedError, "big-endian"),
    ("too many tensors", gguf_bytes({"b": ONE}, count=1 << 60), TruncatedError, "inside its header"),
    ("one tensor too many", gguf_bytes({}, count=1), TruncatedError, "inside its header"),
    ("a key that is not UTF-8", gguf_bytes({}, {b"\xff": number(4, "I", 1)}), FormatError, "not UTF-8"),
    ("an unknown type", gguf_bytes({}, {"k": number(13, "I", 1)}), FormatError, "type of a metadata value"),
    ("an unknown item", gguf_bytes({}, {"k": array(13, 1, bytes(4))}), FormatError, "neither numbers nor texts"),
    ("a text past the end", gguf_bytes({}, {"k": struct.pack("<IQ", 8, 1 << 62)}), TruncatedError, "inside its header"),
    ("numbers past the end", gguf_bytes({}, {"k": array(12, 1 << 61, b"")}), TruncatedError, "inside its header"),
    ("texts past the end", gguf_bytes({}, {"k": array(8, 1 << 40, b"")}), TruncatedError, "inside its header"),
    ("last text past the end", gguf_bytes({}, {"k": array(8, 1, struct.pack("<Q", 99))}), TruncatedError, "inside its"),
    ("arrays of arrays", gguf_bytes({}, {"k": array(9, 1 << 40, b"")}), FormatError, "neither numbers nor texts"),
    ("alignment 0", gguf_bytes({"b": ONE}, {"general.alignment": number(4, "I", 0)}), FormatError, "alignment"),
    ("alignment 48", gguf_bytes({"b": ONE}, {"general.alignment": number(4, "I", 48)}), FormatError, "alignment"),
    ("as text", gguf_bytes({}, {"general.alignment": struct.pack("<I", 8) + text("32")}), FormatError, "alignment"),
    ("part of a pack", gguf_bytes({"b": ((2, 16), 8, bytes(34))}), FormatError, "whole packs"),
    ("a scalar of packs", gguf_bytes({"b": ((), 8, bytes(34))}), FormatError, "whole packs"),
    ("an odd offset", gguf_bytes({"b": ONE}, offsets={"b": 8}), FormatError, "not aligned"),
    ("an offset past the end", gguf_bytes({"b": ONE}, offsets={"b": 1 << 40}), TruncatedError, "end of the tensor"),
    ("a cut tensor", gguf_bytes({"w": Q8})[:-17], TruncatedError, "end of the tensor"),
    ("a huge shape", gguf_bytes({"b": ((1 << 40, 1 << 40), 0, b"")}), FormatError, "larger than torch"),
    ("huge and empty", gguf_bytes({"b": ((1 << 62, 0, 8), 0, b"")}), FormatError, "larger than torch"),
    ("dimensions", gguf_bytes({"b": ((1,) * 65, 0, bytes(4))}), LimitError, "'dimensions'"),
]


@pytest.mark.parametrize("case", REFUSED, ids=[case[0] for case in REFUSED])
def test_refused(case: tuple[str, bytes, type[CheckpointError], str]) -> None:
    _, content, error, words = case
    with pytest.raises(error, match=words) as caught:
        index(content)
    assert caught.value.file == MemorySource(b"").path


def test_duplicate_names_and_keys() -> None:
    key, name = text("k") + number(4, "I", 1), text("b") + struct.pack("<IQIQ", 1, 8, 0, 0)
    with pytest.raises(FormatError, match="key is duplicated"):
        index(struct.pack("<4sIQQ", b"GGUF", 3, 0, 2) + key + key)
    with pytest.raises(FormatError, match="name is duplicated") as caught:
        index(struct.pack("<4sIQQ", b"GGUF", 3, 2, 0) + name + name + bytes(100))
    assert caught.value.tensor == "b"


def test_overlap_names_both_tensors() -> None:
    with pytest.raises(FormatError, match="inside 'a'") as caught:
        index(gguf_bytes({"a": Q8, "b": ONE}, offsets={"b": 64}))
    assert (caught.value.tensor, caught.value.expected) == ("b", "from 272")
