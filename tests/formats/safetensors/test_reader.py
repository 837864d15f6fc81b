"""The safetensors format, with safetensors itself as the oracle."""

from __future__ import annotations

import struct
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import SafetensorError, safe_open

from sluice._dtypes import dtype_name
from sluice._errors import FormatError, LimitError, SluiceError, TruncatedError, UnsupportedError
from sluice._options import Limits
from sluice.formats.safetensors.reader import SafetensorsFormat
from sluice.records import Entry, Index
from sluice.sources.local import LocalFile
from support.dtypes import needs_float4
from support.sources import RecordedRead, RecordingSource

ONE = '{"dtype":"F32","shape":[1],"data_offsets":[0,4]}'
EMPTY = '{"dtype":"F32","shape":[0],"data_offsets":[0,0]}'
FOUR = b"\0\1\2\3"


def file_bytes(header: str | bytes, data: bytes = b"", *, length: int | None = None) -> bytes:
    raw = header.encode() if isinstance(header, str) else header
    return struct.pack("<Q", len(raw) if length is None else length) + raw + data


def index_of(path: Path, content: bytes, limits: Limits | None = None) -> Index:
    path.write_bytes(content)
    with closing(LocalFile(path)) as source:
        return SafetensorsFormat().read_index(source, limits or Limits())


def tree_of(index: Index) -> dict[str, Entry]:
    assert isinstance(index.tree, dict)
    return index.tree


def oracle(path: Path) -> dict[str, torch.Tensor] | None:
    """Return the tensors that safetensors reads; None if it refuses the file."""
    try:
        with safe_open(path, "pt") as file:
            return {name: file.get_tensor(name) for name in file.offset_keys()}
    except (SafetensorError, TypeError, RuntimeError):  # the last two come from torch, for too large sizes
        return None


def test_the_tree_is_in_the_order_of_the_data(tmp_path: Path) -> None:
    header = (
        '{"z":{"dtype":"F32","shape":[1],"data_offsets":[4,8]},"empty":{"dtype":"F32","shape":[0],"data_offsets":[4,4]},'
        '"b":{"dtype":"U8","shape":[4],"data_offsets":[0,4]}}'
    )
    index = index_of(tmp_path / "x", file_bytes(header, bytes(8)))
    assert list(tree_of(index)) == ["b", "empty", "z"]
    assert [storage.offset - 8 - len(header) for storage in index.storages] == [0, 4, 4]
    assert list(tree_of(index)) == list(oracle(tmp_path / "x") or ())


