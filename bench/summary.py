"""``python -m bench.summary [RESULTS ...]``: write the tables of runs of ``bench.load`` into the pages."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from textwrap import wrap
from typing import Any

import click

__all__ = ["ALL_CELLS_PAGE", "PAGES", "all_cells", "joined", "main", "replace_block", "summary_lines"]

#: Pages that show the table.
PAGES = (Path("README.md"), Path("docs/performance.md"))

#: The page with every cell.
ALL_CELLS_PAGE = Path("docs/performance-log.md")

#: Rows of the table, by method.
_NAMES = {
    "torch-load": "`torch.load` + `load_state_dict`",
    "torch-mmap": "`torch.load(mmap=True)` + `assign=True`",
    "safetensors-load-model": "safetensors `load_model`",
    "safetensors-load-file": "safetensors `load_file` + `assign=True`",
    "accelerate": "accelerate",
    "transformers": "transformers, which builds the model too",
    "runai-streamer": "Run:ai Model Streamer",
    "fastsafetensors": "fastsafetensors",
    "sluice-load-into": "**sluice**",
    "sluice-map": '**sluice**, `place="map"`',
    "raw-direct": "a raw direct read of the file",
    "raw-buffered": "a raw buffered read of the file",
}

#: Dtypes of the finished models, with the headings of their columns.
_HEADINGS = {"float32": "fp32", "bfloat16": "cast to bf16"}

_STATES = ("cold", "warm")

#: Longest line of the caption.
_WIDTH = 120

#: Headings of the states in the table of every cell.
_STATE_HEADINGS = {"warm": "cached"}


def summary_lines(document: Mapping[str, Any]) -> list[str]:
    """Return the caption and the table.

    Args:
        document: Content of the JSON file that ``bench.load`` wrote.

    Raises:
        click.ClickException: The run has no cold and cached loads of one file in fp32 and bf16, or wrong weights.
    """
    scenarios = _scenarios(document)
    first = scenarios["float32"]
    machine, runs = document["machine"], max(max(row["counts"].values(), default=0) for row in first["rows"])
    rows = {dtype: {row["method"]: row for row in each["rows"]} for dtype, each in scenarios.items()}
    if wrong := [name for each in rows.values() for name, row in each.items() if row["right"] is False]:
        raise click.ClickException(f"wrong weights: {', '.join(wrong)}")
    shown = [name for name in _NAMES if name not in {"raw-buffered", "sluice-map"}]
    methods = [name for name in shown if any(name in each and each[name]["seconds"] for each in rows.values())]
    subject = str(first["title"]).partition(" → ")[0]
    caption = (
        f"{subject}; {machine['processor']}; {machine['date']}. F is the finished model, "
        f"{_gib(scenarios['float32'])} in fp32 and {_gib(scenarios['bfloat16'])} in bf16; "
        f'peak is growth of host memory; "cold" means not in the page cache. Medians of up to {runs} fresh processes.'
    )
    heads = [f"{heading}: peak | cold | cached" for heading in _HEADINGS.values()]
    lines = [*wrap(caption, _WIDTH), "", f"| method | {' | '.join(heads)} |", "|---|" + "---:|" * 6]
    for name in methods:
        cells = [cell for dtype in _HEADINGS for cell in _cells(rows[dtype].get(name))]
        lines.append(f"| {_NAMES[name]} | {' | '.join(cells)} |")
    return lines


def _scenarios(document: Mapping[str, Any]) -> dict[str, Any]:
    """Return the scenario of each dtype; the first of the run decides the file."""
    usable = [each for each in document["scenarios"] if list(each["states"])[:2] == list(_STATES)]
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


def all_cells(document: Mapping[str, Any]) -> list[str]:
    """Return the machine, the command, a table of every scenario, and the cells in which sluice is not the fastest.

    Args:
        document: As for ``summary_lines``.
    """
    machine = [f"- {key}: {value}" for key, value in document["machine"].items()]
    tables = [line for scenario in document["scenarios"] for line in ("", *_table(scenario))]
    lost = [line for scenario in document["scenarios"] for line in _lost(scenario)]
    return [
        f"Measured with `{document['command']}`.",
        "",
        *machine,
        *tables,
        "",
        "### Cells in which sluice is not the fastest loader",
        "",
        *(lost or ["None."]),
    ]


def _table(scenario: Mapping[str, Any]) -> list[str]:
    states = scenario["states"]
    heads = [f"{_STATE_HEADINGS.get(state, state)}, s | cpu s | all s | runs" for state in states]
    lines = [f"### {scenario['title']}", "", f"| method | peak / F | {' | '.join(heads)} |"]
    lines.append("|---|" + "---:|" * (1 + 4 * len(states)))
    for row in scenario["rows"]:
        peak = "-" if row["over_final"] is None or not row["seconds"] else f"{row['over_final']:.2f}"
        cells = [cell for state in states for cell in _figures(row, state)]
        lines.append(f"| {_NAMES.get(row['method'], row['method'])} | {' | '.join([peak, *cells])} |")
    notes = [f"- {row['method']}: {reason}" for row in scenario["rows"] for reason in row["reasons"]]
    wrong = [f"- {row['method']}: wrong weights" for row in scenario["rows"] if row["right"] is False]
    return [*lines, *([""] if notes or wrong else []), *notes, *wrong]


def _figures(row: Mapping[str, Any], state: str) -> list[str]:
    """Return the cells of one state: seconds, processor seconds, seconds with everything counted, number of runs."""
    if state not in row["seconds"]:
        return [row["failures"].get(state, "-"), "-", "-", "-"]
    everything = "-" if row["method"].startswith("raw-") else f"{row['everything_seconds'][state]:.2f}"
    figures = [f"{row['seconds'][state]:.2f}", f"{row['cpu_seconds'][state]:.2f}", everything]
    return [*figures, str(row["counts"][state])]


def _lost(scenario: Mapping[str, Any]) -> list[str]:
    """Return a line for each state in which another loader was faster than both ways of sluice."""
    lines = []
    for state in scenario["states"]:
        loaders = [row for row in scenario["rows"] if state in row["seconds"] and not row["method"].startswith("raw-")]
        ours = [row for row in loaders if row["method"].startswith("sluice")]
        copying = next((row for row in ours if row["method"] == "sluice-load-into"), None)
        others = [row for row in loaders if row not in ours and row["right"] is not False]
        if copying is None or not others:
            continue
        best = min(others, key=lambda row: row["seconds"][state])
        if best["seconds"][state] < copying["seconds"][state]:
            mapped = next((row for row in ours if row["method"] == "sluice-map"), None)
            also = f'; {mapped["seconds"][state]:.2f} s with `place="map"`' if mapped else ""
            lines.append(
                f"- {scenario['title']}, {_STATE_HEADINGS.get(state, state)}: {best['method']} "
                f"{best['seconds'][state]:.2f} s, sluice {copying['seconds'][state]:.2f} s{also}"
            )
    return lines


def joined(documents: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the results of several runs on one machine as those of one.

    Args:
        documents: Contents of their JSON files.

    Raises:
        click.ClickException: The runs were on different machines, or with different versions.
    """
    first = documents[0]
    # Free memory and the date change between runs.
    alike = [{key: each["machine"].get(key) for key in ("processor", "system", "versions")} for each in documents]
    if any(each != alike[0] for each in alike):
        raise click.ClickException("the runs were on different machines, or with different versions")
    scenarios = [scenario for document in documents for scenario in document["scenarios"]]
    return {**first, "command": "` and `".join(each["command"] for each in documents), "scenarios": scenarios}


