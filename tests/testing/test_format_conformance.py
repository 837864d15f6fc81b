"""The conformance suite of formats: the package's formats pass, and each check fails for a broken format."""

# ruff: noqa: ARG002 - methods have the arguments of the protocol
from __future__ import annotations

import io
import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
import safetensors.torch
import torch

from sluice._dtypes import dtype_name
from sluice._errors import CheckpointError, FormatError, ReadError, TruncatedError
from sluice._options import Limits
from sluice.checkpoint.layout import METADATA_FILE, CheckpointLayout
from sluice.checkpoint.open_file import OpenFile
from sluice.checkpoint.opening import open_layout
from sluice.entries.tree import map_leaves
from sluice.formats.gguf.reader import GgufFormat
from sluice.formats.protocol import Checksum, Format
from sluice.formats.safetensors.reader import SafetensorsFormat
from sluice.formats.torch_save.legacy_format import TorchLegacyFormat
from sluice.formats.torch_save.zip_format import TorchZipFormat
from sluice.records import Index
from sluice.sources.directory import DirectoryEntry
from sluice.sources.protocol import Source
from sluice.testing import ExpectedTensor, MemorySource, check_format
from support import distributed
from support.gguf_files import array, gguf_bytes, packed, plain, text

TENSORS = {
    "weight": torch.randn(512, 600, generator=torch.Generator().manual_seed(0)),
    "block.bias": torch.arange(700),
    "block.half": torch.linspace(0, 1, 1500).to(torch.bfloat16).reshape(30, 50),
    "scalar": torch.tensor(3.0),
    "empty": torch.ones(0, 4),
}


def expected(tensors: Mapping[str, torch.Tensor]) -> dict[str, ExpectedTensor]:
    return {
        name: ExpectedTensor(
            dtype=dtype_name(tensor.dtype),
            shape=tuple(tensor.shape),
            data=tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes() if tensor.numel() else b"",
        )
        for name, tensor in tensors.items()
    }


EXPECTED = expected({name: tensor.reshape(tensor.shape or (1,)) for name, tensor in TENSORS.items()})
EXPECTED["scalar"] = replace(EXPECTED["scalar"], shape=())


def torch_file(value: object, *, legacy: bool = False) -> bytes:
    file = io.BytesIO()
    torch.save(value, file, _use_new_zipfile_serialization=not legacy)
    return file.getvalue()


@pytest.mark.parametrize(
    ("file_format", "content"),
    [
        (TorchZipFormat(), torch_file(TENSORS)),
        (TorchLegacyFormat(), torch_file(TENSORS, legacy=True)),
        (SafetensorsFormat(), safetensors.torch.save(TENSORS)),
    ],
    ids=["torch-zip", "torch-legacy", "safetensors"],
)
def test_our_formats(file_format: Format, content: bytes) -> None:
    check_format(file_format, content, EXPECTED)


def test_plain_and_packed_tensors_of_gguf_files() -> None:
    tensors = {
        "weight": packed((4096, 512))[0],
        "bias": plain(torch.arange(700)),
        "half": plain(torch.ones(3, 5).half()),
    }
    dtypes = {"weight": "float32", "bias": "int64", "half": "float16"}
    held = {
        name: ExpectedTensor(dtype=dtypes[name], shape=tuple(shape), data=data)
        for name, (shape, _, data) in tensors.items()
    }
    check_format(GgufFormat(), gguf_bytes(tensors, {"texts": array(8, 2, text("ab") + text(""))}), held)


@pytest.mark.parametrize("legacy", [False, True], ids=["torch-zip", "torch-legacy"])
def test_views_of_shared_storages(legacy: bool) -> None:
    base = torch.randn(700, 500)
    views = {"base": base, "rows": base[3:90:2], "columns": base[:, 7:9], "turned": base.t()}
    check_format(TorchLegacyFormat() if legacy else TorchZipFormat(), torch_file(views, legacy=legacy), expected(views))


class RankFile:
    """A data file of a distributed checkpoint as a format, with fixed metadata."""

    name = "torch-distributed"

    def __init__(self, metadata: bytes, file: str) -> None:
        self._metadata = metadata
        self._file = file

    def matches(self, head: bytes) -> bool:
        return head.startswith(b"PK")

    def read_index(self, source: Source, limits: Limits) -> Index:
        return self._open(source, limits)[0]

    def locate(self, source: Source, index: Index, storages: Iterable[int]) -> Mapping[int, int]:
        return self._open(source, Limits())[1].locate(storages)

    def checksums(self, source: Source, limits: Limits) -> list[Checksum | CheckpointError]:
        return self._open(source, limits)[1].checksums(limits)

    def _open(self, source: Source, limits: Limits) -> tuple[Index, OpenFile]:
        directory = OneFile({METADATA_FILE: MemorySource(self._metadata, path=source.path), self._file: source})
        layout = CheckpointLayout(path="memory", directory=directory, kind="distributed", files=(METADATA_FILE,))
        index, (file,) = open_layout(layout, limits)
        return index, file


