"""Text from files, made safe for terminals."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from sluice.reports.printable import printable, printable_paragraph, printable_value


@given(st.text())
def test_printable_text_is_printable_and_short_of_nothing(text: str) -> None:
    assert printable(text).isprintable()
    if text.isprintable():
        assert printable(text) == text
    assert printable_paragraph(text).count("\n") == text.count("\n")


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary(max_size=1000),
        lambda inner: st.lists(inner) | st.dictionaries(st.text() | st.integers(), inner) | st.tuples(inner, inner),
    )
)
def test_values_are_printable_and_short(value: object) -> None:
    text = printable_value(value)
    assert text.isprintable()
    assert len(text) < 10_000


def test_large_values_are_not_written_in_full() -> None:
    assert printable_value(1 << 100_000).endswith("... (100001 bits)")
    assert len(printable_value(1 << 100_000)) < 120
    assert printable_value(b"x" * 10_000_000).endswith("... (10000000 bytes)")
