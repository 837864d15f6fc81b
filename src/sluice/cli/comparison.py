"""The comparison that ``sluice bench`` runs. It imports torch, which the command itself does without."""

from __future__ import annotations

import errno
import json
import math
import shlex
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, get_args

import click
from rich.console import Console

from sluice.benchmark import machine as _machine
from sluice.benchmark import runner as _runner
from sluice.benchmark import sizes as _sizes
from sluice.benchmark.comparison import (
    Checkpoints,
    ComparedModel,
    builtin_subject,
    default_methods,
    own_subject,
    scenario,
)
from sluice.benchmark.folder import temporary_folder
from sluice.benchmark.methods import LOADERS
from sluice.benchmark.records import MethodRun, Precision, Scenario, State
from sluice.benchmark.report import write_report
from sluice.benchmark.results import write_results
from sluice.benchmark.sizes import END_SECONDS, Choice, Extent
from sluice.benchmark.subjects import main_dtype
from sluice.benchmark.summary import summarise
from sluice.benchmark.table import console_for_tables, print_tables
from sluice.cli.failures import Failure
from sluice.cli.views.bench import print_choice, print_end, print_machine

__all__ = ["MethodComparison"]

_SMALLEST = "tiny"

#: Parameters that the repeated command line omits: output options, and the size and states, which are added as chosen.
_NOT_REPEATED = {"size", "cold", "directory", "keep", "out", "as_json"}

_PACKAGES = ("torch", "sluice", "safetensors", "accelerate", "fastsafetensors", "runai-model-streamer", "tensorizer")


@dataclass(frozen=True, slots=True, kw_only=True)
class MethodComparison:
    """Options of ``sluice bench``; its help describes them."""

    checkpoint: Path | None
    factory: str | None
    model_args: str
    key: str | None
    size: str | None
    methods: tuple[str, ...]
    dtypes: tuple[Any, ...]
    cold: bool | None
    runs: int
    device: str | None
    ram_limit: int | None
    timeout: float
    directory: Path | None
    keep: bool
    out: Path
    as_json: bool

    def run(self) -> None:
        """Compare, print the tables and write the results.

        Raises:
            Failure: The disk is full, or weights are wrong.
        """
        if self.directory is not None:
            self.directory.mkdir(parents=True, exist_ok=True)
        console = console_for_tables(stderr=self.as_json)
        where = self.device or _machine.device()
        begin, end_seconds = time.monotonic(), math.inf
        with _full_disk_is_a_failure(), temporary_folder(self.directory, keep=self.keep) as folder:
            machine = _machine.describe(folder, _PACKAGES)
            print_machine(console, machine)
            precisions = list(self.dtypes)
            states: tuple[State, ...] = ("cold", "warm") if self.cold is None else ("cold",) if self.cold else ("warm",)
            if self.checkpoint is not None and self.factory is not None:
                subject = own_subject(self.checkpoint.absolute(), self.factory, self.model_args, self.key)
                precisions = precisions or [_own_precision(self.checkpoint)]
            elif self.size is not None:
                subject = builtin_subject(self.size)
            else:
                loads = len(_choose_methods(builtin_subject(_SMALLEST), self.methods)) * self.runs
                choice = _choose(console, folder, where, _extents(self.cold, precisions, loads))
                subject, states, precisions = builtin_subject(choice.size), choice.states, list(choice.dtypes)
                end_seconds = END_SECONDS
            chosen = _choose_methods(subject, self.methods)
            with console.status("making the checkpoints"):
                plan = partial(scenario, subject, Checkpoints(subject, folder), chosen, device=where, states=states)
                scenarios = [
                    plan(dtype, host_limit_bytes=self.ram_limit) for dtype in precisions or ("float32", "bfloat16")
                ]
            left = end_seconds - (time.monotonic() - begin)
            found = _runner.run_with_progress(
                console, scenarios, repetitions=self.runs, timeout_seconds=self.timeout, end_seconds=left
            )
            command = _command(click.get_current_context(), subject, states, precisions)
            document = _write(self.out, subject.title, machine, command, scenarios, found)
        if self.as_json:
            click.echo(json.dumps(document))
        else:
            print_tables(console, scenarios, found)
            print_end(console, scenarios, found, self.out, folder if self.keep else None)
        _fail_if_wrong(scenarios, found)