class OneFile:
    """A directory whose files are open sources."""

    path = "memory"

    def __init__(self, sources: Mapping[str, Source]) -> None:
        self._sources = sources

    def entries(self) -> Iterator[DirectoryEntry]:
        yield from ()

    def open(self, name: str) -> Source:
        return self._sources[name]

    def check_inside(self, name: str) -> None:
        """Accept every path."""


def test_the_data_files_of_distributed_checkpoints(tmp_path: Path) -> None:
    whole = {name: tensor for name, tensor in TENSORS.items() if tensor.dim() and tensor.numel()}
    distributed.write(tmp_path, {name: distributed.rows(tensor, 1) for name, tensor in whole.items()})
    (file,) = tmp_path.glob("*.distcp")
    rank_file = RankFile((tmp_path / METADATA_FILE).read_bytes(), file.name)
    check_format(rank_file, file.read_bytes(), expected(whole))


def test_too_little_data_is_refused() -> None:
    content = safetensors.torch.save({"w": torch.ones(3)})
    with pytest.raises(ValueError, match="at least 1048576 bytes, not 12"):
        check_format(SafetensorsFormat(), content, expected({"w": torch.ones(3)}))


class Flawed(SafetensorsFormat):
    """A correct format; each subclass breaks one requirement."""


class MatchesNothing(Flawed):
    def matches(self, head: bytes) -> bool:
        return False


class MatchesEverything(Flawed):
    def matches(self, head: bytes) -> bool:
        return True


class MatchesWithAnError(Flawed):
    def matches(self, head: bytes) -> bool:
        return head[8] == ord("{")


class OtherName(Flawed):
    def read_index(self, source: Source, limits: Limits) -> Index:
        return replace(super().read_index(source, limits), format="other")


class ForgetsItsFile(Flawed):
    def read_index(self, source: Source, limits: Limits) -> Index:
        return replace(super().read_index(source, limits), files=())


class LosesATensor(Flawed):
    def read_index(self, source: Source, limits: Limits) -> Index:
        index = super().read_index(source, limits)
        assert isinstance(index.tree, dict)
        return replace(index, tree={name: entry for name, entry in index.tree.items() if name != "scalar"})


class OtherDtype(Flawed):
    def read_index(self, source: Source, limits: Limits) -> Index:
        index = super().read_index(source, limits)
        assert isinstance(index.tree, dict)
        index.tree["weight"] = replace(index.tree["weight"], dtype="int32")
        return index


class Counts(Flawed):
    count = 0

    def read_index(self, source: Source, limits: Limits) -> Index:
        self.count += 1
        return replace(super().read_index(source, limits), metadata={"count": str(self.count)})


class ReadsEverything(Flawed):
    def read_index(self, source: Source, limits: Limits) -> Index:
        source.read_at(0, source.identity.nbytes)
        return super().read_index(source, limits)


class StoragesOutside(Flawed):
    def read_index(self, source: Source, limits: Limits) -> Index:
        index = super().read_index(source, limits)
        last = replace(index.storages[-1], nbytes=source.identity.nbytes)
        return replace(index, storages=(*index.storages[:-1], last))


class NeverLocates(Flawed):
    def read_index(self, source: Source, limits: Limits) -> Index:
        index = super().read_index(source, limits)
        return replace(index, storages=tuple(replace(storage, located=False) for storage in index.storages))


class LocatesUnasked(Flawed):
    def locate(self, source: Source, index: Index, storages: Iterable[int]) -> Mapping[int, int]:
        return {0: index.storages[0].offset}


class EntriesOutside(Flawed):
    def read_index(self, source: Source, limits: Limits) -> Index:
        index = super().read_index(source, limits)
        return replace(index, tree=map_leaves(index.tree, lambda entry: replace(entry, storage_offset=1)))


class OtherElements(Flawed):
    def read_index(self, source: Source, limits: Limits) -> Index:
        index = super().read_index(source, limits)
        shifted = tuple(replace(storage, offset=storage.offset - 8) for storage in index.storages)
        return replace(index, storages=shifted)


