"""``python -m bench.load``: time and memory of sluice and its peers when they load GPT-2, with raw reads to compare."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import click
import torch
from rich.console import Console

from bench._common import options, refuse_wrong_weights, show_document, working_folder
from bench._llama import LLAMA_1B, LLAMA_TINY, LlamaShape, write_directory
from bench._peers import ALL_PEERS, HUGGING_FACE
from sluice.benchmark import machine as _machine
from sluice.benchmark.gpt2 import random_state_dict, write_checkpoint
from sluice.benchmark.methods import absence, final_bytes
from sluice.benchmark.records import (
    PTH,
    SAFETENSORS,
    SHARDS,
    SHORT_DTYPES,
    Kind,
    Precision,
    Scenario,
)
from sluice.benchmark.results import as_document, console_for_tables, section_of
from sluice.benchmark.runner import run_with_progress

__all__ = ["CASES", "main"]

_PACKAGES = (
    "torch",
    "sluice",
    "safetensors",
    "accelerate",
    "transformers",
    "runai-model-streamer",
    "fastsafetensors",
)

#: Kinds of checkpoints in the table of a kind.
_KINDS: dict[Kind, tuple[Kind, ...]] = {
    PTH: (PTH,),
    SAFETENSORS: (SAFETENSORS,),
    SHARDS: (SHARDS, HUGGING_FACE),
}

_LLAMA = "bench._llama:llama"

#: Linux returns memory to the host two seconds after it was freed (``PAGE_REPORTING_DELAY`` in mm/page_reporting.c),
#: which takes a fraction of a second.
_SETTLING_SECONDS = 3.0

#: Balloon devices of a virtual machine; memory is returned to the host only through them.
_BALLOONS = Path("/sys/bus/virtio/drivers/virtio_balloon")


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One table."""

    #: Kind of the checkpoint.
    suffix: Kind
    #: Dtype of the finished model; the checkpoint of GPT-2 is fp32, that of Llama bf16.
    dtype: Precision
    #: A model other than the chosen size of GPT-2.
    model: str | None = None
    #: Number of files of a checkpoint of Llama.
    shards: int = 1


#: Every table by its name on the command line.
CASES = {
    "pth-fp32": Case(suffix=".pth", dtype="float32"),
    "pth-bf16": Case(suffix=".pth", dtype="bfloat16"),
    "safetensors-fp32": Case(suffix=".safetensors", dtype="float32"),
    "safetensors-bf16": Case(suffix=".safetensors", dtype="bfloat16"),
    "llama-bf16": Case(suffix=SHARDS, dtype="bfloat16", model=_LLAMA),
    "llama-shards-bf16": Case(suffix=SHARDS, dtype="bfloat16", model=_LLAMA, shards=8),
}


def _scenario(name: str, size: str, methods: Sequence[str], directory: Path) -> Scenario:
    case = CASES[name]
    model = case.model or size
    kinds = {each.name: next((kind for kind in each.reads if kind in _KINDS[case.suffix]), None) for each in ALL_PEERS}
    chosen = {method: kind for method, kind in kinds.items() if kind is not None and (not methods or method in methods)}
    llama = directory / f"llama-{'tiny' if size == 'tiny' else '1b'}-{case.shards}"
    shape = LLAMA_TINY if size == "tiny" else LLAMA_1B
    arguments = json.dumps(shape) if model == _LLAMA else "{}"
    return Scenario(
        title=_title(case, size),
        model=model,
        model_args=arguments,
        dtype=case.dtype,
        device=_machine.device(),
        states=("cold", "warm"),
        checkpoints={
            method: llama if model == _LLAMA else Path() if absence(method) else directory / f"{model}{kind}"
            for method, kind in chosen.items()
        },
        final_bytes=final_bytes(model, getattr(torch, case.dtype), arguments),
        truth=llama if model == _LLAMA else None,
    )


def _settling_seconds() -> float:
    """Return how long the kernel returns freed memory to the host, in seconds; 0 if it does not."""
    return _SETTLING_SECONDS if any(_BALLOONS.glob("virtio*")) else 0.0


def _title(case: Case, size: str) -> str:
    if case.model == _LLAMA:
        files = f"{case.shards} files" if case.shards > 1 else "one file"
        return f"Llama {'tiny' if size == 'tiny' else '1B'}, .safetensors, {files}, bf16 → bf16"
    return f"GPT-2 {size}, {case.suffix}, fp32 → {SHORT_DTYPES[case.dtype]}"


def _make_checkpoints(console: Console, scenarios: Sequence[Scenario]) -> None:
    """Write the missing checkpoints of the scenarios."""
    wanted = {path: scenario for scenario in scenarios for path in scenario.checkpoints.values() if path != Path()}
    for path, scenario in wanted.items():
        if path.exists():
            continue
        with console.status(f"making {path.name}"):
            if scenario.model == _LLAMA:
                shape: LlamaShape = json.loads(scenario.model_args)
                write_directory(path, shape, shards=int(path.name.rpartition("-")[2]))
            else:
                write_checkpoint(random_state_dict(scenario.model, torch.float32), path)


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@options(runs=5)
@click.option(
    "--case",
    "cases",
    type=click.Choice(list(CASES)),
    multiple=True,
    help="This table; repeatable. Default: those of the documentation.",
)
@click.option(
    "--method", "methods", type=click.Choice([peer.name for peer in ALL_PEERS]), multiple=True, help="Only this method."
)
@click.option("--minutes", type=click.FloatRange(0, min_open=True), help="Start no repetition later.")
def main(
    size: str,
    runs: int,
    directory: Path | None,
    out: Path,
    cases: tuple[str, ...],
    methods: tuple[str, ...],
    minutes: float | None,
) -> None:
    """Compare loaders: seconds and peak memory, cold and cached, each load in a fresh process."""
    console = console_for_tables()
    with working_folder(directory) as folder:
        machine = _machine.describe(folder, _PACKAGES)
        every = [_scenario(name, size, methods, folder) for name in cases or CASES]
        scenarios = [scenario for scenario in every if scenario.checkpoints]
        _make_checkpoints(console, scenarios)
        done = run_with_progress(
            console,
            scenarios,
            repetitions=runs,
            settle_seconds=_settling_seconds(),
            end_seconds=math.inf if minutes is None else 60 * minutes,
        )
    selection = [*(f"--case {name}" for name in cases), *(f"--method {name}" for name in methods)]
    command = " ".join(["python -m bench.load", f"--size {size}", f"--runs {runs}", *selection])
    command += f" --minutes {minutes:g}" if minutes is not None else ""
    document = as_document(machine=machine, command=command, scenarios=scenarios, runs=done)
    show_document(out, "load", document, [section_of(each, done) for each in scenarios])
    refuse_wrong_weights(document)


if __name__ == "__main__":
    main()
