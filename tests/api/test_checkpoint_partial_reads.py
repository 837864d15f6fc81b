"""Slices and parts read only the bytes that they need: recorded reads of every format."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, TypeAlias

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

import sluice
from sluice import _defaults as defaults
from sluice.machine import facts as machine_facts
from sluice.sources.local import LocalFile
from support import directories, distributed
from support.directories import Tensors
from support.plans import keys_of
from support.sources import RecordingSource, record_reads
from support.trained_net import empty
from support.watching import watch

#: File, first byte and size of a read.
Range: TypeAlias = tuple[str, int, int]

#: Coalescing gap of most tests, in bytes: 16 elements, so that small files have gaps above and below it.
GAP_BYTES = 64


@pytest.fixture(autouse=True)
def _small_gap(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(defaults, "COALESCE_GAP_BYTES", GAP_BYTES)


def numbered(*shape: int, start: int = 0) -> torch.Tensor:
    """Return a tensor of distinct elements, so that its bytes can be located in a file."""
    return torch.arange(start, start + torch.Size(shape).numel(), dtype=torch.float32).reshape(shape)


def write_distributed(path: Path, tensors: Tensors) -> Path:
    return distributed.save(path, dict(tensors))


WRITERS = (
    *(directories.write_zip, directories.write_legacy, directories.write_safetensors, directories.write_model),
    *(directories.write_parts, directories.write_parameters, directories.write_shards),
    *(directories.write_pickled_shards, write_distributed),
)

every_format = pytest.mark.parametrize("write", WRITERS, ids=lambda write: write.__name__.removeprefix("write_"))


class Recorded:
    """An open checkpoint with recorded reads."""

    def __init__(self, checkpoint: sluice.Checkpoint, recordings: tuple[RecordingSource, ...]) -> None:
        self.checkpoint = checkpoint
        self._recordings = recordings

    def reads(self) -> list[Range]:
        """Return the reads since the last call."""
        found = [(source.path, read.offset, read.nbytes) for source in self._recordings for read in source.reads]
        for source in self._recordings:
            source.reads.clear()
        return sorted(found)

    def needed(self, stored: torch.Tensor, key: Any = ..., gap_bytes: int = GAP_BYTES) -> list[Range]:
        """Return the byte ranges of ``stored[key]`` in its file, joined over small gaps."""
        storage = torch.empty(0, dtype=stored.dtype).set_(stored.untyped_storage())
        places = [(path, Path(path).read_bytes().find(storage.numpy().tobytes())) for path in self.checkpoint.files]
        [(path, base)] = [place for place in places if place[1] >= 0]
        numbers = torch.arange(storage.numel()).as_strided(stored.shape, stored.stride(), stored.storage_offset())[key]
        item = stored.element_size()
        runs: list[Range] = []
        for number in sorted(set(numbers.flatten().tolist())):
            first = base + number * item
            if runs and first - (runs[-1][1] + runs[-1][2]) <= gap_bytes:
                runs[-1] = (path, runs[-1][1], first + item - runs[-1][1])
            else:
                runs.append((path, first, item))
        return runs


@contextmanager
def recorded(path: Path) -> Iterator[Recorded]:
    """Open a checkpoint, locate its data, and record the reads that follow."""
    with sluice.open(path) as checkpoint:
        for tensor in checkpoint.values():
            if tensor.shape:
                tensor[:1].read()  # local headers of a zip file stand next to the data
        yield Recorded(checkpoint, record_reads(checkpoint))


KEYS: dict[str, Any] = {
    "rows": slice(10, 20),
    "rows and every second column": (slice(10, 20), slice(None, None, 2)),
    "columns with small gaps": (slice(None), slice(5, 40)),
    "columns with large gaps": (slice(None), slice(5, 15)),
    "one column": (slice(None), 7),
    "rows far apart": slice(None, None, 7),
    "rows far apart and one column": (slice(3, None, 9), 49),
    "one row": -1,
    "one element": (3, 4),
    "three dimensions": (slice(2, 4), None, ..., slice(0, 50, 25)),
    "everything": ...,
    "last rows": slice(-2, 1000),
    "no rows": slice(5, 5),
    "no columns": (slice(None), slice(60, None)),
}


@every_format
def test_a_slice_reads_its_runs(tmp_path: Path, write: Callable[[Path, Tensors], Path]) -> None:
    tensors = {"a": numbered(100), "w": numbered(30, 50, start=1000), "z": numbered(7, 3, start=5000)}
    with recorded(write(tmp_path, tensors)) as file:
        for what, key in KEYS.items():
            assert torch.equal(file.checkpoint["w"][key].read(), tensors["w"][key]), what
            assert file.reads() == file.needed(tensors["w"], key), what


@every_format
def test_an_empty_slice_reads_nothing_at_all(tmp_path: Path, write: Callable[[Path, Tensors], Path]) -> None:
    with sluice.open(write(tmp_path, {"w": numbered(30, 50)})) as checkpoint:
        recordings = record_reads(checkpoint)
        assert checkpoint["w"][3:3, ::2].read().shape == (0, 25)
        assert checkpoint["w"][:, 50:].read(dtype=torch.bfloat16).dtype == torch.bfloat16
        assert [source.reads for source in recordings] == [[]]  # neither data nor local headers


@every_format
def test_a_slice_into_memory_that_exists(tmp_path: Path, write: Callable[[Path, Tensors], Path]) -> None:
    tensors = {"w": numbered(30, 50)}
    out = torch.zeros(3, 30, dtype=torch.float64).t()
    with recorded(write(tmp_path, tensors)) as file:
        file.checkpoint["w"][:, 10:40:10].read(out=out)
        assert torch.equal(out, tensors["w"][:, 10:40:10].double())
        assert file.reads() == file.needed(tensors["w"], (slice(None), slice(10, 40, 10)))


def test_an_expanded_tensor_is_held_once(tmp_path: Path) -> None:
    column = numbered(1000, 50)[:, :1].expand(1000, 3000)
    torch.save({"w": column}, tmp_path / "f.pth")
    with sluice.open(tmp_path / "f.pth") as checkpoint:
        for key in (..., slice(None, None, 10)):
            found = checkpoint["w"][key].read()
            assert torch.equal(found, column[key])
            assert found.untyped_storage().nbytes() == 4 * len(found)


def test_the_real_gap(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    gap = defaults.COALESCE_GAP_BYTES
    tensors = {"below": numbered(3, gap // 4 + 1), "above": numbered(3, gap // 4 + 2, start=1 << 20)}
    with recorded(directories.write_safetensors(tmp_path, tensors)) as file:
        for name, reads in (("below", 1), ("above", 3)):
            file.checkpoint[name][:, 0].read()
            found = file.reads()
            assert len(found) == reads
            assert found == file.needed(tensors[name], (slice(None), 0), gap)


@pytest.mark.parametrize("rows", [slice(100, 400), (slice(None), slice(0, 1020, 2))], ids=["rows", "columns"])
def test_what_passes_the_gate_in_parts_is_read_once(tmp_path: Path, rows: Any) -> None:
    tensors = {"w": numbered(1000, 1024)}
    memory = sluice.MemoryLimits(staging="1MiB")
    with recorded(directories.write_safetensors(tmp_path, tensors)) as file:
        found = file.checkpoint["w"][rows].read(dtype=torch.float64, memory=memory)
        assert torch.equal(found, tensors["w"][rows].double())
        reads = file.reads()
        [(_, first, nbytes)] = file.needed(tensors["w"], rows)
        assert len(reads) > 1
        assert (reads[0][1], reads[-1][1] + reads[-1][2]) == (first, first + nbytes)
        ends = [offset + size for _, offset, size in reads]
        assert all(0 <= start - end <= GAP_BYTES for end, (_, start, _) in zip(ends, reads[1:], strict=False))


def test_a_large_slice_without_a_cast_is_read_to_its_place(tmp_path: Path) -> None:
    tensors = {"w": numbered(1000, 1024)}
    with recorded(directories.write_safetensors(tmp_path, tensors)) as file:
        assert torch.equal(file.checkpoint["w"][100:400].read(), tensors["w"][100:400])
        assert file.reads() == file.needed(tensors["w"], slice(100, 400))


@every_format
def test_loading_a_part_reads_only_its_bytes(
    tmp_path: Path, write: Callable[[Path, Tensors], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(defaults, "COALESCE_GAP_BYTES", 0)
    tensors = {f"{part}.{name}": tensor for part in "abc" for name, tensor in parameters(ord(part)).items()}
    module = empty(lambda: nn.Linear(20, 30))
    with recorded(write(tmp_path, tensors)) as file:
        sluice.load_into(module, file.checkpoint, key="b")
        wanted = [file.needed(tensors[f"b.{name}"], gap_bytes=0)[0] for name in ("weight", "bias")]
        assert covered(file.reads()) == covered(wanted)
    assert torch.equal(module.weight, tensors["b.weight"])


def parameters(start: int) -> Tensors:
    return {"weight": numbered(30, 20, start=start * 1000), "bias": numbered(30, start=start * 1000 + 600)}


def covered(ranges: list[Range]) -> Mapping[str, set[int]]:
    """Return every byte of the ranges, by file; fail if a byte occurs twice."""
    found: dict[str, set[int]] = {}
    for path, offset, nbytes in ranges:
        bytes_ = set(range(offset, offset + nbytes))
        assert not found.setdefault(path, set()) & bytes_
        found[path] |= bytes_
    return found


def test_a_state_dict_of_a_few_rows_reads_those_rows(tmp_path: Path) -> None:
    storage = numbered(1000, 50)
    with recorded(directories.write_zip(tmp_path, {"rows": storage[500:510]})) as file:
        found = sluice.load_state_dict(file.checkpoint)
        assert found["rows"].untyped_storage().nbytes() == 4 * 10 * 50
        assert file.reads() == file.needed(storage[500:510])


def test_zip_headers_are_read_once_for_each_tensor_that_is_asked_for(tmp_path: Path) -> None:
    tensors = {"a": numbered(100_000), "b": numbered(100_000, start=1 << 20), "c": numbered(3, start=1 << 22)}
    with sluice.open(directories.write_zip(tmp_path, tensors)) as checkpoint:
        [recording] = record_reads(checkpoint)
        checkpoint["b"][:3].read()
        header, data = recording.reads
        assert header.nbytes <= 512
        assert data.nbytes == 12
        checkpoint["b"][4].read()
        assert len(recording.reads) == 3


def test_direct_reads_round_to_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows, columns = 5000, 4096
    header = json.dumps({"w": {"dtype": "F32", "shape": [rows, columns], "data_offsets": [0, rows * columns * 4]}})
    path = tmp_path / "f.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header.encode())
    with path.open("r+b") as file:
        file.truncate(8 + len(header) + rows * columns * 4)
    monkeypatch.setattr(machine_facts, "probe_cache", lambda _, offsets: (0.0,) * len(offsets))
    with closing(LocalFile(path)) as source:
        if not (known := machine_facts.file_facts(source)).direct_io:
            pytest.skip(f"no direct reads on {known.filesystem}")
    reads: list[tuple[int, int, bool]] = []
    with sluice.open(path) as checkpoint:
        watch(monkeypatch, LocalFile, "read_into", lambda _, at, into, direct: reads.append((at, len(into), direct)))
        assert not checkpoint["w"][3000:3100].read().any()
    wanted = 8 + len(header) + 3000 * columns * 4
    assert reads == [(wanted // 4096 * 4096, 100 * columns * 4 + 4096, True)]


sizes = st.integers(1, 6)


@st.composite
def views(draw: st.DrawFn) -> torch.Tensor:
    """Draw a view of a storage: any steps, any order of dimensions, some dimensions expanded."""
    shape = draw(st.lists(sizes, min_size=1, max_size=3))
    tensor = numbered(*(size * 3 for size in shape))
    tensor = tensor[tuple(slice(draw(sizes), None, draw(sizes)) for _ in shape)]
    tensor = tensor.permute(draw(st.permutations(range(len(shape)))))
    for _ in range(draw(st.integers(0, 2))):
        tensor = tensor.unsqueeze(draw(st.integers(0, tensor.dim())))
    return tensor.expand([draw(sizes) if size == 1 else size for size in tensor.shape])


@given(st.data(), views(), st.sampled_from([0, 4, 12, 64]))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_slice_of_any_view(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject, stored: torch.Tensor, gap_bytes: int
) -> None:
    key = data.draw(keys_of(stored))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(defaults, "COALESCE_GAP_BYTES", gap_bytes)
        write = data.draw(st.sampled_from([directories.write_zip, directories.write_legacy]))
        with recorded(write(tmp_path_factory.mktemp("view"), {"w": stored})) as file:
            found = file.checkpoint["w"][key].read()
            assert torch.equal(found, stored[key])
            assert file.reads() == file.needed(stored, key, gap_bytes)
