"""Selection of the state dict of a module in a checkpoint, by names."""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sluice._errors import MismatchError
from sluice._options import Limits
from sluice.matching.match import Outline, Slot
from sluice.matching.renaming import Rename, Renaming
from sluice.matching.selection import Selection, only_state_dict, select
from sluice.records import Entry
from support.plans import entry
from support.work import at_most

NAMES = ("embedding.weight", "blocks.0.weight", "blocks.0.bias", "blocks.1.weight", "blocks.1.bias", "head.weight")


def outline(*groups: str | tuple[str, ...]) -> Outline:
    """Return an outline with one tensor per argument; a tuple has the names of a tied tensor."""
    return Outline(
        slots=tuple(
            Slot(
                names=(group,) if isinstance(group, str) else group,
                parameter=True,
                shape=(4,),
                stride=(1,),
                dtype="float32",
                device="meta",
                requires_grad=True,
                in_place=False,
                added_in=2 if str(group).endswith("num_batches_tracked") else None,
            )
            for group in groups
        )
    )


def entries(names: Iterable[str], start: int = 0) -> dict[str, Entry]:
    return {name: entry((4,), storage=start + i) for i, name in enumerate(names)}


MODULE = outline(*NAMES)
PLAIN = entries(NAMES)


def prefixed(prefix: str, plain: dict[str, Entry] = PLAIN) -> dict[str, Entry]:
    return {prefix + name: entry for name, entry in plain.items()}


@pytest.mark.parametrize("prefix", ["", "module.", "_orig_mod.", "module._orig_mod.", "model.", "network.model."])
@pytest.mark.parametrize("path", [(), ("model",), ("checkpoint", "state_dict")])
def test_the_state_dict_is_found_under_keys_and_prefixes(prefix: str, path: tuple[str, ...]) -> None:
    tree: object = prefixed(prefix)
    for part in reversed(path):
        tree = {part: tree, "epoch": 3}
    found = select(tree, MODULE)
    assert found.entries == PLAIN
    assert (found.key, found.prefix) == (".".join(path) or None, prefix)


def test_wrappers_anywhere_in_the_names_of_either_side() -> None:
    compiled = {name.replace("blocks.0", "blocks.0._orig_mod"): entry for name, entry in prefixed("module.").items()}
    found = select(compiled, MODULE)
    assert found.entries == PLAIN
    assert found.notes
    wrapped = outline(*(f"module.{name}".replace("blocks.1", "blocks._orig_mod.1") for name in NAMES))
    assert set(select(PLAIN, wrapped).entries) == {name for slot in wrapped.slots for name in slot.names}
    assert set(select({"state": compiled}, wrapped).entries.values()) == set(PLAIN.values())
    assert select({"lightning": {f"model.{name}": entry for name, entry in compiled.items()}}, MODULE).entries == PLAIN


def test_a_submodule_that_is_called_module_is_not_a_wrapper() -> None:
    own = outline("module.weight", "weight")
    plain = entries(["module.weight", "weight"])
    assert select(plain, own).entries == plain
    assert select({f"model.{name}": entry for name, entry in plain.items()}, own).entries == plain


def test_the_same_entries_at_two_places_are_not_a_conflict() -> None:
    assert select({"model": PLAIN, "best": dict(PLAIN)}, MODULE).entries == PLAIN
    assert select({"model": PLAIN, "best": prefixed("module.")}, MODULE).entries == PLAIN


def test_a_strict_fit_wins_over_others() -> None:
    tree = {"model": PLAIN, "smaller": entries(NAMES[1:], 50), "larger": entries((*NAMES, "more"), 90)}
    assert select(tree, MODULE).key == "model"


def test_nested_dicts_that_spell_the_names_are_a_state_dict() -> None:
    tree = {
        "embedding": entries(["weight"]),
        "blocks": {str(i): entries(["weight", "bias"], 10 + i * 2) for i in range(2)},
        "head": entries(["weight"], 90),
    }
    found = select(tree, MODULE)
    assert set(found.entries) == set(NAMES)
    assert found.key is None


def test_one_part_of_a_larger_state_dict() -> None:
    found = select({**prefixed("generator."), **entries(["critic.weight", "critic.bias"], 60)}, MODULE)
    assert found.entries == PLAIN
    assert found.prefix == "generator."
    assert "2 tensors" in found.notes[0]
    averaged = {**prefixed("module."), **entries(["n_averaged"], 60)}  # of torch.optim.swa_utils
    assert select({"swa": averaged}, MODULE).entries == PLAIN
    assert select({"swa": averaged}, outline(*averaged)).entries == averaged


