"""Lists of names in a single line."""

from __future__ import annotations

from sluice._messages import listed


def test_the_first_names_are_listed_and_the_others_counted() -> None:
    assert listed("missing", ["a", ""]) == "missing (2): a, ''"
    names = [f"layer.{number}" for number in range(1234)]
    assert listed("missing", names) == f"missing (1,234): {', '.join(names[:8])} and 1,226 more"
