"""``python -m bench.load``: time and memory of sluice and its peers when they load GPT-2, with raw reads to compare."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

import click
import torch
from rich.console import Console

from sluice.benchmark import machine as _machine
from sluice.benchmark.folder import temporary_folder
from sluice.benchmark.gpt2 import ONE_TENSOR, SIZES, final_bytes, make_checkpoint
from sluice.benchmark.peers import PEERS
from sluice.benchmark.records import Precision, Scenario, State
from sluice.benchmark.results import write_results
from sluice.benchmark.runner import run_with_progress
from sluice.benchmark.summary import summarise
from sluice.benchmark.table import console_for_tables, print_tables
from sluice.benchmark.writing import CheckpointFormat

__all__ = ["CASES", "main"]

_PACKAGES = ("torch", "sluice", "safetensors", "accelerate", "runai-model-streamer", "fastsafetensors")

_FORMATS: dict[str, CheckpointFormat] = {".pth": "torch", ".safetensors": "safetensors"}

_COLD_AND_WARM: tuple[State, ...] = ("cold", "warm")
_IN_A_ROW: tuple[State, ...] = ("first", "second", "third")


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One table."""

    #: Suffix of the checkpoint.
    suffix: str
    #: Dtype of the finished model; the checkpoint is fp32.
    dtype: Precision
    #: States of the page cache, a column each.
    states: tuple[State, ...] = _COLD_AND_WARM
    #: A model other than the chosen size of GPT-2.
    model: str | None = None


#: Every table by its name on the command line.
CASES = {
    "pth-fp32": Case(suffix=".pth", dtype="float32"),
    "pth-bf16": Case(suffix=".pth", dtype="bfloat16"),
    "safetensors-fp32": Case(suffix=".safetensors", dtype="float32"),
    "safetensors-bf16": Case(suffix=".safetensors", dtype="bfloat16"),
    "one-tensor-bf16": Case(suffix=".pth", dtype="bfloat16", model=ONE_TENSOR),
    "in-a-row-pth": Case(suffix=".pth", dtype="float32", states=_IN_A_ROW),
    "in-a-row-safetensors": Case(suffix=".safetensors", dtype="float32", states=_IN_A_ROW),
}


def _scenario(name: str, size: str, methods: Sequence[str], directory: Path) -> Scenario:
    case = CASES[name]
    model = case.model or size
    subject = "one tensor of 2 GiB" if case.model else f"GPT-2 {size}"
    after = "fp32" if case.dtype == "float32" else "bf16"
    chosen = [
        method.name for method in PEERS if case.suffix in method.reads and (not methods or method.name in methods)
    ]
    return Scenario(
        title=f"{subject}, {case.suffix}, fp32 → {after}"
        + (", three loads in a row" if "first" in case.states else ""),
        model=model,
        dtype=case.dtype,
        device=_machine.device(),
        states=case.states,
        checkpoints=dict.fromkeys(chosen, directory / f"{model}{case.suffix}"),
        final_bytes=final_bytes(model, torch.bfloat16 if case.dtype == "bfloat16" else torch.float32),
    )


def _make_checkpoints(console: Console, scenarios: Sequence[Scenario]) -> None:
    """Write the missing checkpoints of the scenarios."""
    models = {path: scenario.model for scenario in scenarios for path in scenario.checkpoints.values()}
    for path, model in models.items():
        if not path.exists():
            with console.status(f"making {path.name}"):
                make_checkpoint(path, model, torch.float32, _FORMATS[path.suffix])


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--size", type=click.Choice(SIZES), default="large", show_default=True, help="Size of the model.")
@click.option("--case", "cases", type=click.Choice(list(CASES)), multiple=True, help="Only this table; repeatable.")
@click.option(
    "--method", "methods", type=click.Choice([peer.name for peer in PEERS]), multiple=True, help="Only this method."
)
@click.option("--runs", type=click.IntRange(1), default=5, show_default=True, help="Repetitions; tables show medians.")
@click.option("--directory", type=click.Path(path_type=Path), help="Keep the checkpoints here and use those there are.")
@click.option("--out", type=click.Path(path_type=Path), default=Path("bench-out"), show_default=True, help="Results.")
def main(
    size: str, cases: tuple[str, ...], methods: tuple[str, ...], runs: int, directory: Path | None, out: Path
) -> None:
    """Compare loaders: seconds and peak memory, cold and cached, each load in a fresh process."""
    console = console_for_tables()
    if directory is not None:
        directory.mkdir(parents=True, exist_ok=True)
    with nullcontext(directory) if directory else temporary_folder() as folder:
        machine = _machine.describe(folder, _PACKAGES)
        every = [_scenario(name, size, methods, folder) for name in cases or CASES]
        scenarios = [scenario for scenario in every if scenario.checkpoints]
        _make_checkpoints(console, scenarios)
        done = run_with_progress(console, scenarios, repetitions=runs, settle_seconds=_machine.settling_seconds())
    print_tables(console, scenarios, done)
    selection = [*(f"--case {name}" for name in cases), *(f"--method {name}" for name in methods)]
    command = " ".join(["python -m bench.load", f"--size {size}", f"--runs {runs}", *selection])
    write_results(out, "load", machine=machine, command=command, scenarios=scenarios, runs=done)
    console.print(f"written: {out}/load.md, {out}/load.json", highlight=False, soft_wrap=True)
    wrong = [row.method for scenario in scenarios for row in summarise(scenario, done) if row.right is False]
    if wrong:
        raise click.ClickException(f"wrong weights or logits: {', '.join(wrong)}")


if __name__ == "__main__":
    main()
