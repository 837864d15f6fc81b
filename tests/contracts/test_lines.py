"""The budget of lines: every file belongs to a feature, and the totals are within it."""

from __future__ import annotations

import pytest

from tools import lines


def test_the_source_is_within_its_budget(capsys: pytest.CaptureFixture[str]) -> None:
    assert lines.main() == 0, capsys.readouterr().out


def test_a_file_without_a_feature_and_a_total_above_the_budget_are_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    assert lines.feature_of("cellar/wine.py") is None
    assert lines.feature_of("loading/optimizer_job.py") == "optimizer resume"
    monkeypatch.setitem(lines.BUDGET, "tests", 10)
    assert lines.main() == 1
    monkeypatch.setattr(lines, "FEATURES", {"core": ("api/*",)})
    assert lines.main() == 1
