"""The comparison that ``sluice bench`` runs. It imports torch, which the command itself does without."""

from __future__ import annotations

import json
import math
import shlex
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from sluice.benchmark import comparison as _comparison
from sluice.benchmark import machine as _machine
from sluice.benchmark import runner as _runner
from sluice.benchmark.comparison import ComparedModel, can_read, default_methods, own_model, scenario
from sluice.benchmark.methods import LOADERS, is_builtin, main_dtype
from sluice.benchmark.records import Precision, State
from sluice.benchmark.results import (
    as_document,
    console_for_tables,
    print_section,
    section_of,
    write_document,
    write_report,
)
from sluice.cli.output import Failure

__all__ = ["END_SECONDS", "compare"]

#: Time of the whole command after which a comparison of a chosen size starts no load: the machine became busier.
END_SECONDS = 180.0

#: Parameters that the repeated command line omits: those of the output, and the size, which is added as chosen.
_NOT_REPEATED = {"size", "cold", "directory", "out", "as_json"}

_PACKAGES = ("torch", "sluice", "safetensors", "accelerate")


def compare(context: click.Context, options: Any) -> None:
    """Compare, print the tables and write the results.

    Args:
        context: Of the command.
        options: Has the options as attributes.

    Raises:
        Failure: The disk is full or refuses the results, or weights are wrong.
    """
    console = console_for_tables(stderr=options.as_json)
    device = options.device or _machine.device()
    states: tuple[State, ...] = ("cold", "warm")
    if options.cold is not None:
        states = states[:1] if options.cold else states[1:]
    begin = time.monotonic()
    with _refused_by_the_system(), _machine.temporary_folder(options.directory) as folder:
        options.out.mkdir(parents=True, exist_ok=True)  # before the loads
        machine = _machine.describe(folder, _PACKAGES)
        subject, precisions, end_seconds = _subject(console, options, folder, device, len(states))
        methods = _choose_methods(subject, options.methods)
        with console.status("making the checkpoints"):
            plan = partial(scenario, subject, folder, methods, device=device, states=states)
            scenarios = [plan(dtype, host_limit_bytes=options.ram_limit) for dtype in precisions]
        left = end_seconds - (time.monotonic() - begin)
        runs = _runner.run_with_progress(
            console, scenarios, repetitions=options.runs, timeout_seconds=options.timeout, end_seconds=left
        )
        command = _command(context, subject, options.cold)
        document = as_document(machine=machine, command=command, scenarios=scenarios, runs=runs)
        tables = [section_of(each, runs) for each in scenarios]
        write_document(options.out, "results", document, tables)
        write_report(options.out / "report.html", document, scenarios, runs)
    if options.as_json:
        click.echo(json.dumps(document))
    else:
        for table in tables:
            print_section(console, table)
        findings = [text for each in document["scenarios"] for text in each["findings"].values()]
        results = f"results: {options.out / 'results.md'}, {options.out / 'results.json'}"
        for line in (*findings, results, f"report: {(options.out / 'report.html').absolute()}"):
            console.print(line, highlight=False, markup=False, soft_wrap=True)
    wrong = {row["method"] for each in document["scenarios"] for row in each["rows"] if row["right"] is False}
    # A peer may do what the user's model does not expect; sluice may not.
    if wrong and (is_builtin(subject.model) or any(name.startswith("sluice") for name in wrong)):
        raise Failure(f"wrong weights: {', '.join(sorted(wrong))}")


def _subject(
    console: Console, options: Any, folder: Path, device: str, states: int
) -> tuple[ComparedModel, Sequence[Precision], float]:
    """Return the compared model, the dtypes, and the seconds of the command after which no load starts."""
    precisions: Sequence[Precision] = options.dtypes or ("float32", "bfloat16")
    if options.checkpoint is not None and options.factory is not None:
        own = own_model(options.checkpoint.absolute(), options.factory, options.model_args, options.key)
        return own, options.dtypes or (main_dtype(options.checkpoint),), math.inf
    if options.size is not None:
        return ComparedModel(model=options.size), precisions, math.inf
    loads = len(_choose_methods(ComparedModel(model="tiny"), options.methods)) * options.runs
    with console.status("looking at memory, disk and time"):
        size, seconds = _comparison.fitting_size(folder, device, len(precisions) * (1 + loads * states))
    text = f"GPT-2 {size}: about {seconds:.0f} s; --size chooses another"
    console.print(text, highlight=False, soft_wrap=True)
    return ComparedModel(model=size), precisions, END_SECONDS


@contextmanager
def _refused_by_the_system() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        text = f"{error.filename or 'the disk'}: {error.strerror}"
        raise Failure(f"{text}; choose a smaller --size, or another --directory or --out") from error


def _choose_methods(subject: ComparedModel, asked: tuple[str, ...]) -> list[str]:
    """Return the methods to run, each once, in the order of the tables."""
    if not asked:
        return default_methods(subject)
    known = list(LOADERS)
    unknown = [name for name in asked if name != "all" and name not in known]
    if unknown:
        message = f"there is no {unknown[0]!r}; the methods are {', '.join(known)}; python -m bench.load has more"
        raise click.BadParameter(message, param_hint="--method")
    return [name for name in known if name in asked or ("all" in asked and can_read(name, subject))]


def _command(context: click.Context, subject: ComparedModel, cold: bool | None) -> str:  # noqa: FBT001
    """Return the command line that repeats the comparison, with the chosen size."""
    words = ["sluice", "bench"]
    if subject.original is None:
        words += ["--size", subject.model]
    for parameter in context.command.params:
        value = context.params[str(parameter.name)]
        if parameter.name in _NOT_REPEATED or value in (None, (), parameter.get_default(context)):
            continue
        option = [] if isinstance(parameter, click.Argument) else parameter.opts[:1]
        for each in value if isinstance(value, tuple) else (value,):
            words += [*option, str(each)]
    if cold is not None:
        words.append("--cold" if cold else "--warm")
    return shlex.join(words)