def replace_block(page: str, name: str, lines: Sequence[str]) -> str:
    """Return the text of a page with other lines between the markers of a block.

    Args:
        page: The text.
        name: Name of the block: its markers are ``<!-- NAME: begin -->`` and ``<!-- NAME: end -->``.
        lines: The lines.

    Raises:
        click.ClickException: The page does not have both markers once.
    """
    begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
    if page.count(begin) != 1 or page.count(end) != 1:
        raise click.ClickException(f"the page needs one line {begin} and one line {end}")
    before, rest = page.split(begin)
    return "\n".join([before + begin, "", *lines, "", end + rest.split(end)[1]])


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.argument(
    "results",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    nargs=-1,
    default=(Path("bench-out/load.json"),),
)
@click.option("--print", "only_print", is_flag=True, help="Print the tables and change no page.")
def main(results: Sequence[Path], *, only_print: bool) -> None:
    """Write the tables of bench.load into README.md and the pages of performance; several runs have different cases."""
    document = joined([json.loads(path.read_text(encoding="utf-8")) for path in results])
    lines, cells = summary_lines(document), all_cells(document)
    if only_print:
        click.echo("\n".join([*lines, "", *cells]))
        return
    texts = {page: replace_block(page.read_text(encoding="utf-8"), "summary", lines) for page in PAGES}
    texts[ALL_CELLS_PAGE] = replace_block(ALL_CELLS_PAGE.read_text(encoding="utf-8"), "every cell", cells)
    for page, text in texts.items():
        page.write_text(text, encoding="utf-8")
        click.echo(f"written: {page}")


if __name__ == "__main__":
    main()