@contextmanager
def _full_disk_is_a_failure() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno not in {errno.ENOSPC, errno.EDQUOT}:
            raise
        text = f"{error.filename or 'the disk'}: {error.strerror}"
        raise Failure(f"{text}; choose a smaller --size, or another --directory or --out") from error


def _extents(cold: bool | None, dtypes: Sequence[Precision], loads: int) -> dict[Extent, int]:  # noqa: FBT001
    """Return the number of processes of each choice of states and dtypes, the most first; ``loads`` for each state."""
    both: tuple[State, ...] = ("cold", "warm")
    states = [both, both, both[:1]] if cold is None else [both[:1] if cold else both[1:]] * 2
    precisions: list[tuple[Precision, ...]] = [tuple(dtypes)] * 3
    if not dtypes:
        precisions = [("float32", "bfloat16"), ("float32",), ("float32",)]
    extents = dict.fromkeys(zip(states, precisions, strict=False))
    return {extent: len(extent[1]) * (1 + loads * len(extent[0])) for extent in extents}


def _choose(console: Console, folder: Path, device: str, processes: dict[Extent, int]) -> Choice:
    """Choose size, states and dtypes for this machine, from the number of processes of each extent."""
    with console.status("looking at memory, disk and time"):
        choice = _sizes.choose_here(folder, device, processes)
    print_choice(console, choice)
    return choice


def _own_precision(checkpoint: Path) -> Precision:

    own = main_dtype(checkpoint)
    return next((dtype for dtype in get_args(Precision) if dtype == own), "float32")


def _choose_methods(subject: ComparedModel, asked: tuple[str, ...]) -> list[str]:
    """Return the methods to run, each once, in the order of the tables."""
    if not asked:
        return default_methods(subject)
    known = list(LOADERS)
    unknown = [name for name in asked if name != "all" and name not in known]
    if unknown:
        message = f"there is no {unknown[0]!r}; the methods are {', '.join(known)}"
        raise click.BadParameter(message, param_hint="--method")
    return [name for name in known if name in asked or "all" in asked]


def _command(
    context: click.Context, subject: ComparedModel, states: tuple[State, ...], dtypes: Sequence[Precision]
) -> str:
    """Return the command line that repeats the comparison, with the chosen size, states and dtypes."""
    words = ["sluice", "bench"]
    if subject.original is None:
        words += ["--size", subject.model]
    for parameter in context.command.params:
        value = context.params[str(parameter.name)]
        if parameter.name in _NOT_REPEATED or value in (None, (), parameter.get_default(context)):
            continue
        if isinstance(parameter, click.Argument):
            words.append(str(value))
        else:
            for each in value if isinstance(value, tuple) else (value,):
                words += [parameter.opts[0], str(each)]
    if subject.original is None and len(dtypes) == 1 and not context.params["dtypes"]:
        words += ["--dtype", "fp32"]
    if len(states) == 1:
        words.append(f"--{states[0]}")
    return shlex.join(words)


def _write(
    out: Path, title: str, machine: dict[str, str], command: str, scenarios: list[Scenario], runs: list[MethodRun]
) -> dict[str, Any]:
    """Write the results and the page, and return the content of the JSON file."""
    page = out / "report.html"
    document = write_results(out, "results", machine=machine, command=command, scenarios=scenarios, runs=runs)
    write_report(page, title=title, machine=machine, command=command, scenarios=scenarios, runs=runs)
    return document


def _fail_if_wrong(scenarios: list[Scenario], runs: list[MethodRun]) -> None:
    """Fail if sluice loaded wrong weights, or any method did so into a built-in model."""
    wrong = {row.method for scenario in scenarios for row in summarise(scenario, runs) if row.right is False}
    if wrong and (scenarios[0].builtin or any(name.startswith("sluice") for name in wrong)):
        raise Failure(f"wrong weights or logits: {', '.join(sorted(wrong))}")
