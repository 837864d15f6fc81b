"""The formats of the package keep the protocol."""

# ruff: noqa: ARG002 - methods have the arguments of the protocol
from __future__ import annotations

import io
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import safetensors.torch
import torch

from sluice._dtypes import dtype_name
from sluice._errors import CheckpointError
from sluice._options import Limits
from sluice.checkpoint.layout import METADATA_FILE, CheckpointLayout
from sluice.checkpoint.open_file import OpenFile
from sluice.checkpoint.opening import open_layout
from sluice.formats.gguf.reader import GgufFormat
from sluice.formats.protocol import Checksum, Format
from sluice.formats.safetensors.reader import SafetensorsFormat
from sluice.formats.torch_save.legacy_format import TorchLegacyFormat
from sluice.formats.torch_save.zip_format import TorchZipFormat
from sluice.records import Index
from sluice.sources.directory import DirectoryEntry
from sluice.sources.protocol import Source
from support import distributed
from support.format_conformance import ExpectedTensor, check_format
from support.gguf_files import array, gguf_bytes, packed, plain, text
from support.sources import MemorySource

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


def test_a_format_that_breaks_the_protocol_is_refused() -> None:
    class ReadsEverything(SafetensorsFormat):
        def read_index(self, source: Source, limits: Limits) -> Index:
            source.read_at(0, source.identity.nbytes)
            return super().read_index(source, Limits())

    with pytest.raises(AssertionError):
        check_format(ReadsEverything(), safetensors.torch.save(TENSORS), EXPECTED)
