"""The conformance suite of formats: the package's formats pass, and each check fails for a broken format."""

# ruff: noqa: ARG002 - methods have the arguments of the protocol
from __future__ import annotations

import io
import itertools
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

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
from sluice.records import Index, Storage, elements_of
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


CONTENT = safetensors.torch.save(TENSORS)

_RIGHT = SafetensorsFormat()


def flawed(**methods: Any) -> Format:
    """Return a correct format with other methods, which get the correct format in place of ``self``."""
    bound = {name: lambda _, *arguments, method=method: method(_RIGHT, *arguments) for name, method in methods.items()}
    return type("Flawed", (SafetensorsFormat,), bound)()  # type: ignore[no-any-return]


def changed(change: Callable[[Index, Source], Index]) -> Format:
    """Return a format whose indexes are changed."""
    return flawed(read_index=lambda right, source, limits: change(right.read_index(source, limits), source))


def raising(kinds: type[Exception], raised: Callable[[Any, Source], Exception]) -> Format:
    """Return a format that raises other errors."""

    def read_index(right: Format, source: Source, limits: Limits) -> Index:
        try:
            return right.read_index(source, limits)
        except kinds as error:
            raise raised(error, source) from error

    return flawed(read_index=read_index)


def storages(index: Index, **changes: Callable[[Storage], object]) -> Index:
    made = (replace(each, **{name: of(each) for name, of in changes.items()}) for each in index.storages)  # type: ignore[arg-type]
    return replace(index, storages=tuple(made))


def checksum(offset: int, source: Source) -> Checksum:
    return Checksum(name="all", offset=offset, nbytes=source.identity.nbytes, crc=1)


def accepts_truncation(right: Format, source: Source, limits: Limits) -> Index:
    try:
        return right.read_index(source, limits)
    except TruncatedError:
        index = right.read_index(MemorySource(CONTENT), limits)
        return storages(index, offset=lambda _: 0, nbytes=lambda _: 0)


def reads_everything(right: Format, source: Source, limits: Limits) -> Index:
    source.read_at(0, source.identity.nbytes)
    return right.read_index(source, limits)


def ignores_failed_reads(right: Format, source: Source, limits: Limits) -> Index:
    with suppress(ReadError):
        source.read_at(0, 1)
    return right.read_index(source, limits)


class OneAtATime(SafetensorsFormat):
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


_COUNT = itertools.count()


@pytest.mark.parametrize(
    ("file_format", "check"),
    [
        (flawed(matches=lambda *_: False), "matches"),
        (flawed(matches=lambda *_: True), "matches"),
        (flawed(matches=lambda _, head: head[8] == ord("{")), "matches"),
        (changed(lambda index, _: replace(index, format="other")), "index"),
        (changed(lambda index, _: replace(index, files=())), "index"),
        (changed(lambda index, _: replace(index, tree={**cast("dict[str, Any]", index.tree), "scalar": 1})), "index"),
        (
            changed(
                lambda index, _: replace(
                    index, tree=map_leaves(index.tree, lambda e: replace(e, elements=elements_of("int32")))
                )
            ),
            "index",
        ),
        (changed(lambda index, _: replace(index, metadata={"count": str(next(_COUNT))})), "concurrent"),
        (flawed(read_index=reads_everything), "headers_only"),
        (changed(lambda index, source: storages(index, nbytes=lambda _: source.identity.nbytes)), "storages"),
        (changed(lambda index, _: storages(index, located=lambda _: False)), "storages"),
        (flawed(locate=lambda _, _source, index, *_rest: {0: index.storages[0].offset}), "storages"),
        (
            changed(
                lambda index, _: replace(index, tree=map_leaves(index.tree, lambda e: replace(e, storage_offset=1)))
            ),
            "storages",
        ),
        (changed(lambda index, _: storages(index, offset=lambda storage: storage.offset - 8)), "elements"),
        (flawed(read_index=accepts_truncation), "truncated"),
        (raising(CheckpointError, lambda *_: EOFError()), "truncated"),
        (raising(CheckpointError, lambda error, _: type(error)(error.problem)), "truncated"),
        (raising(FormatError, lambda *_: UnicodeDecodeError("utf-8", b"", 0, 1, "damaged")), "damaged"),
        (flawed(read_index=lambda right, source, _: right.read_index(source, Limits())), "enforces_limits"),
        (flawed(checksums=lambda _, source, *_limits: [checksum(0, source)]), "checksums"),
        (flawed(checksums=lambda _, source, *_limits: [checksum(1, source)]), "checksums"),
        (flawed(checksums=lambda _, source, *_limits: [FormatError("damaged", file=source.path)]), "checksums"),
        (raising(ReadError, lambda _, source: FormatError("the file is damaged", file=source.path)), "read_errors"),
        (flawed(read_index=ignores_failed_reads), "read_errors"),
        (OneAtATime(), "concurrent"),
    ],
)
def test_what_a_check_is_for(file_format: Format, check: str) -> None:
    with pytest.raises(AssertionError, match="does not keep the protocol") as caught:
        check_format(file_format, CONTENT, EXPECTED)
    assert check in {line.removeprefix("- ").partition(":")[0] for line in str(caught.value).splitlines()[1:]}
