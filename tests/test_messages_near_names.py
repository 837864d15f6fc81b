"""The existing name that is most similar to a missing one: what is proposed, and how few names are compared."""

from __future__ import annotations

import difflib
from collections.abc import Callable

import pytest

from sluice._messages import MOST_NAMES, nearest_names
from support.work import at_most

SHAPE = (4, 4)


def nearest(missing: str, existing: list[str]) -> str | None:
    return nearest_names({missing: SHAPE}, [(name, SHAPE) for name in existing]).get(missing)


@pytest.mark.parametrize("experts", [2, 300])
def test_the_same_layer_and_expert_is_proposed_under_other_names(experts: int) -> None:
    existing = [f"layers.{i}.feed_forward.experts.{j}.w1.weight" for i in range(12) for j in range(experts)]
    assert nearest("model.layers.7.mlp.experts.1.w1.weight", existing) == "layers.7.feed_forward.experts.1.w1.weight"


@pytest.mark.parametrize(
    ("missing", "found"),
    [
        ("model.blocks.17.norm.weight", "blocks.17.norm.weight"),  # a prefix
        ("blocks.17.norm.wieght", "blocks.17.norm.weight"),  # the last word
        ("block.17.norm.weight", "blocks.17.norm.weight"),  # the first word
        ("Blocks_17_norm_weight", "blocks.17.norm.weight"),  # other separators and letters
        ("blocks.17.attention.weight", "blocks.17.attn.weight"),  # a word inside
    ],
)
def test_a_changed_name_is_found_among_thousands(missing: str, found: str) -> None:
    existing = [f"blocks.{i}.{part}.weight" for i in range(1000) for part in ("norm", "attn", "mlp")]
    assert nearest(missing, existing) == found


def test_only_names_of_the_same_kind_are_proposed() -> None:
    existing = [("a.weight", (1,)), ("b.bias", (2,))]
    assert nearest_names({"b.biases": (2,), "c": (3,)}, existing) == {"b.biases": "b.bias"}
    assert nearest_names({}, existing) == {}


@pytest.mark.parametrize(
    ("missing", "existing", "found"),
    [
        ("state.0.exp_avg", "up.weight", False),
        ("state.0.exp_avg", "layers.0.down", False),  # a number in common
        ("", "x", False),
        ("fc1wght", "fc1weight", True),  # letters in common
    ],
)
def test_unrelated_names_are_not_proposed(missing: str, existing: str, *, found: bool) -> None:
    assert nearest(missing, [existing]) == (existing if found else None)


@pytest.mark.parametrize(
    ("missing", "existing"),
    [
        ("encoder.{}.weight".format, "backbone.stages.{}.w".format),
        (("a" * 4000 + "{:b}").format, ("a" * 4000 + "{:o}b").format),  # one long start
        (("{}" + "ab" * 2000).format, ("{}" + "ba" * 2000).format),  # one long end
        (("." * 4000 + "{}").format, ("." * 4001 + "{}").format),  # nothing but separators
        ("a.{:b}.a".format, "b.{:b}.b".format),  # words that all names have
    ],
)
def test_comparisons_are_bounded(
    monkeypatch: pytest.MonkeyPatch, missing: Callable[[int], str], existing: Callable[[int], str]
) -> None:
    compared: list[str] = []
    matches = difflib.get_close_matches

    def count(name: str, others: dict[str, str], *, n: int, cutoff: float) -> list[str]:
        assert len(others) <= 8
        compared.extend((name, *others))
        return matches(name, others, n=n, cutoff=cutoff)

    monkeypatch.setattr(difflib, "get_close_matches", count)
    number = 1500
    nearest_names({missing(i): SHAPE for i in range(number)}, [(existing(i), SHAPE) for i in range(number)])
    assert MOST_NAMES <= len(compared) <= 9 * MOST_NAMES
    assert max(map(len, compared)) <= 96


def test_the_index_takes_work_in_proportion_to_the_names() -> None:
    number = 5_000
    missing, existing = ([f"{side}.{i}.experts.{i % 7}.weight" for i in range(number)] for side in ("model", "blocks"))
    with at_most(60 * number + 10_000 * MOST_NAMES):
        assert nearest_names(dict.fromkeys(missing, SHAPE), ((name, SHAPE) for name in existing))
