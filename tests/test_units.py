"""Parsing and formatting of sizes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sluice._units import counted, format_bytes, format_rate, gb_per_second, parse_bytes


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("64MiB", 64 << 20),
        ("2GB", 2_000_000_000),
        ("2G", 2 << 30),
        ("2Gi", 2 << 30),
        ("2GiB", 2 << 30),
        ("512m", 512 << 20),
        ("4k", 4096),
        ("1T", 1 << 40),
        ("1.5 GiB", 3 << 29),
        (" 4 KiB ", 4096),
        ("3kb", 3000),
        ("0.5KiB", 512),
        (5, 5),
        (np.int32(5), 5),
    ],
)
def test_parse(text: Any, nbytes: int) -> None:
    assert parse_bytes(text) == nbytes


@pytest.mark.parametrize(
    "text", ["", "MiB", "-1", "1 2", "1..5KB", "1e3", "1XB", "0x10", "5QB", "nan", "inf", "9" * 400 + ".5G"]
)
def test_a_text_that_is_not_a_size_is_refused_by_name(text: str) -> None:
    with pytest.raises(
        ValueError, match=r"not a size.*2GiB or 2G \(2 \* 1024\*\*3 bytes\), 2GB \(2 \* 1000\*\*3 bytes\)"
    ):
        parse_bytes(text)


@pytest.mark.parametrize("size", [True, 1.5, None, b"1"])
def test_negative_numbers_and_other_types_are_refused(size: object) -> None:
    with pytest.raises(ValueError, match="negative: -1"):
        parse_bytes(-1)
    with pytest.raises(TypeError, match=type(size).__name__):
        parse_bytes(size)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.00 KiB"),
        (10 << 10, "10.0 KiB"),
        (100 << 20, "100 MiB"),
        (3 << 29, "1.50 GiB"),
        (5000 << 40, "5000 TiB"),
        (-(3 << 20), "-3.00 MiB"),
    ],
)
def test_format(nbytes: int, text: str) -> None:
    assert format_bytes(nbytes) == text


@given(st.integers(0, 1 << 50))
def test_a_formatted_size_parses_to_about_the_same(nbytes: int) -> None:
    assert parse_bytes(format_bytes(nbytes)) == pytest.approx(nbytes, rel=0.006)


@given(st.integers(0, 1 << 70))
def test_whole_numbers_are_exact(nbytes: int) -> None:
    assert parse_bytes(str(nbytes)) == parse_bytes(f"{nbytes}B") == nbytes
    assert parse_bytes(f"{nbytes} KiB") == nbytes << 10


def test_rates_are_decimal_and_counts_agree_with_their_nouns() -> None:
    assert gb_per_second(3 * 10**9, 2.0) == 1.5
    assert gb_per_second(1, 0.0) == 0.0
    assert format_rate(3 * 10**9, 2.0) == "2.00 s, 1.50 GB/s"
    assert [counted(1, "tensor"), counted(2000, "tensor")] == ["1 tensor", "2,000 tensors"]
    assert counted(2, "hash", "hashes") == "2 hashes"
