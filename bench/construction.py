"""``python -m bench.construction``: modules built without memory, by ``empty_init`` and by ``torch.device("meta")``.

GPT-2 large as the model of ``sluice.benchmark`` and, if transformers is installed, as theirs. Each is built in turn in
one warm process, and the processor time is measured. The goal: ``empty_init`` takes at most 1.1 times as long. The
command fails if it is missed.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from importlib.util import find_spec

import click
import torch
from rich.table import Table
from torch import nn

import sluice
from sluice.benchmark.gpt2 import gpt2
from sluice.benchmark.results import console_for_tables

__all__ = ["main"]

_GOAL = 1.1


def _models(size: str) -> dict[str, Callable[[], nn.Module]]:
    """Return the constructors of the same architecture, by name."""
    models: dict[str, Callable[[], nn.Module]] = {f"GPT-2 {size}": lambda: gpt2(size)}
    if find_spec("transformers") is not None:
        from transformers import GPT2Config, GPT2LMHeadModel

        layers, width = {"small": (12, 768), "medium": (24, 1024), "large": (36, 1280), "xl": (48, 1600)}[size]
        config = GPT2Config(n_layer=layers, n_embd=width, n_head=width // 64)
        models[f"GPT-2 {size} of transformers"] = lambda: GPT2LMHeadModel(config)
    return models


def _seconds(build: Callable[[], nn.Module], context: AbstractContextManager[object]) -> float:
    gc.collect()
    start = time.process_time()
    with context:
        build()
    return time.process_time() - start


@click.command()
@click.option("--runs", default=9, show_default=True, help="Builds by each method; the table shows the median.")
@click.option("--size", type=click.Choice(["small", "medium", "large", "xl"]), default="large", show_default=True)
def main(*, runs: int, size: str) -> None:
    """Measure how long modules without memory take to build."""
    table = Table("model", "empty_init, ms", "torch.device('meta'), ms", "ratio", "goal", "kept")
    kept = True
    for name, build in _models(size).items():
        ours, theirs = [], []
        for _ in range(runs + 1):
            ours.append(_seconds(build, sluice.empty_init()))
            theirs.append(_seconds(build, torch.device("meta")))
        medians = [statistics.median(seconds[1:]) for seconds in (ours, theirs)]  # the first build is the warm-up
        ratio = medians[0] / medians[1]
        kept &= ratio <= _GOAL
        milliseconds = [f"{1e3 * median:.0f}" for median in medians]
        table.add_row(name, *milliseconds, f"{ratio:.2f}", f"{_GOAL}", "yes" if ratio <= _GOAL else "no")
    console_for_tables().print(table)
    if not kept:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
