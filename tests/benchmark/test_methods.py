"""Every method fills the tiny model with the right weights; raw reads read every byte."""

from __future__ import annotations

import dataclasses
import errno
import json
import mmap
import pkgutil
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from bench import _peers as bench_peers
from bench import _raw
from bench._llama import LLAMA_TINY, write_directory
from bench._peers import HUGGING_FACE
from sluice.benchmark import gpt2
from sluice.benchmark.loads import touch, verdict
from sluice.benchmark.methods import LOADERS, METHODS, PEERS, STRATEGIES, absence
from sluice.benchmark.records import OTHER, PARAMETERS, PTH, SAFETENSORS, SHARDS, Kind, Precision
from support.comparisons import job
from support.directories import SAFETENSORS_INDEX, save_sharded

_LOADERS = [
    (method.name, suffix)
    for method in METHODS.values()
    for suffix in method.reads
    if not method.name.startswith("raw-") and suffix not in {OTHER, HUGGING_FACE}
]


@pytest.fixture(scope="module", autouse=True)
def _short_vocabulary() -> Iterator[None]:
    """Shrink the tiny model to a twentieth: these tests do not depend on its size."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gpt2, "GPTConfig", lambda **fields: {**fields, "vocab_size": 997})
        yield


@pytest.fixture(scope="module")
def checkpoints(_short_vocabulary: None, tmp_path_factory: pytest.TempPathFactory) -> dict[Kind, Path]:
    """Return the tiny model's checkpoint of each kind that a method reads."""
    folder = tmp_path_factory.mktemp("checkpoints")
    made = {kind: folder / f"tiny{kind}" for kind in (PTH, SAFETENSORS, PARAMETERS, SHARDS)}
    for kind in (PTH, SAFETENSORS, PARAMETERS):
        gpt2.write_checkpoint(gpt2.random_state_dict("tiny", torch.float32), made[kind])
    items = list(load_file(made[SAFETENSORS]).items())
    save_sharded(
        made[SHARDS], SAFETENSORS_INDEX, {"1.safetensors": dict(items[::2]), "2.safetensors": dict(items[1::2])}
    )
    return made


def _load(name: str, checkpoint: Path, dtype: Precision) -> nn.Module:
    loaded = METHODS[name].start(job(name, checkpoint, dtype=dtype, verify=True))()
    assert isinstance(loaded, nn.Module)
    return loaded


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def dtype(request: pytest.FixtureRequest) -> Precision:
    precision: Precision = request.param
    return precision


@pytest.fixture(scope="module")
def truth(dtype: Precision) -> str:
    return verdict(_load("reference", Path(), dtype))


@pytest.mark.filterwarnings("default")  # peers may warn
@pytest.mark.parametrize(("name", "suffix"), _LOADERS)
def test_a_method_makes_the_right_model(
    name: str, suffix: str, dtype: Precision, truth: str, checkpoints: dict[Kind, Path]
) -> None:
    for needed in METHODS[name].imports:
        try:
            pkgutil.resolve_name(needed)
        except ImportError as error:
            pytest.skip(f"not installed: {error}")
    model = _load(name, checkpoints[suffix], dtype)
    assert {str(weight.dtype) for weight in model.state_dict().values()} == {f"torch.{dtype}"}
    assert verdict(model) == truth


@pytest.mark.filterwarnings("default")  # peers may warn
@pytest.mark.parametrize("shards", [1, 3])
def test_every_method_for_directories_makes_the_right_llama(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, shards: int
) -> None:
    # transformers draws a progress bar, whose thread would outlive the test.
    if find_spec("tqdm"):
        monkeypatch.setattr("tqdm.tqdm.monitor_interval", 0)
    folder = tmp_path / "llama"
    write_directory(folder, LLAMA_TINY, shards=shards)
    source = {"model": "bench._llama:llama", "model_args": json.dumps(LLAMA_TINY)}

    def digest(method: str) -> str:
        model = METHODS[method].start(job(method, folder, dtype="bfloat16", verify=True, **source))()
        assert isinstance(model, nn.Module)
        return verdict(model)

    truth = digest("reference")
    directories = {SHARDS, HUGGING_FACE}
    methods = [
        each.name for each in bench_peers.ALL_PEERS if directories & {*each.reads} and not each.name.startswith("raw-")
    ]
    assert {"transformers", "safetensors-load-file", "sluice-load-into"} <= {*methods}
    assert {name: digest(name) for name in methods if not absence(name)} == dict.fromkeys(
        (name for name in methods if not absence(name)), truth
    )


