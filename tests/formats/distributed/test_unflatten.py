"""Nested objects from flat names and paths."""

from __future__ import annotations

from typing import Any

import pytest

from sluice._errors import FormatError, LimitError
from sluice._options import Limits
from sluice.formats.distributed.unflatten import unflatten


def nested(paths: dict[str, object], limits: Limits | None = None) -> Any:
    """Return the object in which each value is the name of its item."""
    return unflatten({name: name for name in paths}, paths, limits or Limits(), "file")


def test_dicts_and_lists_by_the_type_of_their_keys() -> None:
    paths: dict[str, object] = {"a.0.x": ("a", 0, "x"), "a.1.x": ("a", 1, "x"), "b.0": ("b", "0")}
    assert nested(paths) == {"a": [{"x": "a.0.x"}, {"x": "a.1.x"}], "b": {"0": "b.0"}}


def test_missing_positions_are_none_and_order_does_not_matter() -> None:
    assert nested({"a.2": ("a", 2), "a.0": ("a", 0)}) == {"a": ["a.0", None, "a.2"]}


def test_an_item_without_a_path_is_at_the_top_under_its_flat_name() -> None:
    assert unflatten({"a.b": 1, "c.d": 2}, {"c.d": ["c", "d"]}, Limits(), "file") == {"a.b": 1, "c": {"d": 2}}


def test_containers_that_are_values_stay_unchanged() -> None:
    value: dict[str, object] = {"k": [1]}
    assert unflatten({"a": value}, {}, Limits(), "file")["a"] is value


@pytest.mark.parametrize(
    "paths",
    [
        {"a": ("a",), "a.b": ("a", "b")},  # a value and a dict
        {"a.b": ("a", "b"), "a": ("a",)},
        {"a.0": ("a", 0), "a.b": ("a", "b")},  # a list and a dict
    ],
)
def test_paths_that_conflict(paths: dict[str, object]) -> None:
    with pytest.raises(FormatError, match="conflict") as caught:
        nested(paths)
    assert caught.value.tensor == list(paths)[1]
    assert caught.value.file == "file"


def test_depth_and_length_are_bounded() -> None:
    assert nested({"a.9": ("a", 9)}, Limits(entries=10, depth=2))["a"][9] == "a.9"
    with pytest.raises(LimitError, match="too long"):
        nested({"a.10": ("a", 10)}, Limits(entries=10))
    with pytest.raises(LimitError, match="too deeply"):
        nested({"a.b.c": ("a", "b", "c")}, Limits(depth=2))