class LoosensTruncation(Flawed):
    """Accepts a file that lacks the end of its data."""

    def read_index(self, source: Source, limits: Limits) -> Index:
        try:
            return super().read_index(source, limits)
        except TruncatedError:
            index = super().read_index(MemorySource(CONTENT), limits)
            return replace(index, storages=tuple(replace(storage, offset=0, nbytes=0) for storage in index.storages))


class PythonsErrors(Flawed):
    def read_index(self, source: Source, limits: Limits) -> Index:
        try:
            return super().read_index(source, limits)
        except CheckpointError as error:
            raise EOFError from error


class NamelessErrors(Flawed):
    def read_index(self, source: Source, limits: Limits) -> Index:
        try:
            return super().read_index(source, limits)
        except CheckpointError as error:
            raise type(error)(error.problem) from error


class PythonsErrorsForDamage(Flawed):
    def read_index(self, source: Source, limits: Limits) -> Index:
        try:
            return super().read_index(source, limits)
        except FormatError as error:
            raise UnicodeDecodeError("utf-8", b"", 0, 1, "damaged") from error


class NoLimits(Flawed):
    def read_index(self, source: Source, limits: Limits) -> Index:
        return super().read_index(source, Limits())


class WrongChecksum(Flawed):
    def checksums(self, source: Source, limits: Limits) -> list[Checksum | CheckpointError]:
        return [Checksum(name="all", offset=0, nbytes=source.identity.nbytes, crc=1)]


class ChecksumOutside(Flawed):
    def checksums(self, source: Source, limits: Limits) -> list[Checksum | CheckpointError]:
        return [Checksum(name="all", offset=1, nbytes=source.identity.nbytes, crc=1)]


class ReportsDamage(Flawed):
    def checksums(self, source: Source, limits: Limits) -> list[Checksum | CheckpointError]:
        return [FormatError("damaged", file=source.path)]


class BlamesTheFile(Flawed):
    def read_index(self, source: Source, limits: Limits) -> Index:
        try:
            return super().read_index(source, limits)
        except ReadError as error:
            raise FormatError("the file is damaged", file=source.path) from error


class IgnoresFailedReads(Flawed):
    def read_index(self, source: Source, limits: Limits) -> Index:
        with suppress(ReadError):
            source.read_at(0, 1)
        return super().read_index(source, limits)


class OneAtATime(Flawed):
    """Keeps state between calls."""

    def __init__(self) -> None:
        self._busy = threading.Lock()
        self._others = threading.Event()

    def read_index(self, source: Source, limits: Limits) -> Index:
        if not self._busy.acquire(blocking=False):
            self._others.set()
            raise RuntimeError("already reading")
        try:
            if threading.current_thread() is not threading.main_thread():
                self._others.wait(10)
            return super().read_index(source, limits)
        finally:
            self._busy.release()


CONTENT = safetensors.torch.save(TENSORS)


@pytest.mark.parametrize(
    ("flawed", "check"),
    [
        (MatchesNothing, "matches"),
        (MatchesEverything, "matches"),
        (MatchesWithAnError, "matches"),
        (OtherName, "index"),
        (ForgetsItsFile, "index"),
        (LosesATensor, "index"),
        (OtherDtype, "index"),
        (Counts, "concurrent"),
        (ReadsEverything, "headers_only"),
        (StoragesOutside, "storages"),
        (NeverLocates, "storages"),
        (LocatesUnasked, "storages"),
        (EntriesOutside, "storages"),
        (OtherElements, "elements"),
        (LoosensTruncation, "truncated"),
        (PythonsErrors, "truncated"),
        (NamelessErrors, "truncated"),
        (PythonsErrorsForDamage, "damaged"),
        (NoLimits, "enforces_limits"),
        (WrongChecksum, "checksums"),
        (ChecksumOutside, "checksums"),
        (ReportsDamage, "checksums"),
        (BlamesTheFile, "read_errors"),
        (IgnoresFailedReads, "read_errors"),
        (OneAtATime, "concurrent"),
    ],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_what_a_check_is_for(flawed: type[Flawed], check: str) -> None:
    assert check in failed(flawed())


def failed(file_format: Format) -> list[str]:
    """Return the names of the checks that fail."""
    with pytest.raises(AssertionError, match="does not keep the protocol") as caught:
        check_format(file_format, CONTENT, EXPECTED)
    return [line.removeprefix("- ").partition(":")[0] for line in str(caught.value).splitlines()[1:] if line[0] == "-"]
