"""Options, folders and results of the commands of this folder, and one process for a measurement."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click
import torch

from sluice.benchmark import machine as _machine
from sluice.benchmark.gpt2 import SIZES, write_checkpoint
from sluice.benchmark.machine import temporary_folder
from sluice.benchmark.process import TIMEOUT_SECONDS, run_tasks
from sluice.benchmark.records import BenchTask, Outcome
from sluice.benchmark.results import TableSection, console_for_tables, print_section, write_document

__all__ = [
    "options",
    "refuse_wrong_weights",
    "run_alone",
    "show",
    "show_document",
    "working_folder",
    "write_shards",
]

_Command = Callable[..., Any]


def options(*, size: str = "large", sizes: Sequence[str] = SIZES, runs: int = 3) -> Callable[[_Command], _Command]:
    """Return a decorator that adds ``--size``, ``--runs``, ``--directory`` and ``--out`` to a command.

    Args:
        size: Default size of the model.
        sizes: Names of the models.
        runs: Default number of repetitions.
    """

    def decorate(command: _Command) -> _Command:
        path, out = click.Path(path_type=Path), Path("bench-out")
        command = click.option("--out", type=path, default=out, show_default=True, help="Results.")(command)
        command = click.option("--directory", type=path, help="Keep checkpoints here, use those there are.")(command)
        command = click.option("--runs", type=click.IntRange(1), default=runs, show_default=True, help="Repetitions.")(
            command
        )
        return click.option("--size", type=click.Choice(sizes), default=size, show_default=True)(command)

    return decorate


@contextmanager
def working_folder(directory: Path | None) -> Iterator[Path]:
    """Lend a directory for checkpoints: the given one, which is created and kept, or a temporary one."""
    if directory is None:
        with temporary_folder() as folder:
            yield folder
    else:
        directory.mkdir(parents=True, exist_ok=True)
        yield directory


def run_alone(
    work: str,
    arguments: Mapping[str, Any],
    *,
    claimed_bytes: int = 0,
    timeout_seconds: float = TIMEOUT_SECONDS,
    host_limit_bytes: int | None = None,
) -> Outcome:
    """Run one task in a fresh process; see ``BenchTask`` and ``run_tasks``."""
    task = BenchTask(work=work, arguments=dict(arguments), claimed_bytes=claimed_bytes)
    (outcome,) = run_tasks([task], timeout_seconds=timeout_seconds, host_limit_bytes=host_limit_bytes)
    return outcome


def show(out: Path, name: str, packages: Sequence[str], sections: Sequence[TableSection], **results: object) -> None:
    """Print tables, and write them with the machine, the command line and the results to ``out``."""
    context = click.get_current_context()
    given = [
        f"{parameter.opts[0]} {value}"
        for parameter in context.command.params
        for values in [context.params[str(parameter.name)]]
        for value in (values if isinstance(values, tuple) else [values])
        if parameter.name not in {"out", "directory"} and value not in (None, False)
    ]
    command = " ".join([f"python -m bench.{name}", *given])
    document = {"command": command, "machine": _machine.describe(Path.cwd(), packages), **results}
    show_document(out, name, document, sections)


def show_document(out: Path, name: str, document: Mapping[str, Any], sections: Sequence[TableSection]) -> None:
    """Write a document as ``write_document``, and print the tables and the paths."""
    console = console_for_tables()
    write_document(out, name, document, sections)
    for section in sections:
        print_section(console, section)
    console.print(f"written: {out}/{name}.md, {out}/{name}.json", highlight=False, soft_wrap=True)


def refuse_wrong_weights(document: Mapping[str, Any]) -> None:
    """Fail if a method of a comparison loaded wrong weights."""
    rows = (row for scenario in document["scenarios"] for row in scenario["rows"])
    if wrong := [row["method"] for row in rows if row["right"] is False]:
        raise click.ClickException(f"wrong weights: {', '.join(wrong)}")


def write_shards(state: Mapping[str, torch.Tensor], folder: Path, count: int) -> None:
    """Write a state dict as safetensors shards in Hugging Face's layout."""
    folder.mkdir(parents=True, exist_ok=True)
    total, before, weight_map = sum(tensor.nbytes for tensor in state.values()), 0, dict[str, str]()
    for name, tensor in state.items():  # neighbours stay together, in files of about the same size
        number = min(count - 1, (before + tensor.nbytes // 2) * count // total)
        weight_map[name] = f"model-{number + 1:05}-of-{count:05}.safetensors"
        before += tensor.nbytes
    for file in dict.fromkeys(weight_map.values()):
        part = {name: tensor for name, tensor in state.items() if weight_map[name] == file}
        write_checkpoint(part, folder / file)
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
