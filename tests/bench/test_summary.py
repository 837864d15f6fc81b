"""The summary table: computed from the results of one run, and equal on all pages that show it."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner

from bench.summary import ALL_CELLS_PAGE, PAGES, all_cells, joined, main, replace_block, summary_lines
from sluice.benchmark.records import MethodRun
from sluice.benchmark.results import as_document
from support.comparisons import MIB, good, run_of, scenario
from support.documents import ROOT

_SECONDS = {"reference": 1.0, "raw-direct": 1.5, "torch-mmap": 3.0, "sluice-load-into": 2.0}


@pytest.fixture
def document() -> dict[str, Any]:
    """Return the results of a run of two tables; mmap was not run cached in the second one."""
    scenarios = []
    runs: list[MethodRun] = []
    files = dict.fromkeys(("raw-direct", "torch-mmap", "sluice-load-into"), Path("small.pth"))
    for each in (scenario("float32"), scenario("bfloat16")):
        scenarios.append(replace(each, title=f"GPT-2 small, .pth, fp32 → {each.dtype}", checkpoints=files))
        for method, seconds in _SECONDS.items():
            states = each.states[:1] if (method, each.dtype) == ("torch-mmap", "bfloat16") else each.states
            for state, repetition in product(states, range(3)):
                outcome = good(method, seconds + (state == "cold") + repetition, 520 * MIB)
                runs.append(run_of(scenarios[-1], method, outcome, state, repetition))
    machine = {"date": "2026-11-22", "processor": "a processor, 2 cores"}
    made = as_document(machine=machine, command="python -m bench.load", scenarios=scenarios, runs=runs)
    stored: dict[str, Any] = json.loads(json.dumps(made))
    return stored


def test_the_table_has_the_medians_of_the_run(document: dict[str, Any]) -> None:
    lines = summary_lines(document)
    caption = " ".join(lines[: lines.index("")])
    assert caption.endswith("Medians of up to 3 fresh processes.")
    assert "0.49 GiB in fp32" in caption
    assert lines[-3:] == [
        "| `torch.load(mmap=True)` + `assign=True` | 1.04 F | 5.00 s | 4.00 s | 1.04 F | 5.00 s | - |",
        "| **sluice** | 1.04 F | 4.00 s | 3.00 s | 1.04 F | 4.00 s | 3.00 s |",
        "| a raw direct read of the file | - | 3.50 s | 2.50 s | - | 3.50 s | 2.50 s |",
    ]
    document["scenarios"] = document["scenarios"][:1]  # without a cast
    with pytest.raises(click.ClickException, match="bfloat16"):
        summary_lines(document)


def test_the_pages_are_written_between_their_markers(
    document: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "docs").mkdir()
    for page in PAGES:
        page.write_text("# Title\n\n<!-- summary: begin -->\nthe table before\n<!-- summary: end -->\n\nThe rest.\n")
    with (tmp_path / ALL_CELLS_PAGE).open("a") as page_of_cells:
        page_of_cells.write("\n<!-- every cell: begin -->\nold\n<!-- every cell: end -->\n")
    Path("load.json").write_text(json.dumps(document))
    result = CliRunner().invoke(main, ["load.json"])
    assert result.exit_code == 0, result.output
    for page in PAGES:
        text = page.read_text()
        assert text.startswith("# Title\n\n<!-- summary: begin -->\n\nGPT-2 small, .pth, fp32;")
        assert " 2.50 s |\n\n<!-- summary: end -->\n\nThe rest.\n" in text
        assert "the table before" not in text
    with pytest.raises(click.ClickException):
        replace_block("no markers", "summary", [])
    assert "### GPT-2 small, .pth, fp32 → bfloat16" in (tmp_path / ALL_CELLS_PAGE).read_text()


def test_every_cell_has_its_figures_or_the_reason_of_their_absence(document: dict[str, Any]) -> None:
    rows = document["scenarios"][1]["rows"]
    rows[1]["failures"], rows[1]["reasons"] = {"warm": "absent"}, ["no_such_loader is not installed"]
    lines = all_cells(document)
    assert lines[0] == "Measured with `python -m bench.load`."
    mapped = "`torch.load(mmap=True)` + `assign=True`"
    assert f"| {mapped} | 1.04 | 5.00 | 0.00 | 5.00 | 3 | absent | - | - | - |" in lines
    assert "- torch-mmap: no_such_loader is not installed" in lines
    assert lines[-1] == "None."


def test_lost_cells_are_listed(document: dict[str, Any]) -> None:
    rows = {row["method"]: row for row in document["scenarios"][0]["rows"]}
    rows["torch-mmap"]["seconds"]["warm"] = 1.25
    lines = all_cells(document)
    assert lines[-1] == "- GPT-2 small, .pth, fp32 → float32, cached: torch-mmap 1.25 s, sluice 3.00 s"


def test_runs_of_different_cases_are_shown_as_one(document: dict[str, Any]) -> None:
    parts = [
        {**document, "command": f"python -m bench.load --case {number}", "scenarios": [each]}
        for number, each in enumerate(document["scenarios"])
    ]
    whole = joined(parts)
    assert summary_lines(whole) == summary_lines(document)
    assert all_cells(whole)[1:] == all_cells(document)[1:]
    assert all_cells(whole)[0] == "Measured with `python -m bench.load --case 0` and `python -m bench.load --case 1`."
    parts[1]["machine"] = {**document["machine"], "processor": "another one"}
    with pytest.raises(click.ClickException, match="different machines"):
        joined(parts)


def test_all_pages_show_the_same_table() -> None:
    tables = {(ROOT / page).read_text().partition("summary: begin")[2].partition("summary: end")[0] for page in PAGES}
    (table,) = tables
    assert "| **sluice** |" in table