@pytest.mark.parametrize(
    ("header", "data"),
    [
        ("{ }  ", b""),
        ('{"__metadata__":{}}', b""),
        ('{"a":' + ONE + "}  \n\t\r ", FOUR),
        ('{ "a" :\n' + ONE.replace(":", " : ").replace(",", " ,\t").replace("[", "[ ").replace("]", " ]") + " }", FOUR),
        ('{"a":' + ONE.replace("F32", "\\u004632") + "}", FOUR),
        ('{"\\u0000\\ud83d\\ude00\\n":' + ONE + "}", FOUR),
        ('{"a":{"data_offsets":[0,4],"shape":[1],"dtype":"F32"},"__metadata__":{"k":"v"}}', FOUR),
        pytest.param('{"a":{"dtype":"F4","shape":[2,4],"data_offsets":[0,4]}}', FOUR, marks=needs_float4),
        pytest.param('{"a":{"dtype":"F4","shape":[3,0],"data_offsets":[0,0]}}', b"", marks=needs_float4),
        ('{"__metadata__":{"k":"a \\"quoted\\": {k}\\t€"},"ü\\"":' + ONE + "}", FOUR),
    ],
)
def test_unusual_headers_are_read_as_the_oracle_reads_them(tmp_path: Path, header: str, data: bytes) -> None:
    content = file_bytes(header, data)
    index, expected = index_of(tmp_path / "x", content), oracle(tmp_path / "x")
    assert expected is not None
    assert tree_of(index).keys() == expected.keys()
    for name, entry in tree_of(index).items():
        tensor, storage = expected[name], index.storages[entry.storage]
        assert (entry.shape, entry.dtype) == (tuple(tensor.shape), dtype_name(tensor.dtype))
        assert entry.stride == tensor.stride()
        assert (storage.key, storage.nbytes) == (name, entry.nbytes)
        raw = tensor.reshape(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""
        assert content[storage.offset : storage.offset + storage.nbytes] == raw


def tensor_with(**fields: str) -> str:
    values = {"dtype": '"F32"', "shape": "[1]", "data_offsets": "[0,4]", **fields}
    return '{"a":{' + ",".join(f'"{name}":{value}' for name, value in values.items()) + "}}"


DAMAGED = {
    "cut": '{"a":' + ONE,
    "a second object": '{"a":' + ONE + "}{}",
    "NUL padding": '{"a":' + ONE + "}\0",
    "white space in front": ' {"a":' + ONE + "}",
    "a byte-order mark": b"\xef\xbb\xbf" + ('{"a":' + ONE + "}").encode(),
    "a raw surrogate": b'{"\xed\xa0\x80":' + ONE.encode() + b"}",
    "a name twice": '{"a":' + ONE + ',"a":' + ONE + "}",
    "an empty tensor twice": '{"a":' + EMPTY + ',"a":' + EMPTY + "}",
    "a name twice by an escape": '{"a":' + EMPTY + ',"\\u0061":' + EMPTY + "}",
    "metadata as a tensor": '{"__metadata__":' + EMPTY + "}",
    "metadata as a tensor by an escape": '{"\\u005f_metadata__":' + EMPTY + "}",
    "metadata twice": '{"__metadata__":{},"__metadata__":{}}',
    "a metadata key twice": '{"__metadata__":{"k":"1","k":"2"}}',
    "metadata of numbers": '{"__metadata__":{"k":1}}',
    "metadata of objects": '{"__metadata__":{"k":{}}}',
    "metadata null": '{"__metadata__":null}',
    "metadata and nothing": '{"__metadata__":{"k":"v"}',
    "metadata, lone surrogate": '{"__metadata__":{"k":"\\udfff"}}',
    "no dtype": '{"a":{"shape":[1],"data_offsets":[0,4]}}',
    "a field twice": '{"a":{"dtype":"F32","dtype":"F32","shape":[1]}}',
    "a fourth field": tensor_with(more='"x"'),
    "tensor as an array": '{"a":["F32",[1],[0,4]]}',
    "size with exponent": tensor_with(shape="[1e0]"),
    "NaN size": tensor_with(shape="[NaN]"),
    "negative size": tensor_with(shape="[-1]"),
    "negative zero": tensor_with(shape="[-0]", data_offsets="[0,0]"),
    "shape null": tensor_with(shape="null"),
    "5000 digits": tensor_with(shape="[" + "1" * 5000 + "]"),
    "text as size": tensor_with(shape='["1"]'),
    "three offsets": tensor_with(data_offsets="[0,4,4]"),
    "one offset": tensor_with(data_offsets="[4]"),
    "negative offset": tensor_with(data_offsets="[-4,0]"),
    "float offset": tensor_with(data_offsets="[0,4.0]"),
    "begin after end": tensor_with(data_offsets="[4,0]"),
    "not from the start": tensor_with(data_offsets="[1,5]"),
    "2**62 elements of 4 bytes": tensor_with(shape="[4611686018427387904]", data_offsets="[0,0]"),
    "2**63 times zero": tensor_with(shape="[0,9223372036854775808]", data_offsets="[0,0]"),
    "overflow times zero": tensor_with(shape="[4611686018427387904,4,0]", data_offsets="[0,0]"),
    "dtype as an object": tensor_with(dtype='{"F32":null}'),
}


@pytest.mark.parametrize("header", DAMAGED.values(), ids=DAMAGED.keys())
@pytest.mark.parametrize("data", [b"", FOUR], ids=["no data", "four bytes"])
def test_damaged_headers_are_refused(tmp_path: Path, header: str | bytes, data: bytes) -> None:
    with pytest.raises(FormatError) as caught:
        index_of(tmp_path / "x", file_bytes(header, data))
    assert caught.value.file == str(tmp_path / "x")


@pytest.mark.parametrize(
    ("header", "data"),
    [
        ("{}", b"x"),
        ('{"a":' + ONE + ',"b":' + ONE.replace("0,4", "5,9") + "}", bytes(9)),
        ('{"a":' + ONE + ',"b":' + ONE.replace("0,4", "2,6") + "}", bytes(6)),
        ('{"a":' + ONE + ',"b":' + EMPTY.replace("0,0", "2,2") + "}", FOUR),
        ('{"a":' + ONE + ',"b":' + ONE + "}", FOUR),
    ],
    ids=["data of no tensor", "hole", "overlap", "empty inside", "same bytes"],
)
def test_data_must_be_covered_exactly(tmp_path: Path, header: str, data: bytes) -> None:
    path = tmp_path / "x"
    with pytest.raises(FormatError) as caught:
        index_of(path, file_bytes(header, data))
    assert caught.value.offset is not None
    assert caught.value.offset >= 8 + len(header)
    assert oracle(path) is None


@pytest.mark.parametrize("dtype", ["F6_E2M3", "F6_E3M2"])
def test_dtypes_that_torch_has_not_are_leaves(tmp_path: Path, dtype: str) -> None:
    path = tmp_path / "x"
    six = '{"shape":[2,4],"dtype":"' + dtype + '","data_offsets":[0,6]}'
    index: Any = index_of(path, file_bytes('{"six":' + six + ',"a":' + ONE.replace("0,4", "6,10") + "}", bytes(10)))
    assert repr(index.tree["six"]) == f"<not loaded: torch has no such dtype, {dtype}>"
    assert index.storages[index.tree["a"].storage].offset == path.stat().st_size - 4
    with pytest.raises(FormatError, match="do not match the shape and dtype"):
        index_of(path, file_bytes('{"six":' + six.replace("0,6", "0,9") + "}", bytes(9)))
    with pytest.raises(UnsupportedError, match="not a whole number of bytes"):
        index_of(path, file_bytes('{"six":' + six.replace("2,4", "1,3") + "}", bytes(9)))
    with pytest.raises(FormatError, match="larger than torch"):
        index_of(path, file_bytes('{"six":' + six.replace("2,4", f"{1 << 62},{1 << 62}") + "}", bytes(9)))


@pytest.mark.parametrize("dtype", ["C128", "F128", "f32", ""])
def test_dtypes_that_torch_has_not_are_named(tmp_path: Path, dtype: str) -> None:
    with pytest.raises(UnsupportedError) as caught:
        index_of(tmp_path / "x", file_bytes(tensor_with(dtype=f'"{dtype}"'), FOUR))
    assert (caught.value.tensor, caught.value.found) == ("a", dtype)


@pytest.mark.parametrize("shape", ["[]", "[1]", "[3,1]"])
def test_odd_counts_of_packed_values_are_refused(tmp_path: Path, shape: str) -> None:
    with pytest.raises(UnsupportedError, match="not a whole number of bytes"):
        index_of(tmp_path / "x", file_bytes(tensor_with(dtype='"F4"', shape=shape), FOUR))


def test_packed_values_that_torch_cannot_pair_are_leaves(tmp_path: Path) -> None:
    index = index_of(tmp_path / "x", file_bytes(tensor_with(dtype='"F4"', shape="[8,1]"), FOUR))
    assert "in pairs" in repr(index.tree)


@pytest.mark.parametrize(
    ("length", "limits", "error"),
    [
        (1 << 63, Limits(), TruncatedError),
        ((1 << 64) - 1, Limits(), TruncatedError),
        (58, Limits(), TruncatedError),
        (57, Limits(header_bytes=56), LimitError),
        (0, Limits(), FormatError),
    ],
)
def test_the_length_is_checked_before_the_header_is_read(
    tmp_path: Path, length: int, limits: Limits, error: type[SluiceError]
) -> None:
    path = tmp_path / "x"
    path.write_bytes(file_bytes('{"a":' + ONE + "}" + " " * 3, length=length))
    source = RecordingSource(LocalFile(path))
    with pytest.raises(error):
        SafetensorsFormat().read_index(source, limits)
    source.close()
    assert source.reads[:1] == [RecordedRead(offset=0, nbytes=8)]
    assert source.read_bytes == 8


@pytest.mark.parametrize(
    ("tight", "enough", "header"),
    [
        (Limits(entries=3), Limits(entries=4), "{" + ",".join(f'"{i}":' + EMPTY for i in range(4)) + "}"),
        (Limits(entries=3), Limits(entries=4), '{"__metadata__":{"1":"","2":"","3":"","4":""}}'),
        (Limits(dimensions=3), Limits(dimensions=4), tensor_with(shape="[1,1,1,0]", data_offsets="[0,0]")),
        (Limits(name_bytes=3), Limits(name_bytes=4), '{"name":' + EMPTY + "}"),
    ],
)
def test_limits(tmp_path: Path, tight: Limits, enough: Limits, header: str) -> None:
    with pytest.raises(LimitError, match="entries|dimensions|name_bytes") as caught:  # noqa: RUF043 - alternatives
        index_of(tmp_path / "x", file_bytes(header), tight)
    assert caught.value.expected == "at most 3"
    index_of(tmp_path / "x", file_bytes(header), enough)
