"""``python -m bench.construction`` at a small size."""

from __future__ import annotations

import pytest
from click.testing import CliRunner

from bench import construction
from bench.construction import main


def test_the_command_at_a_small_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(construction, "find_spec", lambda _: None)  # transformers takes seconds to import
    done = CliRunner().invoke(main, ["--runs", "1", "--size", "small"])
    assert done.exit_code in {0, 1}, done.output  # one build says nothing about the goal
    assert "GPT-2 small" in done.output