def test_a_state_dict_with_every_name_verbatim_does_not_count_in_parts() -> None:
    tree = entries(["weight", "bias", "inner.weight", "inner.bias"])
    assert set(select(tree, outline("weight", "bias")).entries) == set(tree)


def test_what_does_not_fit_is_reported_against_the_only_candidate() -> None:
    tree = {"model": prefixed("module.", entries((*NAMES[1:], "extra"))), "epoch": 1}
    found = select(tree, MODULE)
    assert set(found.entries) == {*NAMES[1:], "extra"}
    assert (found.key, found.prefix) == ("model", "module.")
    unrelated = entries(["a", "b"])
    assert select({"model": unrelated}, MODULE).entries == unrelated


def test_what_does_not_fit_with_several_candidates_is_an_error() -> None:
    with pytest.raises(MismatchError, match="more than one is close") as caught:
        select({"model": entries(NAMES[1:]), "ema": entries(NAMES[2:], 50)}, MODULE)
    assert "key='model': 5 names match, 1 tensors of the module are missing" in str(caught.value)
    # A dictionary that has one of the names by accident is not a candidate.
    assert select({"model": entries(NAMES[1:]), "other": entries(["head.weight", "x"], 50)}, MODULE).key == "model"


def test_with_a_key_nothing_outside_of_it_counts_and_nothing_in_it_is_left_out() -> None:
    tree = {"model": {**prefixed("net."), **entries(["loss.weight"], 50)}, "ema": entries(NAMES, 90)}
    assert set(select(tree, MODULE, key="model").entries) == {*NAMES, "loss.weight"}
    assert select(tree, MODULE, key="ema").entries == tree["ema"]
    assert select(tree, MODULE, key="model.net").entries == PLAIN
    with pytest.raises(MismatchError, match="nothing at key"):
        select(tree, MODULE, key="modle")


@pytest.mark.parametrize(
    "tree", [{}, {"fc.scale": PLAIN["head.weight"], "fc._packed_params": tuple(PLAIN.values())[:2]}]
)
def test_an_empty_dict_and_one_with_packed_parameters_are_state_dicts(tree: object) -> None:
    assert only_state_dict(tree, "a.pth") == ""


def test_tied_and_optional_names_do_not_spoil_a_strict_fit() -> None:
    own = outline(("embedding.weight", "head.weight"), "bn.num_batches_tracked")
    tree = {"model": entries(["embedding.weight"]), "ema": entries(["embedding.bias"], 9)}
    assert select(tree, own).key == "model"


def test_refused_tensors_and_extra_state_belong_to_the_module() -> None:
    own = Outline(slots=MODULE.slots, extra_state=("norm._extra_state",), refused=("quantized.weight",))
    plain = entries((*NAMES, "norm._extra_state", "quantized.weight"))
    found = select({"model": prefixed("module.", plain), "ema": {}}, own)
    assert dict(found.extra_state) == {"norm._extra_state": plain.pop("norm._extra_state")}
    assert found.entries == plain


def test_versions_follow_the_names() -> None:
    def with_versions(tree: dict[str, Entry], prefix: str) -> OrderedDict[str, Entry]:
        state = OrderedDict(tree)
        state._metadata = {  # type: ignore[attr-defined]
            prefix.removesuffix("."): {"version": 1},
            f"{prefix}blocks.0": {"version": 2},
            f"{prefix}blocks.1": {"version": True},
            f"{prefix}without_tensors": {"version": 4},
            f"{prefix}head": "broken",
            7: {"version": 1},
        }
        return state

    versions = {"": 1, "blocks.0": 2, "without_tensors": 4}
    assert select(with_versions(PLAIN, ""), MODULE).versions == versions
    assert select({"m": with_versions(prefixed("net."), "net.")}, MODULE).versions == versions
    wrapped = {name.replace("blocks", "blocks.module"): entry for name, entry in prefixed("module.").items()}
    state = with_versions(wrapped, "module.")
    state._metadata["module.blocks.module.1"] = {"version": 3}  # type: ignore[attr-defined]
    assert select(state, MODULE).versions["blocks.1"] == 3


