"""Checkpoints under deltas: equal to the new checkpoint, bit for bit; hostile deltas are refused by name."""

from __future__ import annotations

import gc
import io
import json
import zlib
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.utils._python_dispatch import TorchDispatchMode

import sluice
from sluice.merging import deltas, patches
from sluice.reading.reader import CheckpointReader
from support.directories import assert_same
from support.watching import watch

packs = pytest.mark.skipif(find_spec("zstandard") is None, reason="packed deltas need sluice[delta]")
if find_spec("zstandard"):
    import zstandard

State = dict[str, torch.Tensor]
DTYPES = (torch.bfloat16, torch.float32, torch.float16, torch.int64, torch.uint8, torch.bool, torch.complex64)


def states(random: Random, steps: int) -> list[State]:
    """Return the states of a training: some elements of some tensors change in each step."""
    torch.manual_seed(random.randrange(1 << 30))
    first: State = {"norm": torch.ones(7), "steps": torch.tensor(3), "empty": torch.empty(0, 4)}
    for number in range(random.randrange(3, 9)):
        shape = [random.randrange(1, 40) for _ in range(random.randrange(4))]
        first[f"layers.{number}.weight"] = torch.randint(-9, 9, shape).to(random.choice(DTYPES))
    found = [first]
    for step in range(steps):
        state = {name: tensor.clone() for name, tensor in found[-1].items()}
        state["steps"] += 1
        for tensor in random.sample(list(state.values()), len(state) // 2):
            flat = tensor.view(-1)
            if len(flat):
                places = torch.randint(len(flat), (max(1, len(flat) // 5),))
                flat[places] = torch.randint(-50, 50, places.shape).add(step).to(flat.dtype)
        found.append(state)
    return found


def saved(state: State, path: Path, random: Random) -> str:
    kind = random.choice(["one", "shards", "pth", "nested"])
    if kind == "one":
        save_file(state, path.with_suffix(".safetensors"))
        return str(path.with_suffix(".safetensors"))
    if kind == "shards":
        sluice.save(state, path, max_shard_size="2KB")
        return str(path)
    torch.save({"model": state, "epoch": 1} if kind == "nested" else state, path.with_suffix(".pth"))
    return str(path.with_suffix(".pth"))


def packed(folder: Path, old: State, new: State, version: int, *, encoding: str = "xor", **changes: Any) -> str:
    """Write a delta as slime's update_weight_from_disk_delta does: two files, with a checksum of each new tensor."""
    path = folder / f"weight_v{version:06d}"
    path.mkdir()
    files: list[tuple[State, dict[str, str]]] = [({}, {}), ({}, {})]
    for number, name in enumerate(name for name in new if not torch.equal(old[name], new[name])):
        one, other = (bytes(each[name].reshape(-1).view(torch.uint8).numpy()) for each in (old, new))
        content = bytes(x ^ y for x, y in zip(one, other, strict=True))
        if encoding == "overwrite":
            places = [place for place, byte in enumerate(content) if byte]
            content = b"".join(place.to_bytes(4, "little") for place in (len(places), *places))
            content += bytes(other[place] for place in places)
        content = changes.get("change", bytes)(content)
        frame = changes.get("pack", zstandard.ZstdCompressor(level=1).compress)(content)
        tensors, checksums = files[number % 2]
        tensors[name] = torch.frombuffer(bytearray(frame), dtype=torch.uint8)
        checksums[name] = f"{zlib.adler32(other):08x}"
    weight_map = {}
    for number, (tensors, checksums) in enumerate(files):
        if tensors:
            name = f"model-{number:05d}-of-00002.safetensors"
            save_file(tensors, path / name, metadata=changes.get("checksums", checksums))
            weight_map.update(dict.fromkeys(tensors, name))
    metadata = {"version": f"{version:06d}", "base_version": f"{version - 1:06d}", "delta_encoding": encoding}
    metadata |= {"compression_format": "zstd", "checksum_format": "adler32", **changes.get("metadata", {})}
    (path / "model.safetensors.index.json").write_text(json.dumps({"metadata": metadata, "weight_map": weight_map}))
    return str(path)


@packs
@pytest.mark.parametrize("seed", range(12))
def test_a_chain_of_deltas_equals_the_last_checkpoint(tmp_path: Path, seed: int) -> None:
    random = Random(seed)
    found = states(random, 3)
    base = saved(found[0], tmp_path / "base", random)
    deltas = []
    for version in range(1, 4):
        old, new = found[version - 1 : version + 1]
        if random.random() < 0.5:
            deltas.append(packed(tmp_path, old, new, version, encoding=random.choice(["xor", "overwrite"])))
            continue
        sparse = random.random() < 0.5
        one, other = tmp_path / f"from-{version - 1}.safetensors", tmp_path / f"to-{version}.safetensors"
        save_file(old, one)
        save_file(new, other)
        deltas.append(str(tmp_path / (f"step_{version}.safetensors" if sparse else f"weight_v{version:06d}")))
        assert not sluice.diff(one, other, patch=deltas[-1], sparse=sparse).same
    patched = sluice.Patched(base, *deltas)
    assert_same(sluice.load_state_dict(patched), found[-1])
    sluice.diff(patched, patched, patch=tmp_path / "weight_v000004")  # nothing changed
    assert_same(sluice.load_state_dict(sluice.Patched(patched, tmp_path / "weight_v000004")), found[-1])


@packs
def test_the_written_patch_is_applied_as_slime_does(tmp_path: Path) -> None:
    old, new = states(Random(5), 1)
    save_file(old, tmp_path / "a.safetensors")
    save_file(new, tmp_path / "b.safetensors")
    sluice.diff(tmp_path / "a.safetensors", tmp_path / "b.safetensors", patch=tmp_path / "weight_v000001")
    for name, frame in load_file(tmp_path / "weight_v000001/model-00000-of-00001.safetensors").items():
        change = zstandard.ZstdDecompressor().stream_reader(io.BytesIO(frame.numpy().tobytes())).read()
        old[name].view(-1).view(torch.uint8).bitwise_xor_(torch.frombuffer(bytearray(change), dtype=torch.uint8))
    assert_same(old, new)


def tied() -> torch.nn.Sequential:
    model = torch.nn.Sequential(torch.nn.Linear(30, 30), torch.nn.Linear(30, 30))
    model.get_submodule("1").weight = model.get_submodule("0").weight
    return model


@packs
def test_every_verb_takes_it(tmp_path: Path) -> None:
    model, other = tied(), tied()
    torch.save(model.state_dict(), tmp_path / "a.pth")
    other.load_state_dict(model.state_dict())
    with torch.no_grad():
        model.get_parameter("0.weight")[3] += 1
    torch.save(model.state_dict(), tmp_path / "b.pth")
    sluice.diff(tmp_path / "a.pth", tmp_path / "b.pth", patch=tmp_path / "weight_v000002")
    patched = sluice.Patched(tmp_path / "a.pth", tmp_path / "weight_v000002")
    assert sluice.diff(patched, tmp_path / "b.pth").same
    assert sluice.verify(patched).ok
    state = sluice.refresh(other, patched)
    assert state.version == "000002"
    assert_same(other.state_dict(), model.state_dict())
    host = [sluice.plan(other, source).predicted.anon_bytes for source in (patched, tmp_path / "a.pth")]
    assert host[0] - host[1] > 30 * 30 * 4  # the tensor that is patched
    with pytest.raises(sluice.BudgetError):
        sluice.load_into(other, patched, memory=host[1])
    sluice.convert(patched, tmp_path / "c.safetensors")
    assert sluice.diff(tmp_path / "c.safetensors", tmp_path / "b.pth").same
    other = tied()
    with sluice.stream(other, patched, device="cpu"):
        x = torch.randn(2, 30)
        assert torch.equal(other(x), model(x))


def bomb(_: bytes) -> bytes:
    return bytes(zstandard.ZstdCompressor(level=1).compress(bytes(1 << 26)))


HOSTILE: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "a flipped byte": ({"change": lambda c: bytes([c[0] ^ 1]) + c[1:]}, sluice.IntegrityError, "checksum"),
    "a bomb": ({"pack": bomb}, sluice.FormatError, "more bytes"),
    "too short": ({"change": lambda content: content[:-1]}, sluice.FormatError, "too early"),
    "no zstd": ({"pack": lambda _: b"plain"}, sluice.FormatError, "damaged"),
    "too many": ({"encoding": "overwrite", "change": lambda c: b"\xff" * 4 + c[4:]}, sluice.FormatError, "more bytes"),
    "outside": (
        {"encoding": "overwrite", "change": lambda c: c[:4] + b"\xff" * 4 + c[8:]},
        sluice.FormatError,
        "outside",
    ),
    "encoding": ({"metadata": {"delta_encoding": "bsdiff"}}, sluice.UnsupportedError, "bsdiff"),
    "compression": ({"metadata": {"compression_format": "lz4"}}, sluice.UnsupportedError, "lz4"),
    "checksum": ({"metadata": {"checksum_format": "md5"}}, sluice.UnsupportedError, "md5"),
    "no checksums": ({"checksums": {"format": "pt"}}, sluice.FormatError, "checksum"),
    "newer": ({"metadata": {"base_version": "7", "version": "8"}}, sluice.MismatchError, "version before"),
    "a cycle": ({"metadata": {"base_version": "1", "version": "1"}}, sluice.MismatchError, "version before"),
}


@packs
@pytest.mark.parametrize("case", HOSTILE)
def test_a_damaged_delta_is_refused_by_name(tmp_path: Path, case: str) -> None:
    changes, kind, message = HOSTILE[case]
    first, second = {"w": torch.arange(3000)}, {"w": torch.arange(3000) + (torch.arange(3000) % 7 == 0)}
    save_file(first, tmp_path / "a.safetensors")
    one = packed(tmp_path, first, second, 1)
    two = packed(tmp_path, second, first, 2, **changes)
    with pytest.raises(kind, match=message) as found:
        sluice.load_state_dict(sluice.Patched(tmp_path / "a.safetensors", one, two))
    assert "weight_v000002" in str(found.value)


@packs
def test_a_version_that_is_no_number_has_no_order(tmp_path: Path) -> None:
    first, second = states(Random(3), 1)
    save_file(first, tmp_path / "a.safetensors")
    one = packed(tmp_path, first, second, 1)
    two = packed(tmp_path, second, first, 2, metadata={"version": "\N{SUPERSCRIPT TWO}"})
    assert_same(sluice.load_state_dict(sluice.Patched(tmp_path / "a.safetensors", one, two)), first)


@packs
def test_changed_bytes_are_unpacked_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    count, sizes = 600_000, list[int]()
    watch(monkeypatch, deltas._Unpacked, "read", lambda _, nbytes: sizes.append(nbytes))
    positions = torch.tensor([count, *range(count)], dtype=torch.int32)
    frame = zstandard.ZstdCompressor().compress(positions.numpy().tobytes() + bytes([7]) * count)
    whole = torch.zeros(count, dtype=torch.uint8)
    step = deltas.DeltaStep(path="delta", encoding="overwrite", inputs=())
    step.apply(whole, [torch.frombuffer(bytearray(frame), dtype=torch.uint8)], "w")
    assert bool((whole == 7).all())
    assert max(sizes) <= 1 << 20


@packs
@pytest.mark.parametrize("sparse", [False, True])
def test_two_tensors_are_held_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sparse: bool) -> None:
    for name in "ab":
        state = {f"w{i}": torch.zeros(4096, dtype=torch.uint8) for i in range(3)}
        for tensor in state.values():
            tensor[3] = name == "b"
        save_file(state, tmp_path / f"{name}.safetensors")
    del state, tensor
    held: list[int] = []

    def count(*_: object) -> None:
        alive = [each for each in gc.get_objects() if type(each) is torch.Tensor and each.numel() == 4096]
        held.append(len({each.data_ptr() for each in alive}))

    def compress(data: memoryview) -> bytes:  # the result may be as large as a tensor
        count()
        return deltas.zstd().ZstdCompressor().compress(data)  # type: ignore[no-any-return]

    watch(monkeypatch, CheckpointReader, "read", count)
    packer = SimpleNamespace(ZstdCompressor=lambda **_: SimpleNamespace(compress=compress))
    monkeypatch.setattr(patches, "zstd", lambda: packer)
    sluice.diff(tmp_path / "a.safetensors", tmp_path / "b.safetensors", patch=tmp_path / "p.safetensors", sparse=sparse)
    assert held == ([0, 1] if sparse else [0, 1, 1]) * 3


class LongestPositions(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """The most int64 numbers that an operation returned in the block."""

    most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        if isinstance(found, torch.Tensor) and found.dtype == torch.int64:
            self.most = max(self.most, found.numel())
        return found


def test_changed_elements_are_found_and_applied_in_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patches, "_BLOCK", 64)
    monkeypatch.setattr(deltas, "_POSITIONS", 64)
    old, new = torch.zeros(1000, dtype=torch.bfloat16), (torch.arange(1000) % 3).to(torch.bfloat16)
    for name, tensor in (("a", old), ("b", new)):
        save_file({"w": tensor}, tmp_path / f"{name}.safetensors")
    with LongestPositions() as longest:  # type: ignore[no-untyped-call]
        sluice.diff(
            tmp_path / "a.safetensors", tmp_path / "b.safetensors", patch=tmp_path / "p.safetensors", sparse=True
        )
        delta = load_file(tmp_path / "p.safetensors")
        step = deltas.DeltaStep(path="delta", encoding="sparse", inputs=())
        step.apply(old, [delta["w.indices"], delta["w.values"]], "w")
    assert torch.equal(old, new)
    assert longest.most == 64


def test_sparse_deltas_without_numbers_are_chained(tmp_path: Path) -> None:
    name = "x.values"  # as the tensors of a delta end
    paths = [tmp_path / f"{letter}.safetensors" for letter in "abc"]
    for number, path in enumerate(paths):
        save_file({name: torch.full((4,), float(number))}, path)
    sluice.diff(paths[0], paths[1], patch=tmp_path / "one.safetensors", sparse=True)
    sluice.diff(paths[1], paths[2], patch=tmp_path / "two.safetensors", sparse=True)
    patched = sluice.Patched(paths[0], tmp_path / "one.safetensors", tmp_path / "two.safetensors")
    assert sluice.open(patched)[name].read().tolist() == [2.0] * 4  # never closed: its threads end nevertheless


def test_a_link_to_an_index_outside_is_refused(tmp_path: Path) -> None:
    save_file({"w": torch.ones(5)}, tmp_path / "a.safetensors")
    index = {"metadata": {"delta_encoding": "xor"}, "weight_map": {}}
    (tmp_path / "outside.json").write_text(json.dumps(index))
    (tmp_path / "weight_v000001").mkdir()
    (tmp_path / "weight_v000001" / deltas.INDEX_FILE).symlink_to(tmp_path / "outside.json")
    patched = sluice.Patched(tmp_path / "a.safetensors", tmp_path / "weight_v000001")
    sluice.open(patched).close()
    with pytest.raises(sluice.PathEscapeError, match="outside"):
        sluice.open(patched, limits=sluice.Limits(symlinks_outside=False))


def test_file_objects_are_opened_once(tmp_path: Path) -> None:
    files = [io.BytesIO(), io.BytesIO()]
    for number, file in enumerate(files):
        torch.save({"w": torch.full((5,), number)}, file)
        file.seek(0)
    assert not sluice.diff(files[0], files[1], patch=tmp_path / "step_1.safetensors", sparse=True).same


def test_an_existing_patch_is_refused_before_anything_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_file({"w": torch.ones(5)}, tmp_path / "a.safetensors")
    monkeypatch.delattr(CheckpointReader, "read")
    with pytest.raises(sluice.SaveError, match="the patch already exists"):
        sluice.diff(*[tmp_path / "a.safetensors"] * 2, patch=tmp_path / "a.safetensors", sparse=True)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d: d | {"w.indices": torch.tensor([5, 99], dtype=torch.int32)}, "outside"),
        (lambda d: d | {"w.indices": torch.tensor([5, 5], dtype=torch.int32)}, "ascend"),
        (lambda d: d | {"w.indices": torch.tensor([-1, 5], dtype=torch.int32)}, "outside"),
        (lambda d: d | {"w.values": d["w.values"].double()}, "float64"),
        (lambda d: d | {"w.values": d["w.values"][:1]}, "as many"),
        (lambda d: {"w.values": d["w.values"]}, "its indices"),
        (lambda d: d | {"w": torch.ones(1)}, "its indices"),
    ],
)
@pytest.mark.parametrize("block", [1, 1 << 20])
def test_damaged_indices_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: Callable[[State], State], message: str, block: int
) -> None:
    monkeypatch.setattr(deltas, "_POSITIONS", block)
    save_file({"w": torch.zeros(8)}, tmp_path / "a.safetensors")
    delta = {"w.indices": torch.tensor([2, 5], dtype=torch.int32), "w.values": torch.ones(2)}
    save_file(change(delta), tmp_path / "step_1.safetensors", metadata={"sparse": "True", "model_version": "1"})
    with pytest.raises(sluice.FormatError, match=message):
        sluice.load_state_dict(sluice.Patched(tmp_path / "a.safetensors", tmp_path / "step_1.safetensors"))