def test_shards_have_about_the_same_size(tmp_path: Path) -> None:
    write_directory(tmp_path / "llama", LLAMA_TINY, shards=3)
    sizes = [file.stat().st_size for file in (tmp_path / "llama").glob("*.safetensors")]
    assert len(sizes) == 3
    assert max(sizes) < 1.5 * min(sizes)


def test_a_missing_package_is_found_without_importing_it(monkeypatch: pytest.MonkeyPatch) -> None:
    method = dataclasses.replace(METHODS["runai-streamer"], imports=("no_such_loader.part:name",))
    monkeypatch.setitem(METHODS, "runai-streamer", method)
    assert absence("runai-streamer") == "no_such_loader is not installed: pip install no_such_loader"
    assert absence("sluice") == ""


def test_a_raw_read_of_a_directory_reads_all_files(tmp_path: Path) -> None:
    for name, content in {"a": b"1" * 5000, "b": b"2" * 4096, "c": b"3"}.items():
        (tmp_path / name).write_bytes(content)
    with _raw.read_file(str(tmp_path), direct=False, threads=2) as read:
        assert read[:8193] == b"1" * 5000 + bytes(3192) + b"2"
        assert read[12288:12290] == b"3\0"


def test_names_are_unique() -> None:
    assert len(LOADERS) == len(STRATEGIES) + len(PEERS)
    assert len({each.name for each in bench_peers.ALL_PEERS}) == len(bench_peers.ALL_PEERS)


def test_one_changed_bit_and_exchanged_rows_change_the_verdict() -> None:
    model = nn.Embedding(32, 3)
    before = verdict(model)
    with torch.no_grad():
        model.weight.copy_(model.weight.flip(0))
    exchanged = verdict(model)
    with torch.no_grad():
        model.weight.view(torch.int32)[31, 2] ^= 1
    assert len({before, exchanged, verdict(model)}) == 3


def test_touch_reads_the_first_element_of_every_page_and_the_last() -> None:
    model = nn.Embedding(3, 1024)
    with torch.no_grad():
        model.weight.zero_()
        model.weight[:, 0] = 1.0
        model.weight[2, 1023] = 10.0
    assert touch(model) == 13.0


@pytest.mark.parametrize("size", [1, 4096, _raw.READ_BYTES, _raw.READ_BYTES + 4097])
@pytest.mark.parametrize("direct", [False, True])
def test_a_raw_read_reads_every_byte(tmp_path: Path, size: int, direct: bool) -> None:
    file = tmp_path / "file"
    content = bytes(torch.randint(256, (size,), dtype=torch.uint8).tolist())
    file.write_bytes(content)
    try:
        read = _raw.read_file(str(file), direct=direct, threads=2)
    except OSError as error:
        assert direct
        assert error.errno == errno.EINVAL
        pytest.skip("no direct I/O on this file system")
    assert isinstance(read, mmap.mmap)
    assert read[:size] == content
    read.close()


def test_a_raw_direct_write_packs_its_parts(tmp_path: Path) -> None:
    file = tmp_path / "file"
    parts = [torch.randint(256, (size,), dtype=torch.uint8).numpy() for size in (4095, 0, 20_000, 1, 8192)]
    try:
        _raw.write_direct(str(file), parts, threads=2, piece_bytes=4096)
    except OSError as error:
        assert error.errno == errno.EINVAL
        pytest.skip("no direct I/O on this file system")
    assert file.read_bytes() == b"".join(part.tobytes() for part in parts)
