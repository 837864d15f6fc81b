"""The memory pictures of the documentation: each of the tutorial's methods over time, in a process of its own."""

from __future__ import annotations

import math
import multiprocessing
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from importlib import import_module
from pathlib import Path

import click
import torch

import sluice
from sluice.benchmark import cache as _cache
from sluice.benchmark import machine as _machine
from sluice.benchmark.folder import temporary_folder
from sluice.benchmark.gpt2 import SIZES, final_bytes, make_checkpoint
from sluice.benchmark.loads import make_context, touch
from sluice.benchmark.methods import METHODS
from sluice.benchmark.records import MethodJob, Precision
from sluice.benchmark.strategies import STRATEGIES

__all__ = ["draw", "measure_method"]

_GIB = 1 << 30
_COLUMNS = 3

#: Number of colors of a picture, to keep the files small.
_PALETTE = 64


def measure_method(job: MethodJob) -> sluice.MemoryReport:
    """Load with one method in this process, touch every weight, and return the memory report."""
    method = METHODS[job.method]
    for name in method.imports:
        module, _, attribute = name.partition(":")
        getattr(import_module(module), attribute or "__name__")
    make_context(job.device)
    load = method.start(job)
    with sluice.measure() as memory:
        loaded = load()
        if isinstance(loaded, torch.nn.Module) and job.device == "cpu":
            touch(loaded)
    return memory.report


def draw(path: Path, title: str, reports: Mapping[str, sluice.MemoryReport], final: int, seconds: float) -> None:
    """Draw a panel per method into one picture, all with the same scale.

    Args:
        path: The PNG file.
        title: Title of the picture.
        reports: Memory report of each method.
        final: F, the bytes of the finished tensors: a dashed line.
        seconds: End of the time axis, which all pictures share.
    """
    from matplotlib.figure import Figure

    rows = math.ceil(len(reports) / _COLUMNS)
    figure = Figure(figsize=(9, 2.4 * rows + 0.6), layout="constrained")
    panels = list(figure.subplots(rows, _COLUMNS, sharex=True, sharey=True, squeeze=False).flat)
    highest = max(report.peaks.total_bytes for report in reports.values())
    for panel, (name, report) in zip(panels, reports.items(), strict=False):
        report.draw(panel)
        panel.axhline(final / _GIB, color="black", linewidth=0.8, linestyle="--", label="the finished model")
        panel.set_title(f"{name}: {report.peaks.total_bytes / final:.2f} F", fontsize=10, loc="left")
        panel.set_xlim(0, seconds)
        panel.set_ylim(0, 1.08 * highest / _GIB)
        panel.set_ylabel("GiB" if panel in panels[::_COLUMNS] else "")
        panel.spines[["top", "right"]].set_visible(False)
    for panel in panels[len(reports) :]:
        panel.axis("off")
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=4, fontsize=9)
    figure.suptitle(title, fontsize=11)
    figure.savefig(path, dpi=100)
    _shrink(path)


def _shrink(path: Path) -> None:
    """Save a picture with a palette, which takes a third of the space."""
    from PIL import Image

    with Image.open(path) as image:
        small = image.convert("RGB").quantize(_PALETTE)
    small.save(path, optimize=True)


def _measure_all(jobs: Sequence[MethodJob]) -> dict[str, sluice.MemoryReport]:
    """Measure each job in a fresh process, with its file dropped from the page cache."""
    reports = {}
    for job in jobs:
        _cache.make_cold(Path(job.checkpoint))
        with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as process:
            reports[job.method] = process.submit(measure_method, job).result()
    return reports


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--size", type=click.Choice(SIZES), default="medium", show_default=True, help="Of the model.")
@click.option("--directory", type=click.Path(path_type=Path), help="For the checkpoints; else the temp folder.")
@click.option("--out", type=click.Path(path_type=Path), default=Path("docs/images"), show_default=True)
def main(size: str, directory: Path | None, out: Path) -> None:
    """Draw memory over time for each of the tutorial's methods, in fp32 and cast to bf16."""
    out.mkdir(parents=True, exist_ok=True)
    device = _machine.device()
    pictures: dict[str, tuple[str, dict[str, sluice.MemoryReport], int]] = {}
    with temporary_folder(directory) as folder:
        make_checkpoint(folder / "model.pth", size, torch.float32, "torch")
        make_checkpoint(folder / "parameters", size, torch.float32, "per-parameter")
        for dtype in ("float32", "bfloat16"):
            precision: Precision = "bfloat16" if dtype == "bfloat16" else "float32"
            jobs = [
                MethodJob(
                    method=method.name,
                    model=size,
                    checkpoint=str(folder / ("model.pth" if ".pth" in method.reads else "parameters")),
                    dtype=precision,
                    device=device,
                    verify=False,
                )
                for method in STRATEGIES
            ]
            final = final_bytes(size, torch.bfloat16 if dtype == "bfloat16" else torch.float32)
            title = f"GPT-2 {size} from an fp32 file, finished in {dtype}: F = {final / _GIB:.2f} GiB, on {device}"
            pictures[dtype] = (title, _measure_all(jobs), final)
    longest = max(report.seconds for _, reports, _ in pictures.values() for report in reports.values())
    for name, (title, reports, final) in pictures.items():
        draw(out / f"memory-{name}.png", title, reports, final, longest)
        for method, report in reports.items():
            click.echo(f"{name} {method}: {report.peaks.total_bytes / final:.2f} F, {report}")


if __name__ == "__main__":
    main()
