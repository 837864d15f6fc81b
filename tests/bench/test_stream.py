"""``python -m bench.stream``: ratios, and the command on the smallest model."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from bench import _stream_nested, stream
from sluice.benchmark.records import Outcome
from sluice.measuring import memory_limit_refusal


def _run(seconds: float, read: float) -> Outcome:
    calls = [{"seconds": 99.0, "read": 0}, {"seconds": seconds, "read": read}]  # the first one is not counted
    return Outcome(status="ok", group_bytes=1 << 20, facts={"calls": calls, "logits": "x"})


def test_a_ratio_is_to_the_longer_of_reading_and_computing() -> None:
    loaded = [_run(0.5, 0)]
    rows = [stream.row("a", [_run(2.0, read)], loaded, 2e9) for read in (4e9, 0)]
    assert [row[2] for row in rows] == ["1.00", "4.00"]
    assert rows[0][-2:] == ("1.00 MiB", "yes")
    killed = Outcome(status="killed", reason="out of memory")
    assert stream.row("a", [killed], loaded, 2e9) == ("a", "-", "-", "-", "-", "out of memory")


@pytest.mark.long
@pytest.mark.parametrize("more", [[], ["--train"]])
def test_the_command_on_a_small_model(tmp_path: Path, more: list[str]) -> None:
    if reason := memory_limit_refusal():
        pytest.skip(reason)
    options = ["--size", "small", "--share", "50", "--runs", "1", "--method", "sluice", "--method", "mmap", *more]
    done = CliRunner().invoke(stream.main, [*options, "--directory", str(tmp_path / "in"), "--out", str(tmp_path)])
    assert done.exit_code == 0, done.output
    assert (tmp_path / "stream.md").read_text().count("| yes |") == 2


@pytest.mark.long
@pytest.mark.parametrize(("more", "count"), [("--models", 3), ("--generate", 2)])
def test_the_tables_of_nested_models_and_of_generation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, more: str, count: int
) -> None:
    pytest.importorskip("transformers", reason="transformers is not installed")
    if reason := memory_limit_refusal():
        pytest.skip(reason)
    monkeypatch.setattr("bench._stream_nested.NESTED", {"Swin": _stream_nested.NESTED["Swin"]})
    monkeypatch.setattr("bench._stream_generation.BATCHES", (1, 2))
    done = CliRunner().invoke(stream.main, [more, "--size", "small", "--share", "50", "--out", str(tmp_path)])
    assert done.exit_code == 0, done.output
    assert (tmp_path / "stream.md").read_text().count("| yes |") == count
