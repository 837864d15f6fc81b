"""Telling formats apart by their first bytes, and naming what sluice does not read."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import pickle
import re
import tarfile
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from sluice._errors import (
    CheckpointError,
    FormatError,
    IncompleteCheckpointError,
    SluiceError,
    TruncatedError,
    UnsupportedError,
)
from sluice.formats import FORMATS, detect
from sluice.sources._local import LocalFile
from sluice.testing import RecordingSource

LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n"


def tar_bytes() -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        archive.addfile(tarfile.TarInfo("sys_info"), io.BytesIO())
    return buffer.getvalue()


def npy_bytes() -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, np.zeros(3))
    return buffer.getvalue()


def npz_bytes() -> bytes:
    buffer = io.BytesIO()
    np.savez(buffer, weights=np.zeros(3))
    return buffer.getvalue()


def legacy_bytes(protocol: int) -> bytes:
    buffer = io.BytesIO()
    torch.save({"w": torch.zeros(3)}, buffer, pickle_protocol=protocol, _use_new_zipfile_serialization=False)
    return buffer.getvalue()


def detect_in(path: Path, content: bytes | None = None) -> str:
    """Return the name of the format that is detected in a file."""
    if content is not None:
        path.write_bytes(content)
    with closing(LocalFile(path)) as source:
        return detect(source).name


def test_a_torch_file_is_a_torch_zip(tmp_path: Path) -> None:
    torch.save({"w": torch.zeros(3)}, tmp_path / "x")
    assert detect_in(tmp_path / "x") == "torch-zip"


def test_a_safetensors_file_is_safetensors(tmp_path: Path) -> None:
    save_file({"w": torch.zeros(3)}, tmp_path / "x")
    assert detect_in(tmp_path / "x") == "safetensors"


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_a_file_of_torch_before_1_6_is_legacy(tmp_path: Path, protocol: int) -> None:
    assert detect_in(tmp_path / "x", legacy_bytes(protocol)) == "torch-legacy"
    # Cut inside its magic number, from where on it is no bare pickle.
    assert detect_in(tmp_path / "x", legacy_bytes(protocol)[:10]) == "torch-legacy"


OTHERS: list[tuple[bytes, type[CheckpointError], str]] = [
    *((legacy_bytes(protocol), UnsupportedError, "legacy torch.save file in pickle protocol") for protocol in (0, 1)),
    (tar_bytes(), UnsupportedError, "tar archive, as torch.save wrote them before 0.2: if you trust it, read it with"),
    (b"\x89HDF\r\n\x1a\n" + bytes(100), UnsupportedError, "HDF5"),
    (b"GGUF\3\0\0\0{\0\0\0\0\0\0\0" + bytes(100), UnsupportedError, "GGUF"),
    (npy_bytes(), UnsupportedError, ".npy"),
    (npz_bytes(), UnsupportedError, ".npz"),
    (gzip.compress(bytes(1000)), UnsupportedError, "gzip"),
    (b"\x28\xb5\x2f\xfd" + bytes(100), UnsupportedError, "zstd"),
    (bz2.compress(bytes(1000)), UnsupportedError, "bzip2"),
    (lzma.compress(bytes(1000)), UnsupportedError, "xz"),
    *((pickle.dumps({"w": 1}, protocol), UnsupportedError, "bare pickle") for protocol in range(2, 6)),
    (LFS, IncompleteCheckpointError, "git lfs pull"),
    (b"<!DOCTYPE html><html>", FormatError, "web page"),
    (b"\n <HTML><body>", FormatError, "web page"),
    (b'<?xml version="1.0"?><Error>', FormatError, "web page"),
    (b'{\n  "metadata": {},\n  "weight_map": {}\n}', UnsupportedError, "index of a sharded"),
    (b'{"abc": {"x": 1}}', UnsupportedError, "JSON"),
    (b"[1, 2, 3, 4, 5]", UnsupportedError, "JSON"),
    (bytes(5000), IncompleteCheckpointError, "zeros"),
    (b"MZ\x90\0" + b"something else", FormatError, "no checkpoint that sluice knows"),
    (b"prefix" + npz_bytes(), FormatError, "no checkpoint that sluice knows"),
]


@pytest.mark.parametrize(
    ("content", "error", "words"), OTHERS, ids=[f"{i} {words}" for i, (_, _, words) in enumerate(OTHERS)]
)
def test_other_kinds_are_named(tmp_path: Path, content: bytes, error: type[CheckpointError], words: str) -> None:
    with pytest.raises(error, match=re.escape(words)) as caught:
        detect_in(tmp_path / "x", content)
    assert caught.value.file == str(tmp_path / "x")


def test_an_unknown_file_shows_its_first_bytes(tmp_path: Path) -> None:
    with pytest.raises(FormatError) as caught:
        detect_in(tmp_path / "x", b"0123456789abcdefghij")
    assert caught.value.found == b"0123456789abcdef"


@pytest.mark.parametrize("content", [b"x", b"PK\3\4", b"\0" * 9], ids=["one", "zip", "zeros"])
def test_a_short_file_is_truncated(tmp_path: Path, content: bytes) -> None:
    with pytest.raises(TruncatedError):
        detect_in(tmp_path / "x", content)


def test_only_the_first_page_is_read(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(bytes(range(256)) * 100)
    source = RecordingSource(LocalFile(tmp_path / "x"))
    with pytest.raises(FormatError):
        detect(source)
    source.close()
    assert [(read.offset, read.nbytes) for read in source.reads] == [(0, 4096)]


def test_no_start_is_claimed_twice(tmp_path: Path) -> None:
    save_file({"w": torch.zeros(3)}, tmp_path / "safetensors")
    torch.save({"w": torch.zeros(3)}, tmp_path / "torch-zip")
    (tmp_path / "torch-legacy").write_bytes(legacy_bytes(2))
    for name in ("safetensors", "torch-zip", "torch-legacy"):
        head = (tmp_path / name).read_bytes()[:4096]
        assert [candidate.name for candidate in FORMATS if candidate.matches(head)] == [name]


def test_no_length_hides_a_safetensors_file(tmp_path: Path) -> None:
    """The first bytes of a length can be those of a pickle, of a gzip file or of text."""
    lengths = [first | second << 8 | 10 << 16 for first in range(256) for second in (0, 2, 75, 104, 139, 255)]
    found = {detect_in(tmp_path / "x", length.to_bytes(8, "little") + b'{"a":') for length in lengths}
    assert found == {"safetensors"}


@given(st.one_of(st.binary(min_size=1), st.sampled_from(OTHERS).map(lambda other: other[0][:600])), st.binary())
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_bytes_give_a_format_or_a_typed_error(tmp_path: Path, start: bytes, rest: bytes) -> None:
    try:
        assert detect_in(tmp_path / "x", start + rest) in {known.name for known in FORMATS}
    except SluiceError as error:
        assert error.file == str(tmp_path / "x")
