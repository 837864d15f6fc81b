"""Detection of formats by their first bytes, and errors that name unsupported formats."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import pickle
import re
import subprocess
import sys
import tarfile
from collections.abc import Callable
from contextlib import closing
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

import sluice
from sluice._errors import (
    CheckpointError,
    FormatError,
    IncompleteCheckpointError,
    SluiceError,
    TruncatedError,
    UnsupportedError,
)
from sluice.formats.detection import FORMATS, detect
from sluice.sources.local import LocalFile
from support.directories import refusal
from support.hostile_archives import ArchiveRecord, build_archive
from support.sources import RecordingSource
from support.torch_files import saved

LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n"


def tar_bytes(name: str, *, mark: bool = True) -> bytes:
    """Return a tar archive; without its magic it is of the format from before 1988."""
    header = tarfile.TarInfo(name).tobuf(tarfile.USTAR_FORMAT)
    if not mark:
        header = header[:148] + 8 * b" " + header[156:257] + bytes(255)
        header = header[:148] + b"%06o\0 " % sum(header) + header[156:]
    return header + bytes(1024)


def numpy_bytes(save: Callable[[io.BytesIO, Any], None]) -> bytes:
    buffer = io.BytesIO()
    save(buffer, np.zeros(3))
    return buffer.getvalue()


def archive_bytes(*names: str) -> bytes:
    return build_archive(ArchiveRecord(name=name.encode(), data=b"x") for name in names)


def legacy_bytes(protocol: int) -> bytes:
    return saved({"w": torch.zeros(3)}, protocol, legacy=True)


def detect_in(path: Path, content: bytes) -> str:
    """Return the name of the format that is detected for a file."""
    path.write_bytes(content)
    with closing(LocalFile(path)) as source:
        return detect(source).name


@pytest.mark.parametrize("protocol", [1, 2, 3, 4, 5])
def test_a_file_of_torch_before_1_6_is_legacy(tmp_path: Path, protocol: int) -> None:
    assert detect_in(tmp_path / "x", legacy_bytes(protocol)) == "torch-legacy"
    # Truncated inside its magic number, from where on it is not a bare pickle.
    assert detect_in(tmp_path / "x", legacy_bytes(protocol)[:10]) == "torch-legacy"


OTHERS: list[tuple[bytes, type[CheckpointError], str]] = [
    (tar_bytes("model.nemo"), UnsupportedError, "a tar archive among other files"),
    (tar_bytes("x", mark=False), UnsupportedError, "a tar archive among other files"),
    (b"\x89HDF\r\n\x1a\n" + bytes(100), UnsupportedError, "HDF5"),
    (b"tjgg\3\0\0\0" + bytes(100), UnsupportedError, "another runtime"),
    (b"\x08\x07\x12\x07pytorch\x1a\x052.1.0:\x9a\x01" + bytes(100), UnsupportedError, "another runtime"),
    (b"\x08\x0aB\x02\x10\x12:\x80\x01" + bytes(100), UnsupportedError, "another runtime"),
    (b"\x08\x01\x12\xa3\x8c\x01\n\x95\x01" + bytes(100), UnsupportedError, "another runtime"),
    (b"\x1c\0\0\0TFL3" + bytes(100), UnsupportedError, "another runtime"),
    (b"ftrt" + bytes(100), UnsupportedError, "another runtime"),
    (b"\x81\xa6params\x82" + bytes(100), UnsupportedError, "Flax"),
    (b"\xde\0\x20\xa6params" + bytes(100), UnsupportedError, "Flax"),
    (b"PAR1" + bytes(100), UnsupportedError, "Parquet"),
    (numpy_bytes(np.save), UnsupportedError, ".npy"),
    (gzip.compress(bytes(1000)), UnsupportedError, "gunzip -c FILE > FILE.tar"),
    (b"\x28\xb5\x2f\xfd" + bytes(100), UnsupportedError, "a compressed file"),
    (b"\x04\x22\x4d\x18" + bytes(100), UnsupportedError, "a compressed file"),
    (b"7z\xbc\xaf\x27\x1c" + bytes(100), UnsupportedError, "a compressed file"),
    (b"PK\5\6" + bytes(18), FormatError, "an empty zip archive"),
    (bz2.compress(bytes(1000)), UnsupportedError, "a compressed file"),
    (lzma.compress(bytes(1000)), UnsupportedError, "a compressed file"),
    *((pickle.dumps({"w": 1}, protocol), UnsupportedError, "bare pickle") for protocol in (*range(6), *range(2, 6))),
    *((pickle.dumps([1, 2.5, "x"], protocol), UnsupportedError, "bare pickle") for protocol in range(6)),
    (b"version http://git-media.io/v/2\noid sha256:4d\n", IncompleteCheckpointError, "git lfs pull"),
    (b"# xet version 0\nfilesize = 1234\n", IncompleteCheckpointError, "a pointer of git-xet"),
    (b"/annex/objects/SHA256E-s1234--abcdef.bin\n", IncompleteCheckpointError, "a pointer of git-xet"),
    (b"outs:\n- md5: a304afb96060aad90176268345e10355\n", IncompleteCheckpointError, "a pointer of git-xet"),
    (LFS, IncompleteCheckpointError, "git lfs pull"),
    (b"<!DOCTYPE html><html>", FormatError, "web page"),
    (b"\n <HTML><body>", FormatError, "web page"),
    (b'<?xml version="1.0"?><Error>', FormatError, "web page"),
    (b"<Error><Code>AccessDenied</Code></Error>", FormatError, "web page"),
    (b"\xef\xbb\xbf<!doctype html>\n<html>", FormatError, "web page"),
    (b"<!-- saved -->\n<html lang='en'>", FormatError, "web page"),
    (b"<head><title>Access denied</title>", FormatError, "web page"),
    (b'{"error":"Repository not found"}', FormatError, "response of a server"),
    (b"Access to model x is restricted.", FormatError, "text, not a checkpoint; found 'Access to model x"),
    ("Запись не найдена".encode() * 300, FormatError, "text, not a checkpoint"),
    (b"import torch\nprint(1)\n", FormatError, "text, not a checkpoint"),
    (b'{\n  "metadata": {},\n  "weight_map": {}\n}', UnsupportedError, "index of a sharded"),
    (b'{"abc": {"x": 1}}', UnsupportedError, "JSON"),
    (b"[1, 2, 3, 4, 5]", UnsupportedError, "JSON"),
    (bytes(5000), IncompleteCheckpointError, "zeros"),
    (bytes(12), IncompleteCheckpointError, "zeros"),
    *(
        (len(header).to_bytes(8, "little") + header, FormatError, "looks like safetensors")
        for header in (b'\xef\xbb\xbf{"a":1}', b'  {"a":1}', b"null", b"[1,2]", b"{/**/}", '{"a":1}'.encode("utf-16"))
    ),
    (b"MZ\x90\x00456789abcdefghij", FormatError, r"or GGUF file; found b'MZ\x90\x00456789abcdef'"),
    (b"prefix" + numpy_bytes(np.savez), FormatError, "not a recognized checkpoint format"),
]


@pytest.mark.parametrize(
    ("content", "error", "words"), OTHERS, ids=[f"{i} {words}" for i, (_, _, words) in enumerate(OTHERS)]
)
def test_other_kinds_are_named(tmp_path: Path, content: bytes, error: type[CheckpointError], words: str) -> None:
    with pytest.raises(error, match=re.escape(words)) as caught:
        detect_in(tmp_path / "x", content)
    assert caught.value.file == str(tmp_path / "x")


PACKAGE = archive_bytes("x/.data/0.storage", "x/a/b.pkl", "x/.data/extern_modules", "x/.data/version")

ARCHIVES: dict[str, tuple[bytes, type[CheckpointError], str]] = {
    "older program": (archive_bytes("serialized_exported_program.json"), UnsupportedError, "exported program"),
    "package": (PACKAGE, UnsupportedError, "package of torch.package"),
    "arrays": (numpy_bytes(np.savez), UnsupportedError, "a numpy .npz archive"),
    "nested arrays": (archive_bytes("a/b/w.npy"), UnsupportedError, "numpy"),
    "keras": (archive_bytes("metadata.json", "config.json", "model.weights.h5"), UnsupportedError, "Keras model"),
    "packed": (archive_bytes("m/config.json", "m/pytorch_model.bin"), FormatError, "'m/config.json', .* Unpack it"),
    "packed flat": (archive_bytes("model.safetensors"), FormatError, "found 'model.safetensors'. Unpack"),
    "document": (archive_bytes("[Content_Types].xml", "word/document.xml"), FormatError, "not written by torch.save"),
    "no directory": (archive_bytes("data.pkl", "data/0", "version"), FormatError, "found 'data.pkl'"),
    "only its pickle": (archive_bytes("data.pkl"), FormatError, "expected DIRECTORY/data.pkl"),
    "two directories": (archive_bytes("a/b/data.pkl", "a/b/version"), FormatError, "found 'a/b/data.pkl'"),
    "desktop": (archive_bytes("a/data.pkl", "__MACOSX/._a"), FormatError, "'__MACOSX/._a' is not a plain path under"),
    "comment": (archive_bytes("a/data.pkl")[:-2] + b"\2\0hi", FormatError, "bytes follow the end of the archive"),
}


@pytest.mark.parametrize("case", ARCHIVES)
def test_other_archives_are_named(tmp_path: Path, case: str) -> None:
    content, error, words = ARCHIVES[case]
    (tmp_path / "x").write_bytes(content)
    with pytest.raises(error, match=words) as caught:
        sluice.open(tmp_path / "x")
    assert type(caught.value) is error
    assert caught.value.file == str(tmp_path / "x")


@pytest.mark.long  # torch.export takes seconds to import
def test_archives_of_torch_other_than_torch_save(tmp_path: Path) -> None:
    package = import_module("torch.package").PackageExporter
    with package(str(tmp_path / "x.pt")) as exporter:
        exporter.save_pickle("a", "b.pkl", {"step": 3})
    with pytest.raises(UnsupportedError, match=r"package of torch\.package"):
        sluice.open(tmp_path / "x.pt")


def test_an_index_that_was_never_downloaded(tmp_path: Path) -> None:
    for content, error in ((LFS, IncompleteCheckpointError), (b"<!DOCTYPE html><html>", FormatError)):
        (tmp_path / "model.safetensors.index.json").write_bytes(content)
        refusal(tmp_path, error, "in place of the file")


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
    (tmp_path / "gguf").write_bytes(b'GGUF\3\0\0\0{"\0\0\0\0\0\0')
    save_file({"w": torch.zeros(3)}, tmp_path / "safetensors")
    torch.save({"w": torch.zeros(3)}, tmp_path / "torch-zip")
    (tmp_path / "torch-legacy").write_bytes(legacy_bytes(2))
    for name in ("safetensors", "torch-zip", "torch-legacy", "gguf"):
        head = (tmp_path / name).read_bytes()[:4096]
        assert [candidate.name for candidate in FORMATS if candidate.matches(head)] == [name]


def test_no_length_hides_a_safetensors_file(tmp_path: Path) -> None:
    """The length at the start of a file can have the first bytes of a pickle, a gzip file or a text."""
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


MEASURE = """
import sys
from sluice._options import Limits
from sluice.formats.detection import detect
from sluice.sources.local import LocalFile

def peak():
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("VmHWM"))

source = LocalFile(sys.argv[1])
before, reader = peak(), detect(source)
index = reader.read_index(source, Limits())
assert not {"torch", "numpy"} & sys.modules.keys()
print(len(index.storages), peak() - before)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the peak is read from /proc")
@pytest.mark.parametrize("suffix", ["pth", "safetensors"])
def test_an_index_of_many_tensors_takes_a_kibibyte_for_each_and_no_torch(tmp_path: Path, suffix: str) -> None:
    names = [f"model.layers.{number // 10}.block.{number % 10}.weight" for number in range(30_000)]
    sluice.save({name: torch.ones(1 + len(name) % 10) for name in names}, tmp_path / f"many.{suffix}")
    command = [sys.executable, "-c", MEASURE, str(tmp_path / f"many.{suffix}")]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    count, grown_kib = map(int, result.stdout.split())
    assert count == len(names)
    assert grown_kib <= count * 1.0