@pytest.mark.parametrize(
    "rename",
    [
        {f"old.{name}": name for name in NAMES},
        [(r"^old\.", "")],
        [("old", "new"), (re.compile("new[.]"), "")],
        lambda name: name.removeprefix("old."),
    ],
)
def test_rename_comes_before_the_search(rename: Rename) -> None:
    assert select({"model": prefixed("old."), "x": 1}, MODULE, rename=rename).entries == PLAIN


@pytest.mark.parametrize(
    ("rename", "expected"),
    [
        ({"a": None, "b": "d"}, {"c.0.w", "d"}),
        ({"a": "b", "b": "a"}, {"a", "b", "c.0.w"}),
        ({"c.*.w": "e.*.w", "b": ""}, {"a", "e.0.w"}),
        ({"c.**": "**", "**": "x.**"}, {"x.a", "x.b", "0.w"}),  # the exact name, or the first pattern
        ({re.compile(r"c\.(\d)\.w"): r"w\1"}, {"a", "b", "w0"}),
        ([(r"^c\.0\.", ""), ("^a$", "")], {"b", "w"}),  # an empty name drops
        (lambda name: None if name == "a" else name, {"b", "c.0.w"}),
    ],
)
def test_rename_takes_names_patterns_pairs_and_functions(rename: Rename, expected: set[str]) -> None:
    renaming = Renaming(rename)
    assert set(renaming.apply(entries(["a", "b", "c.0.w"]))) == expected
    renaming.check(())


@pytest.mark.parametrize(
    ("rename", "error", "message"),
    [
        ({"nope": "x"}, MismatchError, "rename='nope' matches no name.*found 'a', 'b'"),
        ({"a": "x", "fc.*": ""}, MismatchError, r"rename='fc\.\*' matches no name"),
        ([("^a$", "x"), ("^fc", "")], MismatchError, r"rename='\^fc' matches no name"),
        ({"a": "b"}, MismatchError, "same name"),
        ({"*": "x"}, ValueError, "repeat the wildcards"),
        (len, TypeError, "int"),
    ],
)
def test_a_rename_that_does_not_fit_is_an_error(rename: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=f"(?s){message}"):
        select(entries(["a", "b"]), outline("a", "b"), rename=rename)


def test_names_that_a_tree_spells_twice_do_not_stop_the_search() -> None:
    assert select({"model": PLAIN, "a.b": {"c": 1}, "x": entries(["y"]) | {"y.z": 1}}, MODULE).key == "model"
    twice = {"model": PLAIN, "a": {"b.c": entries(["d"], 70)}, "a.b": {"c": entries(["d"], 80)}}
    assert select(twice, MODULE).key == "model"


_names = st.lists(
    st.lists(st.sampled_from(["a", "b", "module", "_orig_mod", "w"]), min_size=1, max_size=4).map(".".join),
    min_size=1,
    max_size=8,
    unique=True,
)


@given(_names, st.sampled_from(["", "module.", "x.y."]))
def test_a_state_dict_always_fits_its_own_module(names: list[str], prefix: str) -> None:
    plain = entries(names)
    found: Selection = select({"model": prefixed(prefix, plain)}, outline(*names), key="model")
    assert found.entries == plain


def test_ten_thousand_names_take_work_in_proportion() -> None:
    names = [f"layers.{i}.mlp.experts.{j}.weight" for i in range(100) for j in range(100)]
    plain, own = entries(names), outline(*names)
    with at_most(200 * len(names)):
        found = select({"model": prefixed("module.", plain)}, own, limits=Limits())
    assert len(found.entries) == len(names)


def test_names_of_thousands_of_components_take_work_in_proportion() -> None:
    own = outline(*(f"layers.{i}.weight" for i in range(20)))
    hostile = entries([f"{'.' * 4000}{i}.weight" for i in range(300)])
    with at_most(100 * len(hostile)):
        found = select(hostile, own)
    assert found.entries.keys() == hostile.keys()


def test_where_nothing_matches_the_largest_part_is_compared() -> None:
    found = select({"small": entries(["x"]), "large": entries(["y", "z"], 9)}, MODULE)
    assert found.key == "large"
    assert [line.partition(":")[0] for line in found.candidates] == ["key='large'", "key='small'"]
    assert select({"large": entries(["y", "z"])}, MODULE).candidates == ()
