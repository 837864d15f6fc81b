"""``python -m bench.integrations``: functions of other libraries and those of sluice in their place, on the same files.

Every load runs in a process of its own, from files that the page cache does not hold. The clock stops when every page
of every tensor was touched.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any

import click
import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.state_dict_loader import load as load_distributed
from torch.distributed.checkpoint.state_dict_saver import save as save_distributed

from bench._common import options, run_alone, show, working_folder
from sluice.benchmark.cache import make_cold
from sluice.benchmark.gpt2 import random_state_dict
from sluice.benchmark.records import Outcome, Work
from sluice.benchmark.table import TableSection
from sluice.benchmark.writing import write_checkpoint

__all__ = ["METHODS", "main", "work"]

_State = dict[str, torch.Tensor]


def _load_file(path: Path, _: _State) -> _State:
    from safetensors.torch import load_file

    return load_file(path)


def _sluice_load_file(path: Path, _: _State) -> _State:
    from sluice.safetensors import load_file

    return load_file(path)


def _torch_load(path: Path, _: _State) -> Any:
    return torch.load(path, weights_only=True)


def _sluice_torch_load(path: Path, _: _State) -> Any:
    from sluice.torch import load

    return load(path)


def _lightning(path: Path, _: _State) -> Any:
    from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO

    return TorchCheckpointIO().load_checkpoint(path, map_location="cpu")


def _sluice_lightning(path: Path, _: _State) -> Any:
    from sluice.integrations.lightning import SluiceCheckpointIO

    return SluiceCheckpointIO().load_checkpoint(path)


def _reader(path: Path, state: _State) -> _State:
    load_distributed(state, storage_reader=FileSystemReader(path), no_dist=True)
    return state


def _sluice_reader(path: Path, state: _State) -> _State:
    from sluice.integrations.dcp import SluiceReader

    load_distributed(state, storage_reader=SluiceReader(path), no_dist=True)
    return state


#: File and function by name; each library's is followed by ours. ``dcp.load`` fills tensors that exist before.
METHODS: dict[str, tuple[str, Callable[[Path, _State], Mapping[str, torch.Tensor]]]] = {
    "safetensors.torch.load_file": ("m.safetensors", _load_file),
    "sluice.safetensors.load_file": ("m.safetensors", _sluice_load_file),
    "torch.load": ("m.pth", _torch_load),
    "sluice.torch.load": ("m.pth", _sluice_torch_load),
    "TorchCheckpointIO": ("m.pth", _lightning),
    "SluiceCheckpointIO": ("m.pth", _sluice_lightning),
    "dcp.load, FileSystemReader": ("dcp", _reader),
    "dcp.load, SluiceReader": ("dcp", _sluice_reader),
}


def work(method: str, path: str, shapes: str) -> Work:
    """Load once: the work of a process."""
    load = METHODS[method][1]
    state = {name: torch.zeros(shape) for name, shape in json.loads(shapes).items()}
    small = Path(path).parent / "small" / Path(path).name
    load(small, {"w": torch.ones(3)})  # imports and work on first use
    make_cold(Path(path))
    yield
    yield
    loaded = load(Path(path), state)
    touched = sum(float(tensor.flatten()[::1024].sum()) for tensor in loaded.values())
    yield
    return {"sum": touched}


def _write(state: _State, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    write_checkpoint(state, folder / "m.safetensors", "safetensors")
    write_checkpoint(state, folder / "m.pth", "torch")
    save_distributed(state, storage_writer=FileSystemWriter(folder / "dcp"), no_dist=True)


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@options(size="small")
def main(size: str, runs: int, directory: Path | None, out: Path) -> None:
    """Compare functions of other libraries with ours: seconds and peak memory, interleaved."""
    names = [name for name in METHODS if "CheckpointIO" not in name or find_spec("lightning") is not None]
    done: dict[str, list[Outcome]] = {name: [] for name in names}
    with working_folder(directory) as folder:
        state: _State = dict(random_state_dict(size, torch.float32))
        _write({"w": torch.ones(3)}, folder / "small")
        _write(state, folder)
        shapes = json.dumps({name: list(tensor.shape) for name, tensor in state.items()})
        nbytes = sum(tensor.nbytes for tensor in state.values())
        del state
        for _ in range(runs):
            for name in names:
                arguments = {"method": name, "path": str(folder / METHODS[name][0])}
                filled = shapes if name.startswith("dcp") else "{}"
                outcome = run_alone("bench.integrations:work", {**arguments, "shapes": filled})
                if outcome.status != "ok":
                    raise click.ClickException(f"{name}: {outcome.reason}")
                done[name].append(outcome)
                click.echo(f"{name}: {outcome.seconds:.2f} s")
    if len({run.facts["sum"] for each in done.values() for run in each}) > 1:
        raise click.ClickException("the loaded weights differ")
    rows = []
    for name, each in done.items():
        seconds = [run.seconds for run in each]
        figures = (f"{value:.2f}" for value in (median(seconds), min(seconds), max(seconds)))
        rows.append((name, *figures, f"{max(run.total_bytes for run in each) / nbytes:.2f}"))
    table = TableSection(title="", headings=("function", "seconds", "from", "to", "peak / F"), rows=tuple(rows))
    show(out, "integrations", ("torch", "sluice", "safetensors", "lightning"), [table], bytes=nbytes)


if __name__ == "__main__":
    main()
