"""Keys from a file: plain values with bounded hashes."""

from __future__ import annotations

import pytest

from sluice._errors import LimitError, UnsupportedError
from sluice._options import Limits
from sluice.formats.pickles.keys import KeyGuard
from sluice.records import Opaque, TorchText


@pytest.mark.parametrize(
    "key",
    ["", "text", TorchText("torch.float32"), b"x", 0, -1, 2**61 - 2, -(2**61) + 2, 1.5, True, None, ("a", 0), ()],
)
def test_plain_keys_are_accepted(key: object) -> None:
    KeyGuard(Limits()).check(key)


@pytest.mark.parametrize("key", [2**61 - 1, -(2**61) + 1, 2**2000, ("a", 2**61)])
def test_integers_that_can_collide_are_refused(key: object) -> None:
    with pytest.raises(LimitError, match="61 bits"):
        KeyGuard(Limits()).check(key)


@pytest.mark.parametrize(
    ("key", "kind"),
    [
        (("a", ("b",)), "tuple"),
        (frozenset(), "frozenset"),
        (tuple(range(17)), "tuple"),
        (Opaque(qualified_name="m.C"), "Opaque"),
    ],
)
def test_other_types_are_refused_by_name(key: object, kind: str) -> None:
    with pytest.raises(UnsupportedError, match=f"unsupported type {kind}"):
        KeyGuard(Limits()).check(key)


def test_the_length_of_text_is_bounded_inside_tuples_too() -> None:
    guard = KeyGuard(Limits(name_bytes=5))
    guard.check("12345")
    for key in ("123456", ("a", "123456")):
        with pytest.raises(LimitError, match="longer than 5 characters"):
            guard.check(key)


def test_tuples_are_counted_for_each_pickle() -> None:
    guard = KeyGuard(Limits())
    for number in range(4096):
        guard.check((number, "x"))
    with pytest.raises(LimitError, match="4096 tuples"):
        guard.check((0,))
    KeyGuard(Limits()).check((0,))
