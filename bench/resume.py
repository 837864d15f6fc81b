"""``python -m bench.resume``: resume a training run, a GPT-2 and its AdamW, with sluice and torch."""

from __future__ import annotations

from pathlib import Path

import click

from bench._common import options, working_folder
from bench._resuming import RESUMING, RESUMING_REFERENCE, make_run, resumed_bytes
from sluice._units import format_bytes
from sluice.benchmark import machine as _machine
from sluice.benchmark.records import Scenario
from sluice.benchmark.results import write_results
from sluice.benchmark.runner import run_with_progress
from sluice.benchmark.summary import summarise
from sluice.benchmark.table import console_for_tables, print_tables

__all__ = ["ALLOWED_BYTES", "main"]

#: Permitted memory of sluice in addition to the finished model and state, in bytes.
ALLOWED_BYTES = 100 << 20

_RAW = "raw-direct"


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@options(size="medium")
@click.option(
    "--method", "methods", type=click.Choice([one.name for one in RESUMING]), multiple=True, help="Only this method."
)
def main(size: str, runs: int, directory: Path | None, out: Path, methods: tuple[str, ...]) -> None:
    """Resume a training run from one file, with model and optimizer state: seconds and peak memory."""
    console = console_for_tables()
    with working_folder(directory) as folder:
        path = folder / f"{size}.run.pt"
        if not path.exists():
            with console.status(f"making {path.name}"):
                make_run(path, size)
        chosen = [one.name for one in RESUMING if not methods or one.name in methods]
        scenario = Scenario(
            title=f"GPT-2 {size} with AdamW, model and state, fp32",
            model=size,
            dtype="float32",
            device="cpu",
            states=("cold", "warm"),
            checkpoints=dict.fromkeys([_RAW, *chosen], path),
            final_bytes=resumed_bytes(size),
            reference=RESUMING_REFERENCE.name,
        )
        machine = _machine.describe(folder, ("torch", "sluice"))
        done = run_with_progress(console, [scenario], repetitions=runs)
    print_tables(console, [scenario], done)
    command = " ".join(
        ["python -m bench.resume", f"--size {size}", f"--runs {runs}", *(f"--method {m}" for m in methods)]
    )
    write_results(out, "resume", machine=machine, command=command, scenarios=[scenario], runs=done)
    console.print(f"written: {out}/resume.md, {out}/resume.json", highlight=False, soft_wrap=True)
    rows = {row.method: row for row in summarise(scenario, done)}
    wrong = [row.method for row in rows.values() if row.right is False]
    if wrong:
        raise click.ClickException(f"wrong weights, state or logits: {', '.join(wrong)}")
    ours = rows.get("sluice-resume")
    if ours is not None and ours.total_bytes > scenario.final_bytes + ALLOWED_BYTES:
        raise click.ClickException(
            f"sluice grew by {format_bytes(ours.total_bytes)}, more than the finished state and "
            f"{format_bytes(ALLOWED_BYTES)}: {format_bytes(scenario.final_bytes + ALLOWED_BYTES)}"
        )


if __name__ == "__main__":
    main()
