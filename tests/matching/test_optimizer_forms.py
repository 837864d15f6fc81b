"""Arbitrary content in place of an optimizer state: a match or a ``MismatchError``."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from sluice import MismatchError
from sluice.matching.optimizer_states import OptimizerOutline, ParameterOutline, find_state
from sluice.records import Entry, elements_of
from support.work import at_most

KEYS = [
    *("state", "param_groups", "params", "param_names", "lr", "step", "exp_avg", "w", "b", "0", "1", 0, 1),
    *("state.w.exp_avg", "state.0.step", "state.", "state", "param_groups.0.params", "param_groups.0.params.1"),
    *("param_groups.w.lr", "param_groups.0.lr", "o.state.w.step", "o.param_groups.w.lr", ".state.0.x", "a.state"),
]

LEAVES = st.one_of(
    st.builds(
        lambda shape: Entry(elements=elements_of("float32"), shape=shape, stride=(1,) * len(shape), storage=0),
        st.sampled_from([(), (2,), (3,)]),
    ),
    st.sampled_from([None, 0, 1, True, 0.5, "w", "b", "0", "", (), float("nan")]),
)

TREES = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.dictionaries(st.sampled_from(KEYS), inner, max_size=5),
        st.lists(inner, max_size=3),
        st.builds(lambda w, g: {"state": w, "param_groups": g}, inner, st.lists(inner, max_size=2)),
        st.builds(lambda p, n: {"params": p, "param_names": n}, inner, inner),
    ),
    max_leaves=12,
)


def outline(*, names: bool, groups: int, adapts: bool) -> OptimizerOutline:
    parameters = [ParameterOutline(names=(name,) if names else (), shape=(2,)) for name in ("w", "b")]
    together = (tuple(parameters),) if groups == 1 else ((parameters[0],), (parameters[1],))
    return OptimizerOutline(groups=together, kind="Own", adapts=adapts)


@given(tree=TREES, names=st.booleans(), groups=st.sampled_from([1, 2]), adapts=st.booleans())
@example(tree={"state": {}, "param_groups": [{"params": ["w", "w"]}]}, names=True, groups=1, adapts=False)
@example(tree={"state": {}, "param_groups": [{"params": [0, 0]}]}, names=False, groups=1, adapts=False)
def test_a_match_or_a_mismatch(tree: Any, names: bool, groups: int, adapts: bool) -> None:
    own = outline(names=names, groups=groups, adapts=adapts)
    for key in (None, "state", "param_groups"):
        try:
            found = find_state(tree, own, key=key, file="f")
        except MismatchError as error:
            assert str(error)
            assert error.file in {"f", None}
        else:
            assert adapts or [len(ids) for ids in found.ids] == [len(group) for group in own.groups]
            assert len(found.options) == len(found.ids)


@pytest.mark.parametrize(
    "tree",
    [
        {
            f"blocks.{i}.state.x{i}.w": Entry(elements=elements_of("float32"), shape=(), stride=(), storage=0)
            for i in range(20_000)
        },
        {"state." + "." * 4000 + str(i): 1 for i in range(50)},
        {f"state.{i}.exp_avg": 1 for i in range(20_000)},
        {"a": {f"o{i}": {"state": {}, "param_groups": [{"params": []}]} for i in range(10_000)}},
    ],
    ids=["prefixes", "dots", "numbers", "candidates"],
)
def test_large_trees_are_answered_in_bounded_work(tree: Any) -> None:
    with at_most(6_000_000), pytest.raises(MismatchError) as caught:
        find_state(tree, outline(names=True, groups=1, adapts=False), key=None, file="f")
    assert len(str(caught.value)) < 100_000
