"""The memory pictures of the documentation: each of the tutorial's methods over time, in a process of its own."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path

import click
import torch

from sluice.benchmark import machine as _machine
from sluice.benchmark.gpt2 import SIZES, random_state_dict, write_checkpoint
from sluice.benchmark.loads import run_job
from sluice.benchmark.machine import temporary_folder
from sluice.benchmark.methods import STRATEGIES, final_bytes
from sluice.benchmark.records import MethodJob, Outcome, Precision

__all__ = ["draw"]

_GIB = 1 << 30
_COLUMNS = 3

#: Number of colors of a picture, to keep the files small.
_PALETTE = 64

_DTYPES: tuple[Precision, ...] = ("float32", "bfloat16")


def draw(path: Path, title: str, outcomes: Mapping[str, Outcome], final: int, seconds: float) -> None:
    """Draw a panel per method into one picture, all with the same scale.

    Args:
        path: The PNG file.
        title: Title of the picture.
        outcomes: Outcome of each method.
        final: F, the bytes of the finished tensors: a dashed line.
        seconds: End of the time axis, which all pictures share.
    """
    from matplotlib.figure import Figure
    from PIL import Image

    rows = math.ceil(len(outcomes) / _COLUMNS)
    figure = Figure(figsize=(9, 2.4 * rows + 0.6), layout="constrained")
    panels = list(figure.subplots(rows, _COLUMNS, sharex=True, sharey=True, squeeze=False).flat)
    highest = max(outcome.total_bytes for outcome in outcomes.values())
    for panel, (name, outcome) in zip(panels, outcomes.items(), strict=False):
        trace = outcome.trace
        assert trace is not None
        kinds = [[nbytes / _GIB for nbytes in kind] for kind in (trace.anon, trace.file)]
        panel.stackplot(trace.seconds, *kinds, labels=("anonymous", "file-backed"), colors=("#d95f02", "#2a6fb0"))
        panel.axhline(final / _GIB, color="black", linewidth=0.8, linestyle="--", label="the finished model")
        panel.set_title(f"{name}: {outcome.total_bytes / final:.2f} F", fontsize=10, loc="left")
        panel.set_xlim(0, seconds)
        panel.set_ylim(0, 1.08 * highest / _GIB)
        panel.set_ylabel("GiB" if panel in panels[::_COLUMNS] else "")
        panel.spines[["top", "right"]].set_visible(False)
    for panel in panels[len(outcomes) :]:
        panel.axis("off")
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=4, fontsize=9)
    figure.suptitle(title, fontsize=11)
    figure.savefig(path, dpi=100)
    with Image.open(path) as image:  # with a palette, which takes a third of the space
        small = image.convert("RGB").quantize(_PALETTE)
    small.save(path, optimize=True)


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--size", type=click.Choice(SIZES), default="medium", show_default=True, help="Of the model.")
@click.option("--directory", type=click.Path(path_type=Path), help="For the checkpoints; else the temp folder.")
@click.option("--out", type=click.Path(path_type=Path), default=Path("docs/images"), show_default=True)
def main(size: str, directory: Path | None, out: Path) -> None:
    """Draw memory over time for each of the tutorial's methods, in fp32 and cast to bf16."""
    out.mkdir(parents=True, exist_ok=True)
    device = _machine.device()
    found: dict[Precision, dict[str, Outcome]] = {dtype: {} for dtype in _DTYPES}
    with temporary_folder(directory) as folder:
        write_checkpoint(random_state_dict(size, torch.float32), folder / "model.pth")
        write_checkpoint(random_state_dict(size, torch.float32), folder / "parameters")
        for dtype in _DTYPES:
            for method in STRATEGIES:
                path = folder / ("model.pth" if ".pth" in method.reads else "parameters")
                _machine.make_cold(path)
                job = MethodJob(
                    method=method.name, model=size, checkpoint=str(path), dtype=dtype, device=device, verify=False
                )
                found[dtype][method.name] = run_job(job)
    longest = max(outcome.seconds for outcomes in found.values() for outcome in outcomes.values())
    for dtype, outcomes in found.items():
        final = final_bytes(size, getattr(torch, dtype))
        title = f"GPT-2 {size} from an fp32 file, finished in {dtype}: F = {final / _GIB:.2f} GiB, on {device}"
        draw(out / f"memory-{dtype}.png", title, outcomes, final, longest)
        for name, outcome in outcomes.items():
            click.echo(f"{dtype} {name}: {outcome.total_bytes / final:.2f} F, {outcome.seconds:.2f} s")


if __name__ == "__main__":
    main()
