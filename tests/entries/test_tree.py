"""Names, parts and candidates of nested checkpoints."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any
from unittest.mock import Mock, call

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sluice._errors import FormatError, LimitError, MismatchError
from sluice._options import Limits
from sluice.entries.lookup import subtree
from sluice.entries.tree import flatten, map_leaves, opaques, walk
from sluice.matching.candidates import state_dict_candidates
from sluice.records import Entry, Opaque, elements_of
from support.work import at_most


def tensor(size: int = 1, storage: int = 0) -> Entry:
    return Entry(elements=elements_of("float32"), shape=(size,), stride=(1,), storage=storage)


def names(tree: object) -> list[str]:
    return list(flatten(tree, Limits()))


A, B, C = tensor(1, 0), tensor(2, 1), tensor(3, 2)


@pytest.mark.parametrize(
    ("tree", "expected"),
    [
        ({(1, 2): A, None: B, b"layer." * 9: C}, ["(1, 2)", "None", repr(b"layer." * 9)]),
        ({"": A, "x": {"": B}}, ["", "x."]),
        (A, [""]),
        ("text", []),
    ],
)
def test_flatten(tree: object, expected: list[str]) -> None:
    assert names(tree) == expected
    assert [name for name, _ in walk(tree)] == expected


@pytest.mark.parametrize(
    ("tree", "name", "places"),
    [
        ({"a.b": A, "a": {"b": B}}, "a.b", "['a.b'] and ['a']['b']"),
        ({0: A, "0": B}, "0", "[0] and ['0']"),
        ({"x": [A], "x.0": A}, "x.0", "['x'][0] and ['x.0']"),
    ],
)
def test_two_tensors_of_one_name_are_refused(tree: object, name: str, places: str) -> None:
    with pytest.raises(FormatError) as caught:
        names(tree)
    assert (caught.value.tensor, caught.value.found) == (name, places)
    assert [seen for seen, _ in walk(tree)] == [name, name]


def nested(depth: int) -> object:
    tree: object = A
    for _ in range(depth):
        tree = [tree]
    return tree


def test_flatten_is_bounded_in_depth_and_count() -> None:
    assert len(flatten(nested(64), Limits())) == 1
    with pytest.raises(LimitError, match="depth"):
        flatten(nested(65), Limits())
    assert len(flatten([A] * 3, Limits(entries=3))) == 3
    with pytest.raises(LimitError, match="entries"):
        flatten([A] * 4, Limits(entries=3))


def test_depth_costs_no_stack() -> None:
    deep = nested(3000)
    assert len(list(walk(deep))) == 1
    assert state_dict_candidates(deep) == {}
    copy = map_leaves(deep, lambda entry: entry.storage)
    while isinstance(copy, list):
        (copy,) = copy
    assert copy == 0


def test_map_leaves_keeps_types_and_identity() -> None:
    model = OrderedDict[str, Any](w=A, tied=A, n=1)
    model.__dict__["_metadata"] = OrderedDict({"": {"version": 2}})
    shared = [B]
    number = Mock(side_effect=lambda entry: ("read", entry.storage))
    copy = map_leaves({"model": model, "pair": (shared, shared), "plain": {"x": None}}, number)
    assert copy["model"] == OrderedDict(w=("read", 0), tied=("read", 0), n=1)
    assert type(copy["model"]) is OrderedDict
    assert vars(copy["model"])["_metadata"] == {"": {"version": 2}}
    assert copy["pair"][0] is copy["pair"][1]
    assert copy["pair"][0] is not shared
    assert number.mock_calls == [call(A), call(B)]
    assert map_leaves(A, number) == ("read", 0)


def test_a_tree_that_doubles_at_every_level_is_taken_once() -> None:
    tree: object = [A]
    for _ in range(60):
        tree = [tree, tree]
    seen: list[Entry] = []
    copy = map_leaves(tree, seen.append)
    assert copy[0] is copy[1]
    assert seen == [A]
    assert state_dict_candidates(tree) == {}


FLAT = {"model": OrderedDict({"blocks.0.w": A, "blocks.0.attn.w": B, "blocks.10.w": C}), "epoch": 3}


@pytest.mark.parametrize(
    ("tree", "key", "expected"),
    [
        ({"ema": {"model": {"w": A}}}, "ema.model", {"w": A}),
        ({"ema.model": {"w": A}, "ema": {"model": {"w": B}}}, "ema.model", {"w": A}),
        ({"ema": {"w": A}, "ema.x": B}, "ema", {"w": A}),
        ({"models": [{"w": A}, {"w": B}]}, "models.1", {"w": B}),
        ({"models": ({"w": A},)}, "models.0.w", A),
        ({0: {"w": A}}, "0", {"w": A}),
        ({0: {"w": A}, "0": {"w": B}}, "0", {"w": B}),
        (FLAT, "model.blocks.0", {"w": A, "attn.w": B}),
        (FLAT, "model.blocks.0.attn", {"w": B}),
        (FLAT, "model.blocks.10", {"w": C}),
        (FLAT, "epoch", 3),
        (FLAT, "", FLAT),
        ({"a.b": {"x": A}, "a": {"b": {"c": {"w": B}}}}, "a.b.c", {"w": B}),
        ({"blocks.0.attn": {"w": A}}, "blocks.0", {"attn": {"w": A}}),
    ],
)
def test_subtree(tree: object, key: str, expected: object) -> None:
    assert subtree(tree, key) == expected


def test_a_prefix_takes_the_versions_of_its_modules_along() -> None:
    model = OrderedDict({"blocks.0.bn.w": A, "head.w": B})
    model.__dict__["_metadata"] = OrderedDict(
        {"": {"version": 1}, "blocks.0": {"version": 3}, "blocks.0.bn": {"version": 2}, "blocks.01": {"version": 4}}
    )
    part: Any = subtree({"model": model}, "model.blocks.0")
    assert type(part) is OrderedDict
    assert dict(vars(part)["_metadata"]) == {"": {"version": 3}, "bn": {"version": 2}}


@pytest.mark.parametrize("key", ["modle", "model.blocks.1", "model.blocks.0.w.x", "models.0", ".", "model.", "epoch.x"])
def test_the_error_for_an_unknown_key_lists_the_existing_keys(key: str) -> None:
    with pytest.raises(MismatchError, match="nothing at key") as caught:
        subtree(FLAT, key)
    assert caught.value.expected == "one of 'model', 'epoch'"


def test_close_names_are_suggested() -> None:
    with pytest.raises(MismatchError) as caught:
        subtree(FLAT, "modle.blocks.0")
    assert "'model.blocks.0'" in str(caught.value.found)
    with pytest.raises(MismatchError) as caught:
        subtree(A, "model")
    assert caught.value.expected is None
    with pytest.raises(MismatchError):
        subtree({"models": [{"w": A}]}, "models.-1")


def test_a_key_is_found_in_bounded_work() -> None:
    tree: dict[str, Any] = {"end": A}
    for _ in range(40):
        tree = {"a": tree, "a.a": tree, "a.a.a": tree}
    with at_most(5_000_000), pytest.raises(MismatchError):
        subtree(tree, "a." * 100 + "b")
    tree = {f"{'.' * 900}{number}": A for number in range(50)}  # names of thousands of components
    with at_most(400 * len(tree)), pytest.raises(MismatchError, match="nothing at key"):
        subtree(tree, "model")


OPTIMIZER = {"state": {0: {"exp_avg": tensor(100), "step": A}}, "param_groups": [{"lr": 0.1, "params": [0]}]}


@pytest.mark.parametrize(
    ("tree", "expected"),
    [
        ({"a.w": A, "b.w": B}, ("",)),
        ({"model": {"w": A}, "epoch": 3}, ("model",)),
        ({"model": {"w": A}, "ema": {"w": B}}, ("ema", "model")),
        ({"model": {"w": A}, "ema": {"w": A}}, ("model", "ema")),
        ({"nested": {"ema": {"w": A}}, "models": [{"w": B}]}, ("models.0", "nested.ema")),
        ({"model": {"w": A}, "optimizer": OPTIMIZER, "optimizers": [OPTIMIZER]}, ("model",)),
        (OPTIMIZER, ()),
        ({"model": {"w": C}, "loss": A}, ("model",)),
        ({"w": C, "layer._extra_state": {"scale": A}}, ("",)),
        ({"rng": [A, B], "step": 1}, ()),
        ({"state": {0: {0: A}}}, ()),
        ({0: {"w": A}}, ("0",)),
        ({"a": {"w": A}, "b": [{"w": tensor(0)}]}, ("a", "b.0")),
        ({"": {"w": A}}, ()),
        ({"model": FLAT["model"], "again": FLAT["model"]}, ("model",)),
        (A, ()),
        ([], ()),
        ({}, ()),
    ],
)
def test_state_dict_candidates(tree: object, expected: tuple[str, ...]) -> None:
    assert tuple(state_dict_candidates(tree)) == expected


keys = st.one_of(st.text("ab.", max_size=3), st.integers(-1, 3))
leaves = st.one_of(st.builds(tensor, st.integers(0, 3), st.integers(0, 9)), st.none(), st.integers())


def trees_with(names: st.SearchStrategy[str | int]) -> st.SearchStrategy[object]:
    return st.recursive(
        leaves,
        lambda inner: st.one_of(
            st.dictionaries(names, inner, max_size=4),
            st.lists(inner, max_size=3),
            st.lists(inner, max_size=3).map(tuple),
        ),
        max_leaves=12,
    )


trees = trees_with(keys)


def recursive_names(tree: object, name: str = "", first: bool = True) -> list[tuple[str, Entry]]:
    """Return the dotted names by a recursive definition."""
    if isinstance(tree, Entry):
        return [(name, tree)]
    items: list[Any] = list(tree.items()) if isinstance(tree, dict) else []
    if isinstance(tree, (list, tuple)):
        items = list(enumerate(tree))
    return [
        found
        for key, child in items
        for found in recursive_names(child, str(key) if first else f"{name}.{key}", first=False)
    ]


@given(trees)
def test_names_are_those_of_the_definition(tree: object) -> None:
    expected = recursive_names(tree)
    assert list(walk(tree)) == expected
    if len(dict(expected)) == len(expected):
        assert list(flatten(tree, Limits()).items()) == expected
    else:
        with pytest.raises(FormatError):
            flatten(tree, Limits())


@given(trees)
def test_mapping_leaves_changes_nothing_else(tree: object) -> None:
    assert map_leaves(tree, lambda entry: entry) == tree
    marked = map_leaves(tree, lambda entry: Opaque(qualified_name=str(entry.storage)))
    assert list(walk(marked)) == []
    assert opaques(marked).keys() == dict(walk(tree)).keys()


@given(trees_with(st.text("abc", min_size=1, max_size=2)))
def test_every_candidate_holds_half_of_its_bytes_directly(tree: object) -> None:
    candidates = tuple(state_dict_candidates(tree))
    sizes = []
    for key in candidates:
        part = subtree(tree, key)
        assert isinstance(part, dict)
        direct = [value.nbytes for value in part.values() if isinstance(value, Entry)]
        sizes.append(sum(entry.nbytes for _, entry in walk(part)))
        assert direct
        assert 2 * sum(direct) >= sizes[-1]
    assert sizes == sorted(sizes, reverse=True)


@given(trees)
def test_every_name_leads_to_its_tensor(tree: object) -> None:
    listed = recursive_names(tree)
    for name, entry in listed:
        if [seen for seen, _ in listed].count(name) == 1 and name:
            found = subtree(tree, name)
            assert found is entry or not isinstance(found, Entry)
