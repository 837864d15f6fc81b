"""Random programs of a verb, a source and options: the tensors of plain torch, or an error that names itself."""

from __future__ import annotations

import io
import tarfile
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import sluice
from sluice import rules
from support import directories, gguf_files, zero_files
from support.oracles import same_tensor
from support.range_server import RangeServer

State = dict[str, torch.Tensor]

#: Enough for every verb with every source; thousands of others were run when this was written.
SEEDS = 63


def net() -> nn.Module:
    layers = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    return nn.Sequential(OrderedDict(layers=layers, norm=nn.LayerNorm(8)))


def _tar(path: Path, state: State) -> Path:
    inner = directories.write_zip(path, state)
    with tarfile.open(path / "model.nemo", "w") as archive:
        archive.add(inner, "model_weights.ckpt")
    inner.unlink()
    return path / "model.nemo"


def _run(path: Path, state: State) -> Path:
    torch.save({"model": state, "epoch": 3}, path / "run.pt")
    return path / "run.pt"


def _dcp(path: Path, state: State) -> Path:
    sluice.save(state, path / "dcp", format="dcp")
    return path / "dcp"


WRITERS: Mapping[str, Callable[[Path, State], Path]] = {
    "zip": directories.write_zip,
    "legacy": directories.write_legacy,
    "run": _run,
    "safetensors": directories.write_safetensors,
    "shards": directories.write_shards,
    "distributed": _dcp,
    "gguf": lambda path, state: gguf_files.write(path / "m.gguf", {n: gguf_files.plain(t) for n, t in state.items()}),
    "zero": lambda path, state: zero_files.write_zero(path / "zero", zero_files.Training([state]), stage=3, world=2),
    "tar": _tar,
}


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[RangeServer]:
    pytest.importorskip("urllib3", reason="the extra 'remote' is not installed")
    monkeypatch.setenv("SLUICE_SHARED_DIR", str(tmp_path / "store"))
    with RangeServer({}) as running:
        yield running


def _source(random: Random, folder: Path, server: RangeServer, path: Path, state: State) -> Any:
    kind = random.choice(["path", "url", "cache", "memory", "patched", "shared"])
    if kind == "memory" and path.is_file() and path.suffix != ".json":
        return io.BytesIO(path.read_bytes())
    if kind in {"url", "cache"}:
        files = [each for each in path.parent.rglob("*") if each.is_file()]
        server.files = {f"/{each.relative_to(path.parent)}": each.read_bytes() for each in files}
        url = server.url(f"/{path.name}" + "/" * path.is_dir())
        return url if kind == "url" else sluice.Remote(url, cache=folder / "cache")
    if kind == "patched":
        name = random.choice(sorted(state))
        state[name] = state[name] * 2
        save_file(state, folder / "new.safetensors")
        sluice.diff(path, folder / "new.safetensors", patch=folder / "delta.safetensors", sparse=True)
        return sluice.Patched(path, folder / "delta.safetensors")
    return sluice.shared(path) if kind == "shared" else path


def _options(random: Random, state: State) -> dict[str, Any]:
    """Return options, and change the state as they do."""
    options: dict[str, Any] = {"dtype": random.choice(["auto", "bf16", "fp16"]), "rules": []}
    if random.random() < 0.4:
        options["rules"] += [rules.transpose("layers.0.weight"), rules.scale("*.bias", 0.5)]
        state |= {"layers.0.weight": state["layers.0.weight"].t().contiguous(), "norm.bias": state["norm.bias"] * 0.5}
    kept = set()
    if random.random() < 0.4:
        options["rules"].append(rules.cast("norm.weight", "float32"))
        kept = {"norm.weight"}
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(options["dtype"])
    state |= {name: tensor.float() if name in kept else tensor.to(dtype) for name, tensor in state.items()}
    return options


def _read(random: Random, folder: Path, source: Any, options: dict[str, Any]) -> Mapping[str, torch.Tensor]:
    """Return the tensors that a verb makes of a source."""
    verb = random.choice(["state", "load", "map", "shared", "convert", "copy", "merge", "stream", "refresh"])
    with sluice.empty_init():
        model = net()
    if verb == "state":
        return sluice.load_state_dict(source, **options)
    if verb in {"convert", "merge"}:
        out = folder / random.choice(["out.pth", "out.safetensors"])
        if verb == "merge":
            sluice.merge([source], folder / "merged.pth", method="passthrough")
            source = folder / "merged.pth"
        sluice.convert(source, out, key=None if out.suffix == ".safetensors" else "", **options)
        if out.suffix == ".safetensors":
            return load_file(out)
        found: Any = torch.load(out)
        return {name.removeprefix("model."): each for name, each in found.get("model", found).items()}
    if verb == "copy":
        with sluice.shared(source, **options) as copy:
            return sluice.load_state_dict(copy)
    if verb == "stream":
        with sluice.stream(model, source, memory="1MiB", **options):
            return {name: tensor.clone() for name, tensor in model.state_dict().items()}
    place: Any = verb if verb in {"map", "shared"} else "copy"
    sluice.load_into(model, source, place=place, **options)
    if verb == "refresh":
        if hasattr(source, "seek"):
            source.seek(0)
        for tensor in model.state_dict().values():
            tensor.zero_()
        sluice.refresh(model, source, **options)
    return model.state_dict()


@pytest.mark.parametrize("seed", range(SEEDS))
def test_the_tensors_are_those_of_torch(tmp_path: Path, server: RangeServer, seed: int) -> None:
    random = Random(seed)
    torch.manual_seed(seed)
    kind = list(WRITERS)[seed % len(WRITERS)]
    dtype = torch.float32 if kind == "zero" else random.choice([torch.float32, torch.bfloat16])
    state = {name: torch.randn(tensor.shape).to(dtype) for name, tensor in net().state_dict().items()}
    (tmp_path / "base").mkdir()
    path = WRITERS[kind](tmp_path / "base", state)
    source = _source(random, tmp_path, server, path, state)
    options = _options(random, state)
    try:
        found = _read(random, tmp_path, source, options)
    except sluice.UnsupportedError as error:
        assert "its content could be any" in str(error)  # of bytes in memory
        return
    assert sorted(found) == sorted(state)
    assert [name for name, tensor in state.items() if not same_tensor(found[name].detach(), tensor)] == []
