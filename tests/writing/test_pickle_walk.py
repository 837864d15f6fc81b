"""The walk that precedes pickling: tensors in pickle order, and values that occur more than once."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping

import pytest

from sluice.writing.pickle_walk import elements, walk_object


class Tensor:
    """Represents a tensor."""

    def __init__(self, **attributes: object) -> None:
        self.attributes = attributes


def attributes_of(value: object) -> Mapping[str, object] | None:
    if isinstance(value, Tensor):
        return value.attributes
    if isinstance(value, bytes):
        return None
    raise TypeError


def test_tensors_come_once_and_in_the_order_of_the_pickle() -> None:
    inner, first, last = Tensor(), Tensor(), Tensor()
    outer = Tensor(grad=inner)
    ordered = OrderedDict(a=outer)
    ordered.__dict__["_metadata"] = {"late": last}
    walked = walk_object([first, ordered, first], attributes_of)
    assert walked.tensors == [first, outer, inner, last]
    assert walked.repeated == {id(first)}


def test_only_values_that_occur_more_than_once_are_repeated() -> None:
    shared, text = [b"x"], "a text of its own".upper()
    walked = walk_object({"a": shared, "b": shared, "c": text, "d": [text], "e": 1000, "f": 1000}, attributes_of)
    assert walked.repeated == {id(shared), id(text)}


def test_a_cycle_ends_and_depth_is_unlimited() -> None:
    cycle: list[object] = []
    cycle.append(cycle)
    assert walk_object(cycle, attributes_of).repeated == {id(cycle)}
    deep: list[object] = []
    for _ in range(100_000):
        deep = [deep]
    assert walk_object(deep, attributes_of).tensors == []


def test_a_value_that_cannot_be_pickled_is_refused_by_the_caller() -> None:
    with pytest.raises(TypeError):
        walk_object([object()], attributes_of)


def test_elements_of_a_set_have_an_order_of_their_own() -> None:
    assert elements({"b", "a", 3, 2}) == [2, 3, "a", "b"]
