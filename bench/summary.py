"""``python -m bench.summary RESULTS``: write the summary table of one run of ``bench.load`` into the pages."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click

__all__ = ["PAGES", "main", "replace_summary", "summary_lines"]

#: Pages that show the table.
PAGES = (Path("README.md"), Path("docs/performance.md"))

_BEGIN, _END = "<!-- summary: begin -->", "<!-- summary: end -->"

#: Rows of the table, by method.
_NAMES = {
    "torch-load": "`torch.load` + `load_state_dict`",
    "torch-mmap": "`torch.load(mmap=True)` + `assign=True`",
    "safetensors-load-model": "safetensors `load_model`",
    "safetensors-load-file": "safetensors `load_file` + `assign=True`",
    "accelerate": "accelerate",
    "runai-streamer": "Run:ai Model Streamer",
    "fastsafetensors": "fastsafetensors",
    "sluice-load-into": "**sluice**",
    "sluice-map": '**sluice**, `place="map"`',
    "raw-direct": "a raw direct read of the file",
}

#: Dtypes of the finished models, with the headings of their columns.
_HEADINGS = {"float32": "fp32", "bfloat16": "cast to bf16"}

_STATES = ("cold", "warm")


def summary_lines(document: Mapping[str, Any]) -> list[str]:
    """Return the caption and the table.

    Args:
        document: Content of the JSON file that ``bench.load`` wrote.

    Raises:
        click.ClickException: The run has no cold and cached loads of one file in fp32 and bf16, or wrong weights.
    """
    scenarios = _scenarios(document)
    first = scenarios["float32"]
    machine, runs = document["machine"], 1 + max(run["repetition"] for run in first["runs"])
    rows = {dtype: {row["method"]: row for row in each["rows"]} for dtype, each in scenarios.items()}
    if wrong := [name for each in rows.values() for name, row in each.items() if row["right"] is False]:
        raise click.ClickException(f"wrong weights: {', '.join(wrong)}")
    methods = [name for name in _NAMES if any(name in each and each[name]["seconds"] for each in rows.values())]
    subject = str(first["title"]).partition(" → ")[0]
    caption = (
        f"{subject}; {machine['processor']}; {machine['date']}. F is the finished model, "
        f"{_gib(scenarios['float32'])} in fp32 and {_gib(scenarios['bfloat16'])} in bf16; "
        f'peak is growth of host memory; "cold" means not in the page cache. Medians of {runs} fresh processes.'
    )
    heads = [f"{heading}: peak | cold | cached" for heading in _HEADINGS.values()]
    lines = [caption, "", f"| method | {' | '.join(heads)} |", "|---|" + "---:|" * 6]
    for name in methods:
        cells = [cell for dtype in _HEADINGS for cell in _cells(rows[dtype].get(name))]
        lines.append(f"| {_NAMES[name]} | {' | '.join(cells)} |")
    return lines


def _scenarios(document: Mapping[str, Any]) -> dict[str, Any]:
    """Return the scenario of each dtype; the first of the run decides the file."""
    usable = [each for each in document["scenarios"] if list(each["states"]) == list(_STATES)]
    found: dict[str, Any] = {}
    for each in usable:
        same_file = str(each["title"]).partition(" → ")[0] == str(usable[0]["title"]).partition(" → ")[0]
        if same_file:
            found.setdefault(each["dtype"], each)
    if missing := [dtype for dtype in _HEADINGS if dtype not in found]:
        raise click.ClickException(f"the run has no cold and cached loads of the same file to {', '.join(missing)}")
    return found


def _cells(row: Mapping[str, Any] | None) -> list[str]:
    if row is None or not row["seconds"]:
        return ["-"] * 3
    peak = "-" if row["over_final"] is None else f"{row['over_final']:.2f} F"
    return [peak, *(f"{row['seconds'][state]:.2f} s" if state in row["seconds"] else "-" for state in _STATES)]


def _gib(scenario: Mapping[str, Any]) -> str:
    return f"{scenario['final_bytes'] / (1 << 30):.2f} GiB"


def replace_summary(page: str, lines: Sequence[str]) -> str:
    """Return the text of a page with other lines between its markers.

    Raises:
        click.ClickException: The page does not have both markers once.
    """
    if page.count(_BEGIN) != 1 or page.count(_END) != 1:
        raise click.ClickException(f"the page needs one line {_BEGIN} and one line {_END}")
    before, rest = page.split(_BEGIN)
    return "\n".join([before + _BEGIN, "", *lines, "", _END + rest.split(_END)[1]])


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("results", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--print", "only_print", is_flag=True, help="Print the table and change no page.")
def main(results: Path, *, only_print: bool) -> None:
    """Write the summary table of one run of bench.load into README.md and docs/performance.md."""
    lines = summary_lines(json.loads(results.read_text(encoding="utf-8")))
    if only_print:
        click.echo("\n".join(lines))
        return
    texts = {page: replace_summary(page.read_text(encoding="utf-8"), lines) for page in PAGES}
    for page, text in texts.items():
        page.write_text(text, encoding="utf-8")
        click.echo(f"written: {page}")


if __name__ == "__main__":
    main()
