"""Texts of errors: lists of names, the most similar name, and advice for errors of the operating system."""

from __future__ import annotations

import difflib
import errno
import os
from collections.abc import Callable

import pytest

from sluice._errors import ReadError, ReadPermissionError, SaveError
from sluice._messages import MOST_NAMES, listed, nearest_names, read_error, save_error, section
from support.watching import watch
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

    def count(name: str, others: dict[str, str], **_: object) -> None:
        assert len(others) <= 8
        compared.extend((name, *others))

    watch(monkeypatch, difflib, "get_close_matches", count)
    number = 1500
    nearest_names({missing(i): SHAPE for i in range(number)}, [(existing(i), SHAPE) for i in range(number)])
    assert MOST_NAMES <= len(compared) <= 9 * MOST_NAMES
    assert max(map(len, compared)) <= 96


def test_the_index_takes_work_in_proportion_to_the_names() -> None:
    number = 5_000
    missing, existing = ([f"{side}.{i}.experts.{i % 7}.weight" for i in range(number)] for side in ("model", "blocks"))
    with at_most(60 * number + 10_000 * MOST_NAMES):
        assert nearest_names(dict.fromkeys(missing, SHAPE), ((name, SHAPE) for name in existing))


@pytest.mark.parametrize(
    ("number", "reading", "saving"),
    [
        (errno.ENOSPC, ReadError.advice, "Free space"),
        (errno.EDQUOT, ReadError.advice, "quota"),
        (errno.EFBIG, ReadError.advice, "max_shard_size"),
        (errno.EACCES, "permissions of the file", "permissions of the directory"),
        (errno.EPERM, "permissions of the file", "permissions of the directory"),
        (errno.EROFS, ReadError.advice, "read-only"),
        (errno.EIO, "dmesg", "dmesg"),
        (errno.EMFILE, "ulimit -n", "ulimit -n"),
        (errno.ENFILE, "on this machine", "on this machine"),
        (errno.ENOMEM, "out of memory", "out of memory"),
        (errno.ENAMETOOLONG, "too long", "too long"),
        (errno.ELOOP, "circle", "circle"),
        (errno.ENOTDIR, "not a directory", "not a directory"),
        (errno.EISDIR, "path of a file", "choose another one"),
        (errno.ESTALE, "file server", "file server"),
        (errno.ETIMEDOUT, "network mount", "network mount"),
        (errno.EINVAL, ReadError.advice, SaveError.advice),
    ],
)
def test_the_advice_fits_the_number(number: int, reading: str, saving: str) -> None:
    cause = OSError(number, os.strerror(number))
    read = read_error("reading failed", cause, file="x", offset=3)
    saved = save_error("refused", cause, file="y")
    assert reading in read.advice
    assert saving in saved.advice
    assert str(read).startswith(f"x, byte 3: reading failed: {os.strerror(number)}. ")
    assert str(saved).startswith(f"y: refused: {os.strerror(number)}. ")
    assert ("space" in saved.advice) == (number in {errno.ENOSPC, errno.EDQUOT})
    assert (read.errno, read.strerror, read.filename) == (number, os.strerror(number), "x")


def test_errors_of_refused_access_and_without_a_number() -> None:
    error = read_error("it cannot be opened", PermissionError(errno.EACCES, "Permission denied"), file="x")
    assert type(error) is ReadPermissionError
    assert isinstance(error, (ReadError, PermissionError))
    error = read_error("reading failed", OSError("odd"), file="x")
    assert (error.errno, error.advice) == (None, ReadError.advice)
    assert str(error) == f"x: reading failed: odd. {ReadError.advice}"


def test_the_first_names_are_listed_and_the_others_counted() -> None:
    assert listed("missing", ["a", ""]) == "missing (2): a, ''"
    names = [f"layer.{number}" for number in range(1234)]
    assert listed("missing", names) == f"missing (1,234): {', '.join(names[:8])} and 1,226 more"
    assert len(listed("missing", ["x" * 100_000] * 3)) + len(section("missing", ["y" * 100_000], ["y"])) < 10_000
