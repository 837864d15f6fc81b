"""``python -m bench.merge``: time and memory to merge models with sluice, mergekit's kernels and torch.

Every merge runs in a process of its own, from safetensors files to a safetensors file. mergekit reads, merges and keeps
one tensor after the other, and writes them at the end, as its command does for a model below the size of a shard.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import click
import safetensors.torch
import torch

import sluice
from bench._common import options, run_alone, show, working_folder
from sluice.benchmark.gpt2 import random_state_dict
from sluice.benchmark.records import Outcome, Work
from sluice.benchmark.results import TableSection

__all__ = ["METHODS", "main", "work"]

#: Parameters of each method: of the merge, and of each input.
METHODS: Mapping[str, tuple[dict[str, Any], dict[str, float]]] = {
    "linear": ({}, {"weight": 0.5}),
    "swa": ({}, {}),
    "task_arithmetic": ({}, {"weight": 0.5}),
    "ties": ({}, {"weight": 0.5, "density": 0.3}),
}


def _sluice(method: str, paths: Sequence[Path], out: Path) -> None:
    shared, each = METHODS[method]
    models = [{"model": str(path), "parameters": each} for path in paths]
    sluice.merge({"merge_method": method, "models": models, "base_model": str(paths[0]), "parameters": shared}, out)


def _mergekit(method: str, paths: Sequence[Path], out: Path) -> None:
    from mergekit import merge_methods
    from mergekit.merge_methods.base import PerInputValues, TensorEntry, TensorGroup

    shared, each = METHODS[method]
    files: list[Any] = [safetensors.safe_open(path, "pt") for path in paths]
    own = files if method == "linear" else files[1:]
    values = {name: PerInputValues([(id(file), value) for file in own]) for name, value in each.items()}
    merge, merged = merge_methods.get(method), {}
    for name in files[0].keys():  # noqa: SIM118  it cannot be iterated
        tensors = [(file, file.get_tensor(name)) for file in files]
        entries = tuple(TensorEntry(id=id(file), tensor=tensor, is_base=file not in own) for file, tensor in tensors)
        [merged[name]] = merge([TensorGroup(entries=entries)], parameters={**shared, **values})
    safetensors.torch.save_file(merged, out)


def _averaged(_: str, paths: Sequence[Path], out: Path) -> None:
    """Average as a loop over checkpoints does: the average and one model in memory."""
    average = safetensors.torch.load_file(paths[0])
    for count, path in enumerate(paths[1:], 1):
        for name, tensor in safetensors.torch.load_file(path).items():
            average[name].lerp_(tensor, 1 / (count + 1))
    safetensors.torch.save_file(average, out)


_LIBRARIES: Mapping[str, Callable[[str, Sequence[Path], Path], None]] = {
    "sluice": _sluice,
    "mergekit": _mergekit,
    "torch": _averaged,
}


def work(library: str, method: str, folder: str, count: int) -> Work:
    """Merge once: the work of a process."""
    paths = [Path(folder, f"{number}.safetensors") for number in range(count)]
    yield
    yield
    _LIBRARIES[library](method, paths, Path(folder, "merged.safetensors"))
    yield
    Path(folder, "merged.safetensors").unlink()
    return {}


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@options(size="medium", runs=5)
@click.option("--inputs", type=click.IntRange(2), default=3, show_default=True, help="Number of models.")
@click.option("--method", "methods", type=click.Choice(list(METHODS)), multiple=True, default=tuple(METHODS))
def main(size: str, runs: int, directory: Path | None, out: Path, inputs: int, methods: Sequence[str]) -> None:
    """Compare merges of bf16 models: seconds and peak memory; each in a fresh process, interleaved."""
    done: dict[str, list[Outcome]] = {}
    with working_folder(directory) as folder:
        for number in range(inputs):
            torch.manual_seed(number)
            state = {name: tensor + number for name, tensor in random_state_dict(size, torch.bfloat16).items()}
            safetensors.torch.save_file(state, folder / f"{number}.safetensors")
        for _ in range(runs):
            for method in methods:
                for library in ("sluice", "torch" if method == "swa" else "mergekit"):
                    arguments = {"library": library, "method": method, "folder": str(folder), "count": inputs}
                    outcome = run_alone("bench.merge:work", arguments)
                    if outcome.status == "ok":
                        done.setdefault(f"{method}, {library}", []).append(outcome)
                    else:
                        click.echo(f"{method}, {library}: {outcome.reason}")
    rows = tuple(
        (name, f"{median(run.seconds for run in each):.2f}", f"{max(run.total_bytes for run in each) / 2**20:.0f}")
        for name, each in done.items()
    )
    section = TableSection(title="", headings=("method", "seconds", "peak MiB"), rows=rows)
    seconds = {name: [run.seconds for run in each] for name, each in done.items()}
    show(out, "merge", ("torch", "sluice", "safetensors"), [section], seconds=seconds)


if __name__ == "__main__":
    main()