@packs
@pytest.mark.parametrize("seed", range(20))
def test_flipped_bytes_never_change_the_result(tmp_path: Path, seed: int) -> None:
    random = Random(seed)
    old, new = states(random, 1)
    save_file(old, tmp_path / "a.safetensors")
    delta = Path(packed(tmp_path, old, new, 1, encoding=random.choice(["xor", "overwrite"])))
    for file in [path for path in delta.iterdir() for _ in range(8)]:
        content = file.read_bytes()
        at = random.randrange(len(content))
        file.write_bytes(content[:at] + bytes([content[at] ^ 1 << random.randrange(8)]) + content[at + 1 :])
        try:
            found = sluice.load_state_dict(sluice.Patched(tmp_path / "a.safetensors", delta))
        except sluice.SluiceError:
            pass
        else:
            assert_same(found, new)
        file.write_bytes(content)


@packs
def test_another_base_is_refused(tmp_path: Path) -> None:
    first, second = states(Random(2), 1)
    delta = packed(tmp_path, first, second, 1)
    save_file(second, tmp_path / "b.safetensors")
    with pytest.raises(sluice.IntegrityError, match="checksum"):
        sluice.load_state_dict(sluice.Patched(tmp_path / "b.safetensors", delta))
    assert not sluice.verify(sluice.Patched(tmp_path / "b.safetensors", delta)).ok
    save_file({"other": torch.ones(2)}, tmp_path / "c.safetensors")
    with pytest.raises(sluice.MismatchError, match="does not have"):
        sluice.open(sluice.Patched(tmp_path / "c.safetensors", delta))
    with pytest.raises(sluice.UnsupportedError, match="not a delta"):
        sluice.open(sluice.Patched(tmp_path / "b.safetensors", tmp_path / "c.safetensors"))
    with pytest.raises(sluice.MismatchError, match="only one has"):
        sluice.diff(tmp_path / "b.safetensors", tmp_path / "c.safetensors", patch=tmp_path / "new")
    assert not (tmp_path / "new").exists()
    with pytest.raises(TypeError, match="takes paths and URLs, not a BytesIO"):
        sluice.Patched(tmp_path / "b.safetensors", io.BytesIO())  # type: ignore[arg-type]
