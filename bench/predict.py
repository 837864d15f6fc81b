"""``python -m bench.predict``: predicted peaks of ``sluice.plan`` for every method, compared with measured ones."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

import click
import torch
from rich.box import MARKDOWN
from rich.table import Table

import sluice
from sluice._units import format_bytes
from sluice.benchmark import machine as _machine
from sluice.benchmark.folder import temporary_folder
from sluice.benchmark.gpt2 import SIZES, build, make_checkpoint
from sluice.benchmark.process import run_job
from sluice.benchmark.records import MethodJob, Outcome, Precision
from sluice.benchmark.strategies import STRATEGIES
from sluice.benchmark.table import console_for_tables

__all__ = ["DTYPES", "Comparison", "compare", "main", "make_files"]

MIB = 1 << 20

DTYPES: tuple[Precision, ...] = ("float32", "bfloat16")

_PACKAGES = ("torch", "sluice")


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """One method: its predicted and measured memory."""

    #: Name of the method.
    method: str
    #: Dtype of the finished model; the checkpoint is fp32.
    dtype: Precision
    #: Predicted peak of host memory, all kinds together, in bytes.
    predicted_bytes: int
    #: Outcome of the process.
    outcome: Outcome

    @property
    def error_bytes(self) -> int:
        """Predicted minus measured, in bytes."""
        return self.predicted_bytes - self.outcome.total_bytes

    @property
    def allowed_bytes(self) -> int:
        """Largest permitted error, in bytes: 5 % or 32 MiB for sluice, else 10 % or 64 MiB, whichever is more."""
        part, least = (0.05, 32 * MIB) if self.method == "sluice" else (0.10, 64 * MIB)
        return max(int(part * self.outcome.total_bytes), least)

    @property
    def holds(self) -> bool:
        """Whether the method ran and the error is permitted."""
        return self.outcome.status == "ok" and abs(self.error_bytes) <= self.allowed_bytes


def make_files(size: str, folder: Path) -> dict[str, Path]:
    """Write the missing checkpoints and return the checkpoint of each method."""
    file, parts = folder / f"{size}.pth", folder / f"{size}-parts"
    if not file.exists():
        make_checkpoint(file, size, torch.float32, "torch")
    if not parts.exists():
        make_checkpoint(parts, size, torch.float32, "per-parameter")
    return {method.name: parts if method.name == "per-parameter" else file for method in STRATEGIES}


def compare(
    size: str, files: dict[str, Path], dtypes: Sequence[Precision] = DTYPES, methods: Sequence[str] = ()
) -> Iterator[Comparison]:
    """Predict each method in this process, run it in a fresh process, and yield both results.

    Args:
        size: Size of GPT-2.
        files: Checkpoint of each method.
        dtypes: Dtypes of the finished model.
        methods: Names of the methods; empty for all.
    """
    for dtype in dtypes:
        for method in methods or files:
            with sluice.empty_init():
                model = build(size)
            # Interleaved: pages that a load leaves in the page cache change how sluice would read.
            planned = sluice.plan(model, files[method], dtype=getattr(torch, dtype))
            predicted = next(each for each in planned.methods if each.method == method)
            job = MethodJob(
                method=method, model=size, checkpoint=str(files[method]), dtype=dtype, device="cpu", verify=False
            )
            yield Comparison(
                method=method, dtype=dtype, predicted_bytes=predicted.host.total_bytes, outcome=run_job(job)
            )


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--size", type=click.Choice(SIZES), default="large", show_default=True, help="Size of the model.")
@click.option("--directory", type=click.Path(path_type=Path), help="Keep the checkpoints here and use those there are.")
def main(size: str, directory: Path | None) -> None:
    """Predict the peak memory of every way to load a GPT-2, measure it in fresh processes, and print both."""
    console = console_for_tables()
    if directory is not None:
        directory.mkdir(parents=True, exist_ok=True)
    table = Table("method", "finished", "predicted", "measured", "error", "", box=MARKDOWN)
    wrong = []
    with nullcontext(directory) if directory else temporary_folder() as folder:
        with console.status("making checkpoints"):
            files = make_files(size, folder)
        for each in compare(size, files):
            measured = each.outcome.total_bytes
            table.add_row(
                each.method,
                each.dtype,
                format_bytes(each.predicted_bytes),
                format_bytes(measured) if each.outcome.status == "ok" else each.outcome.status,
                f"{each.error_bytes / MIB:+.0f} MiB" if measured else "",
                f"{100 * each.error_bytes / measured:+.1f} %" if measured else "",
            )
            console.print(f"{each.method} {each.dtype}: {each.outcome.status} {each.outcome.reason}", soft_wrap=True)
            wrong += [] if each.holds else [f"{each.method} {each.dtype}"]
        machine = _machine.describe(folder, _PACKAGES)
    console.print(table)
    console.print("\n".join(f"{name}: {value}" for name, value in machine.items()), highlight=False)
    if wrong:
        raise click.ClickException(f"the error is too large: {', '.join(wrong)}")


if __name__ == "__main__":
    main()
