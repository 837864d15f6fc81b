"""``sluice bench``: compare the ways to load one checkpoint, each in a separate process."""

from __future__ import annotations

import errno
import json
import math
import shlex
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from sluice.cli.failures import Failure
from sluice.cli.options import DTypeName, Size, find_factory, parse_arguments
from sluice.measuring._limit import memory_limit_refusal

if TYPE_CHECKING:
    from rich.console import Console

    from sluice.benchmark.comparison import ComparedModel
    from sluice.benchmark.records import MethodRun, Precision, Scenario, State
    from sluice.benchmark.sizes import Choice, Extent

__all__ = ["bench_command"]

_DTYPES: dict[str, Precision] = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}

_SIZES = ("tiny", "small", "medium", "large", "xl")

#: Parameters that the repeated command line omits: output options, and the size and states, which are added as chosen.
_NOT_REPEATED = {"size", "cold", "directory", "keep", "out", "as_json"}

_PACKAGES = ("torch", "sluice", "safetensors", "accelerate", "fastsafetensors", "runai-model-streamer", "tensorizer")


class _ComparedDType(DTypeName):
    """A dtype that can be compared, converted to its short name."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        name = super().convert(value, param, ctx)
        short = next((short for short, compared in _DTYPES.items() if compared == name), None)
        return short or self.fail(f"{value!r} is not compared: write {', '.join(_DTYPES)}", param, ctx)


@click.command("bench")
@click.argument("checkpoint", required=False, type=click.Path(exists=True, path_type=Path))
@click.option("--model", "factory", metavar="MODULE:NAME", help="What builds the model of CHECKPOINT.")
@click.option("--model-args", metavar="JSON", default="{}", help="Its arguments: an object by name, an array in order.")
@click.option("--key", help="Part of CHECKPOINT that holds the weights, such as model_state_dict.")
@click.option("--size", type=click.Choice(_SIZES), envvar="SIZE", help="A built-in GPT-2, with a generated checkpoint.")
@click.option(
    "--method", "methods", multiple=True, metavar="NAME", help="Only this method; repeatable. 'all': all of them."
)
@click.option("--dtype", "dtypes", multiple=True, type=_ComparedDType(auto=False), help="Finished dtype; repeatable.")
@click.option("--cold/--warm", "cold", default=None, help="Only with the checkpoint out of, or in, the page cache.")
@click.option("--runs", type=click.IntRange(1), default=1, show_default=True, help="Repetitions; tables show medians.")
@click.option("--device", type=click.Choice(["cpu", "cuda"]), help="Where models go; default: cuda if there is one.")
@click.option("--ram-limit", type=Size(), help="Host memory per process, such as 2GiB, with the interpreter.")
@click.option(
    "--timeout",
    type=click.FloatRange(1),
    default=900.0,
    show_default=True,
    help="Seconds until a load is stopped.",
)
@click.option(
    "--directory", type=click.Path(path_type=Path), help="For generated checkpoints. Default: the temporary directory."
)
@click.option("--keep", is_flag=True, help="Keep the generated checkpoints.")
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    default=Path("bench-out"),
    show_default=True,
    help="Results.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the results as one JSON object, and nothing else.")
def bench_command(
    checkpoint: Path | None,
    *,
    factory: str | None,
    model_args: str,
    key: str | None,
    size: str | None,
    methods: tuple[str, ...],
    dtypes: tuple[str, ...],
    cold: bool | None,
    runs: int,
    device: str | None,
    ram_limit: int | None,
    timeout: float,
    directory: Path | None,
    keep: bool,
    out: Path,
    as_json: bool,
) -> None:
    """Load one checkpoint in several ways and compare peak memory and time.

    Give CHECKPOINT and --model for your own checkpoint, or --size for a GPT-2 with a generated one. With neither, the
    largest GPT-2 is used whose cold and warm loads fit this machine and about two minutes. Each load
    runs in a separate process, which is measured from outside. A process that dies is listed with the reason and its
    progress.

    Writes report.html (a page that works offline, with the memory of all methods over time), results.md and
    results.json into --out.

    \b
    Methods of the tutorial, which run unless --method is given:
      naive, sequential, meta-sequential, mmap, per-parameter, sluice
    Other loaders, which run by name if they are installed:
      torch-load, torch-mmap, torch-assign, torch-dcp, safetensors-load-model,
      safetensors-load-file, accelerate, runai-streamer, fastsafetensors, tensorizer
    For comparison: sluice-load-into, sluice-map, raw-direct, raw-buffered

    \b
    Examples:
      sluice bench --size small
      sluice bench model.pth --model net:Net --method naive --method mmap --method sluice
      sluice bench model.safetensors --model net:Net --method fastsafetensors --dtype bf16 --warm --runs 3
      sluice bench --size large --ram-limit 4GiB --json | jq '.scenarios[].rows'
    """
    _check_options(checkpoint, factory, model_args, size)
    if ram_limit is not None and (refusal := memory_limit_refusal()):
        raise Failure(f"--ram-limit: {refusal}")
    # Here, not above: torch takes a second to import, and wrong options are refused before.
    from sluice.benchmark import machine as _machine
    from sluice.benchmark.comparison import Checkpoints, builtin_subject, own_subject, scenario
    from sluice.benchmark.folder import temporary_folder
    from sluice.benchmark.runner import run_with_progress
    from sluice.benchmark.sizes import END_SECONDS
    from sluice.benchmark.table import console_for_tables, print_tables
    from sluice.cli.views.bench import print_end, print_machine

    if directory is not None:
        directory.mkdir(parents=True, exist_ok=True)
    console = console_for_tables(stderr=as_json)
    where = device or _machine.device()
    begin, end_seconds = time.monotonic(), math.inf
    with _full_disk_is_a_failure(), temporary_folder(directory, keep=keep) as folder:
        machine = _machine.describe(folder, _PACKAGES)
        print_machine(console, machine)
        precisions: list[Precision] = [_DTYPES[name] for name in dict.fromkeys(dtypes)]
        states: tuple[State, ...] = ("cold", "warm") if cold is None else ("cold",) if cold else ("warm",)
        if checkpoint is not None and factory is not None:
            subject = own_subject(checkpoint.absolute(), factory, model_args, key)
            precisions = precisions or [_own_precision(checkpoint)]
        elif size is not None:
            subject = builtin_subject(size)
        else:
            loads = len(_choose_methods(builtin_subject(_SIZES[0]), methods)) * runs
            choice = _choose(console, folder, where, _extents(cold, precisions, loads))
            subject, states, precisions = builtin_subject(choice.size), choice.states, list(choice.dtypes)
            end_seconds = END_SECONDS
        chosen = _choose_methods(subject, methods)
        with console.status("making the checkpoints"):
            plan = partial(scenario, subject, Checkpoints(subject, folder), chosen, device=where, states=states)
            scenarios = [plan(dtype, host_limit_bytes=ram_limit) for dtype in precisions or ("float32", "bfloat16")]
        left = end_seconds - (time.monotonic() - begin)
        found = run_with_progress(console, scenarios, repetitions=runs, timeout_seconds=timeout, end_seconds=left)
        command = _command(click.get_current_context(), subject, states, precisions)
        document = _write(out, subject.title, machine, command, scenarios, found)
    if as_json:
        click.echo(json.dumps(document))
    else:
        print_tables(console, scenarios, found)
        print_end(console, scenarios, found, out, folder if keep else None)
    _fail_if_wrong(scenarios, found)


def _check_options(checkpoint: Path | None, factory: str | None, model_args: str, size: str | None) -> None:
    """Refuse options that contradict each other, before torch is imported."""
    if sys.platform != "linux":
        raise Failure("sluice bench needs Linux: it reads the memory of other processes from /proc")
    if (checkpoint is None) != (factory is None):
        raise click.UsageError("CHECKPOINT and --model belong together: one is loaded into the other")
    if checkpoint is not None and size is not None:
        raise click.UsageError("--size names a built-in model: give either --size, or CHECKPOINT and --model")
    parse_arguments(model_args)
    if factory is not None:
        find_factory(factory)


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
    from sluice.benchmark.sizes import choose_here
    from sluice.cli.views.bench import print_choice

    with console.status("looking at memory, disk and time"):
        choice = choose_here(folder, device, processes)
    print_choice(console, choice)
    return choice


def _own_precision(checkpoint: Path) -> Precision:
    from sluice.benchmark.subjects import main_dtype

    own = main_dtype(checkpoint)
    return next((dtype for dtype in _DTYPES.values() if dtype == own), "float32")


def _choose_methods(subject: ComparedModel, asked: tuple[str, ...]) -> list[str]:
    """Return the methods to run, each once, in the order of the tables."""
    from sluice.benchmark.comparison import default_methods
    from sluice.benchmark.methods import LOADERS

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
    from sluice.benchmark.report import write_report
    from sluice.benchmark.results import write_results

    page = out / "report.html"
    document = write_results(out, "results", machine=machine, command=command, scenarios=scenarios, runs=runs)
    write_report(page, title=title, machine=machine, command=command, scenarios=scenarios, runs=runs)
    return document


def _fail_if_wrong(scenarios: list[Scenario], runs: list[MethodRun]) -> None:
    """Fail if sluice loaded wrong weights, or any method did so into a built-in model."""
    from sluice.benchmark.summary import summarise

    wrong = {row.method for scenario in scenarios for row in summarise(scenario, runs) if row.right is False}
    if wrong and (scenarios[0].builtin or any(name.startswith("sluice") for name in wrong)):
        raise Failure(f"wrong weights or logits: {', '.join(sorted(wrong))}")
