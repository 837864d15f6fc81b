"""``sluice.verify``: intact checkpoints of every format are ok, and each kind of damage is found and named."""

from __future__ import annotations

import errno
import io
import json
import random
import shutil
import struct
import threading
import zipfile
from collections.abc import Callable
from functools import partial
from operator import floordiv
from pathlib import Path

import pytest
import torch

import sluice
from sluice import _defaults as defaults
from sluice._dtypes import ITEM_BYTES, torch_dtype
from sluice._threads import Workers
from sluice.checking.consumers import NonFiniteCounter
from sluice.formats.manifest import read_manifest
from support import fresh_process
from support.dtypes import TORCH_DTYPES
from support.system_calls import Injection, failing
from support.torch_files import compressed, coo, saved
from support.whole_checkpoints import MAKERS, Tensors, files_of, hashed, plain_tensors, views

pytestmark = pytest.mark.filterwarnings(
    "ignore:torch.quantize_per", "ignore:Sparse", "ignore:TypedStorage is deprecated"
)


@pytest.fixture(params=[(4096, 9000), (4 << 20, 24 << 20)], ids=["small pieces", "usual pieces"])
def pieces(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Read in the usual pieces, and in small ones that cut tensors."""
    window, batch = request.param
    monkeypatch.setattr(defaults, "SCAN_WINDOW_BYTES", window)
    monkeypatch.setattr(defaults, "SCAN_BATCH_BYTES", batch if batch > 9000 else 640)
    monkeypatch.setattr(defaults, "SCAN_JOB_BYTES", window // 4)


@pytest.mark.usefixtures("pieces")
@pytest.mark.parametrize("name", MAKERS)
def test_intact_checkpoints_are_ok_and_hashed_as_their_tensors(tmp_path: Path, name: str) -> None:
    tensors = MAKERS[name](tmp_path / "c")
    report = sluice.verify(tmp_path / "c", hashes="sha256", nan=True)
    assert report.ok, report
    assert report.hashes == {key: hashed(tensor) for key, tensor in tensors.items()}
    assert report.tensors == len(tensors)
    assert name == "tar" or report.nbytes >= sum(path.stat().st_size for path in files_of(tmp_path / "c"))
    assert name == "big-endian" or not report.non_finite  # byteswapped, its values are arbitrary
    report.write_manifest(tmp_path / "m.json")
    again = sluice.verify(tmp_path / "c", manifest=tmp_path / "m.json")
    assert again.ok, again


def flip(path: Path, at: int, bit: int = 1) -> None:
    content = bytearray(path.read_bytes())
    content[at] ^= bit
    path.write_bytes(content)


def records(path: Path) -> dict[str, tuple[int, int]]:
    """Return offset and bytes of the data of each record of an archive."""
    content = path.read_bytes()
    places = {}
    with zipfile.ZipFile(path) as archive:
        for info in archive.infolist():
            names, extra = struct.unpack_from("<HH", content, info.header_offset + 26)
            places[info.filename] = info.header_offset + 30 + names + extra, info.file_size
    return places


@pytest.mark.parametrize("writer", ["torch", "sluice"])
def test_one_changed_byte_in_any_record_of_an_archive_is_found(tmp_path: Path, writer: str) -> None:
    path, whole = tmp_path / "c.pt", tmp_path / "whole.pt"
    state = {**plain_tensors(), "Upper": torch.ones(3)}
    (torch.save if writer == "torch" else sluice.save)(state, whole)
    shutil.copy(whole, path)
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr(f"{archive.namelist()[0].split('/')[0]}/data/Unused", b"nothing refers to this")
    whole.write_bytes(path.read_bytes())
    places = records(path)
    assert len(places) > 12
    for name, (start, nbytes) in places.items():
        for at in {0, nbytes // 2, nbytes - 1} if nbytes else ():
            path.write_bytes(whole.read_bytes())
            flip(path, start + at, 0x10)
            report = sluice.verify(path)
            assert not report.ok, name
            problem = report.problems[0]
            assert (problem.kind, problem.file) == ("checksum", str(path))
            assert name in problem.problem
            assert problem.offset == start


@pytest.mark.parametrize("name", ["safetensors", "shards", "torch-legacy", "big-endian", "distributed"])
def test_a_changed_element_is_found_by_the_manifest(tmp_path: Path, name: str) -> None:
    tensors = MAKERS[name](tmp_path / "c")
    sluice.verify(tmp_path / "c", hashes="sha256").write_manifest(tmp_path / "m.json")
    wanted = tensors["half"].numpy()
    content = wanted.byteswap().tobytes() if name == "big-endian" else wanted.tobytes()
    (file,) = [one for one in files_of(tmp_path / "c") if content in one.read_bytes()]
    at = file.read_bytes().index(content)
    flip(file, at + 3)
    found = [("checksum", str(file), at)] if name in {"big-endian", "distributed"} else []  # others have no checksums
    assert [(one.kind, one.file, one.offset) for one in sluice.verify(tmp_path / "c").problems] == found
    report = sluice.verify(tmp_path / "c", manifest=tmp_path / "m.json")
    assert [(one.kind, one.tensor) for one in report.problems if one.kind != "checksum"] == [("hash", "half")]
    assert report.problems[-1].expected == hashed(tensors["half"]).hash


@pytest.mark.parametrize(
    ("change", "kind", "tensor"),
    [
        (lambda state: state.pop("ints"), "missing", "ints"),
        (lambda state: state.update(more=torch.ones(1)), "extra", "more"),
        (lambda state: state.update(ints=state["ints"].int()), "dtype", "ints"),
        (lambda state: state.update(ints=state["ints"].reshape(9)), "shape", "ints"),
        (lambda state: state.update(ints=state["ints"].to_sparse()), "layout", "ints"),
        (lambda state: state.update(ints=state["ints"] + 1), "hash", "ints"),
    ],
)
def test_tensors_that_differ_from_the_manifest(
    tmp_path: Path, change: Callable[[Tensors], object], kind: str, tensor: str
) -> None:
    state = plain_tensors()
    sluice.save(state, tmp_path / "f.pt", manifest=tmp_path / "m.json")
    change(state)
    torch.save(state, tmp_path / "f.pt")
    (problem,) = sluice.verify(tmp_path / "f.pt", manifest=tmp_path / "m.json").problems
    assert (problem.kind, problem.tensor) == (kind, tensor)


def test_a_missing_name_lists_similar_names(tmp_path: Path) -> None:
    state = plain_tensors()
    sluice.save(state, tmp_path / "f.pt", manifest=tmp_path / "m.json")
    state["model.a.w"] = state.pop("a.w")
    sluice.save(state, tmp_path / "f.pt", overwrite=True)
    missing, extra = sluice.verify(tmp_path / "f.pt", manifest=tmp_path / "m.json").problems
    assert missing.found == "'model.a.w', which is not in the manifest"
    assert (extra.kind, extra.tensor) == ("extra", "model.a.w")


@pytest.mark.parametrize("name", ["torch-zip", "torch-legacy", "safetensors"])
def test_a_truncated_file_is_a_report(tmp_path: Path, name: str) -> None:
    MAKERS[name](tmp_path / "c")
    content = (tmp_path / "c").read_bytes()
    for nbytes in (len(content) - 1, len(content) // 2, 40):
        (tmp_path / "c").write_bytes(content[:nbytes])
        report = sluice.verify(tmp_path / "c")
        assert not report.ok
        assert report.problems[0].kind in {"truncated", "structure"}
        assert str(report).startswith(f"checked no tensor of {tmp_path / 'c'}")


def test_contradictions_of_a_shard_index_are_problems_and_wrong_sizes_and_omissions_warnings(tmp_path: Path) -> None:
    MAKERS["shards"](tmp_path / "c")
    index = tmp_path / "c" / "model.safetensors.index.json"
    text = index.read_text(encoding="utf-8")
    files = sorted(set(json.loads(text)["weight_map"].values()))

    def verified(part: str, **changes: object) -> sluice.VerifyReport:
        content = json.loads(text)
        content[part] = {name: value for name, value in (content[part] | changes).items() if value is not None}
        index.write_text(json.dumps(content), encoding="utf-8")
        return sluice.verify(tmp_path / "c")

    report = verified("metadata", total_size=8)
    assert report.ok
    assert "total size" in report.warnings[0]
    assert f"warning: {report.warnings[0]}" in str(report)
    assert not report.notes
    report = verified("weight_map", ints=None)
    assert report.ok
    assert "not in their index (1): ints" in report.warnings[0]
    (problem,) = verified("weight_map", **{"a.w": files[-1]}).problems
    assert problem.kind == "structure"
    assert "not in the shard that the index names" in problem.problem
    (tmp_path / "c" / files[0]).unlink()
    report = verified("metadata")
    (problem,) = report.problems
    assert problem.kind == "incomplete"
    assert files[0] in problem.problem
    assert "\\n" not in str(report)  # a list of files is one line of the table


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (coo([[0, 4], [0, 4]], (4, 5)), "index of dimension 0 of a sparse tensor is out of range"),
        (compressed("sparse_bsc", [0, 1, 1, 3], [2, 3, 3], (4, 3)), "not sorted in a row or not distinct"),
    ],
)
def test_sparse_indices_that_lie(tmp_path: Path, content: bytes, problem: str) -> None:
    (tmp_path / "f.pt").write_bytes(content)
    (found,) = sluice.verify(tmp_path / "f.pt").problems
    assert (found.kind, found.tensor, found.file) == ("structure", "w", str(tmp_path / "f.pt"))
    assert problem in found.problem


def test_a_damaged_header_of_a_record_is_found_with_all_other_damage(tmp_path: Path) -> None:
    torch.save({"a": torch.ones(100), "b": torch.zeros(100), "c": torch.ones(100)}, tmp_path / "f.pt")
    places = records(tmp_path / "f.pt")
    first = {name.rpartition("/")[2]: start for name, (start, _) in places.items()}
    content = (tmp_path / "f.pt").read_bytes()
    flip(tmp_path / "f.pt", content.rindex(b"PK\3\4", 0, first["1"]) + 32)  # inside the name
    flip(tmp_path / "f.pt", first["2"])
    kinds = {(one.kind, one.offset) for one in sluice.verify(tmp_path / "f.pt", hashes="sha256").problems}
    assert kinds == {("structure", content.rindex(b"PK\3\4", 0, first["1"])), ("checksum", first["2"])}


def test_records_whose_writer_computed_no_checksum_are_named(tmp_path: Path) -> None:
    computes = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        torch.save({"a": torch.ones(100), "empty": torch.ones(0)}, tmp_path / "f.pt")
    finally:
        torch.serialization.set_crc32_options(computes)
    report = sluice.verify(tmp_path / "f.pt")
    assert report.ok
    assert "f/data/0" in report.without_checksum
    assert "f/data/1" not in report.without_checksum  # nothing to check
    assert "records without a CRC-32" in str(report)


def test_what_cannot_be_read_is_named_and_the_rest_still_verified(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(defaults, "SCAN_WINDOW_BYTES", 4096)
    state = {f"t{number}": torch.full((2048,), float(number)) for number in range(6)}
    sluice.save(state, tmp_path / "f.safetensors", manifest=tmp_path / "m.json")
    with sluice.open(tmp_path / "f.safetensors") as checkpoint:
        bad = checkpoint.index.storages[checkpoint["t3"].entry.storage].offset + 4000
        checkpoint.entries  # noqa: B018  (indexed before the disk fails)

        def fail(read: Callable[[memoryview], int], buffer: memoryview, offset: int) -> int:
            if offset <= bad < offset + len(buffer):
                failing(errno.EIO)()
            return read(buffer)

        injected = Injection(monkeypatch, fail)
        report = sluice.verify(checkpoint, manifest=tmp_path / "m.json")
    assert injected.hits
    assert [one.kind for one in report.problems] == ["unreadable"]
    offset = report.problems[0].offset
    assert offset is not None
    assert offset <= bad < offset + 8192
    assert set(report.hashes) == set(state) - {"t3"}
    with pytest.raises(sluice.SaveError, match=r"cannot be written for a checkpoint with problems; found 1 problem\."):
        report.write_manifest(tmp_path / "n.json")


def test_files_other_than_checkpoints_are_an_error(tmp_path: Path) -> None:
    with pytest.raises(sluice.CheckpointError, match="does not exist"):
        sluice.verify(tmp_path / "nowhere")
    with zipfile.ZipFile(tmp_path / "script.pt", "w") as archive:
        archive.writestr("serialized_exported_program.json", b"x")
    with pytest.raises(sluice.UnsupportedError, match="exported program of torch before"):
        sluice.verify(tmp_path / "script.pt")
    (tmp_path / "text").write_text("hello, this is text", encoding="utf-8")
    (problem,) = sluice.verify(tmp_path / "text").problems  # it may once have been a checkpoint
    assert problem.problem == "this is text, not a checkpoint"
    sluice.save(plain_tensors(), tmp_path / "f.pt")
    with pytest.raises(sluice.CheckpointError, match=r"m\.json: the file does not exist"):
        sluice.verify(tmp_path / "f.pt", manifest=tmp_path / "m.json")
    with pytest.raises(ValueError, match="unknown hash 'md5'"):
        sluice.verify(tmp_path / "f.pt", hashes="md5")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="the report has no hashes"):
        sluice.verify(tmp_path / "f.pt").write_manifest(tmp_path / "m.json")


def test_a_file_that_changes_meanwhile_is_an_error(tmp_path: Path) -> None:
    sluice.save(plain_tensors(), tmp_path / "f.pt")

    with sluice.open(tmp_path / "f.pt") as checkpoint:
        with (tmp_path / "f.pt").open("ab") as file:
            file.write(b"x")
        with pytest.raises(sluice.SourceChangedError):
            sluice.verify(checkpoint)


def test_names_that_hashes_cannot_tell_apart_are_an_error_and_fine_without_hashes(tmp_path: Path) -> None:
    torch.save({"a.b": torch.ones(2), "a": {"b": torch.zeros(2)}}, tmp_path / "f.pt")
    assert sluice.verify(tmp_path / "f.pt").tensors == 2
    with pytest.raises(sluice.FormatError, match="same dotted name"):
        sluice.verify(tmp_path / "f.pt", hashes="sha256")


def test_a_small_file_cannot_ask_for_endless_work(tmp_path: Path) -> None:
    torch.save({"a": torch.ones(1).expand(1 << 40)}, tmp_path / "f.pt")
    assert sluice.verify(tmp_path / "f.pt").ok
    with pytest.raises(sluice.LimitError, match=r"repeats its stored elements too often.*key="):
        sluice.verify(tmp_path / "f.pt", nan=True)


def test_one_object_of_several_in_a_file(tmp_path: Path) -> None:
    first, second = (saved({name: torch.ones(50)}, legacy=True) for name in "ab")
    report = sluice.verify(io.BytesIO(first + second), hashes="sha256")
    assert report.hashes == {"a": hashed(torch.ones(50))}
    assert report.nbytes == len(first) + 200  # a short tensor is read a second time
    (tmp_path / "f").write_bytes(b"in front" + saved({"a": torch.ones(50)}))
    with (tmp_path / "f").open("rb") as file:
        file.seek(8)
        assert sluice.verify(file, hashes="sha256").hashes == {"a": hashed(torch.ones(50))}


def test_counts_of_non_finite_values(tmp_path: Path) -> None:
    nan, inf = float("nan"), float("inf")
    state = {
        "fine": torch.ones(3),
        "both": torch.tensor([nan, 1, inf, -inf, nan]),
        "complex": torch.tensor([complex(nan, 1), complex(1, inf), complex(nan, inf), 1]),
        "transposed": torch.tensor([[nan, 1.0], [2.0, 3.0], [nan, nan]]).t(),
        "ints": torch.arange(3),
        "sparse": torch.tensor([0, nan, 1]).to_sparse(),
    }
    state["tied"] = state["both"]
    torch.save(state, tmp_path / "f.pt")
    report = sluice.verify(tmp_path / "f.pt", nan=True)
    assert report.ok
    assert {name: (found.nan, found.inf) for name, found in report.non_finite.items()} == {
        "both": (2, 2),
        "tied": (2, 2),
        "complex": (2, 2),
        "transposed": (3, 0),
        "sparse": (1, 0),
    }
    assert "elements that are not finite NaN infinite" in " ".join(str(report).split())
    assert "both 2 2 tied 2 2 complex 2 2" in " ".join(str(report).split())


@pytest.mark.parametrize("dtype", [name for name in TORCH_DTYPES if NonFiniteCounter.counts(name)])
def test_non_finite_elements_are_those_of_torch(dtype: str) -> None:
    item = ITEM_BYTES[dtype]
    every = b"".join(number.to_bytes(item, "little") for number in range(256**item)) if item < 3 else b""
    raw = every or random.Random(1).randbytes(8 * item) + b"\xff" * 8 * item + b"\0\0\x80\x7f" * 4 * item
    tensor = torch.frombuffer(bytearray(raw), dtype=torch_dtype(dtype))
    counter = NonFiniteCounter()
    for first in range(0, len(tensor), 1000):
        counter.update(tensor[first : first + 1000])
    wide = tensor.to(torch.complex64) if dtype == "complex32" else tensor
    wide = wide if wide.is_complex() else wide.to(torch.float64)
    assert (counter.nan, counter.inf) == (int(wide.isnan().sum()), int(wide.isinf().sum()))


def test_progress_ends_at_the_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.save(plain_tensors() | views() | {"sparse": torch.eye(3).to_sparse()}, tmp_path / "f.pt")
    seen: list[sluice.ProgressEvent] = []
    report = sluice.verify(tmp_path / "f.pt", hashes="xxh3_128", progress=seen.append)
    assert seen[-1].done_bytes == seen[-1].total_bytes == report.nbytes
    assert json.loads(json.dumps(report.to_json()))["ok"] is True
    monkeypatch.setenv("HOME", str(tmp_path))
    report.write_manifest("~/m.json")
    assert read_manifest(str(tmp_path / "m.json"), sluice.Limits()).algorithm == "xxh3_128"


@pytest.mark.parametrize("count", [0, 1, 3])
def test_workers_do_what_they_are_given_and_raise_what_it_raised(count: int) -> None:
    with Workers(count, "test") as workers:
        jobs = [workers.start(partial(floordiv, 10, number)) for number in (1, 2, 0, 5)]
        assert jobs[0].result() == 10
        assert jobs[1].result() == 5
        with pytest.raises(ZeroDivisionError):
            jobs[2].result()
        assert jobs[3].result() == 2


def test_workers_forget_what_waits_when_the_block_fails() -> None:
    done: list[int] = []
    gate = threading.Lock()
    gate.acquire()

    def pass_gate(number: int) -> None:
        with gate:
            done.append(number)

    with pytest.raises(RuntimeError), Workers(1, "test") as workers:  # noqa: PT012  (the block is the test)
        for number in range(5):
            workers.start(partial(pass_gate, number))
        timer = threading.Timer(0.05, gate.release)
        timer.start()
        raise RuntimeError
    timer.join()
    assert done in ([], [0])


CODE = """
import sys, torch, sluice
from sluice.testing import assert_peak
path, warm = sys.argv[1:]
sluice.verify(warm, hashes="sha256", nan=True)
with assert_peak((64 + 32) << 20):
    report = sluice.verify(path, hashes="sha256", nan=True)
assert report.ok, report
"""


@pytest.mark.usefixtures("fresh_processes")
@pytest.mark.parametrize("kind", ["f.pt", "f.safetensors"])
def test_memory_stays_below_the_gate_for_any_size_of_a_tensor(tmp_path: Path, kind: str) -> None:
    state = {"large": torch.ones(28 << 20), "transposed": torch.ones(4096, 2048).t(), "small": torch.ones(9)}  # 269 MiB
    state |= {f"held {number}": torch.ones(1024, 1000).t() for number in range(32)}
    sluice.save(state, tmp_path / kind)
    sluice.save({"w": torch.ones(9, 9).t()}, tmp_path / f"warm.{kind}")
    done = fresh_process.run(CODE, tmp_path / kind, tmp_path / f"warm.{kind}")
    (tmp_path / kind).unlink()
    assert done.returncode == 0, done.stderr
