"""Documents of reports, rendered as text, with rich, and as plain values; text from files, made safe for terminals."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import MappingProxyType

from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console, Group

from sluice.reports.document import (
    ROWS_SHOWN,
    Grid,
    Report,
    Section,
    Strong,
    plain,
    printable,
    printable_paragraph,
    printable_value,
    rich_sections,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Inner:
    size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Example(Report):
    name: str
    parts: tuple[Inner, ...] = ()
    by_name: MappingProxyType[str, Inner] = field(default_factory=lambda: MappingProxyType({}))
    maker: object = field(default=None, repr=False)

    def sections(self) -> Iterator[Section]:
        yield Strong(f"title of {self.name}")
        yield Grid(("part", ">size"), [(self.name, f"{part.size:,}") for part in self.parts], omitted=2)
        yield f"note: {self.name}"


HOSTILE = Example(name="w\x1b[31m[red]\n", parts=(Inner(size=1000),), by_name=MappingProxyType({"a": Inner(size=2)}))
SHOWN = "w\\x1b[31m[red]\\n"


def test_text_and_rich_show_the_same_lines_and_escape_names() -> None:
    assert str(HOSTILE).splitlines() == [
        f"title of {SHOWN}",
        "part               size",
        f"{SHOWN}  1,000",
        "and 2 more; to_json() and --json have all",
        f"note: {SHOWN}",
    ]
    screen = io.StringIO()
    Console(file=screen, width=80).print(HOSTILE)
    assert [line.strip() for line in screen.getvalue().splitlines()][-2:] == str(HOSTILE).splitlines()[-2:]
    assert f"{SHOWN}   1,000" in screen.getvalue()


def test_a_table_of_thousands_of_rows_is_lines() -> None:
    screen = io.StringIO()
    grid = Grid(("name", ">bytes"), [(f"layer.{number}", "4 B") for number in range(1001)])
    Console(file=screen, width=40).print(Group(*rich_sections([grid], 80)))
    assert [line.rstrip() for line in screen.getvalue().splitlines()] == list(grid.lines())


def test_only_the_first_rows_are_made() -> None:
    made: list[int] = []

    def rows() -> Iterator[tuple[str]]:
        for number in range(100_000):
            made.append(number)
            yield (str(number),)

    grid = Grid.first(("n",), rows(), 100_000)
    assert len(grid.rows) == ROWS_SHOWN
    assert len(made) == ROWS_SHOWN
    assert list(grid.rest()) == ["and 99,960 more; to_json() and --json have all"]


def test_json_holds_nested_records_and_leaves_out_what_repr_does() -> None:
    assert HOSTILE.to_json() == {"name": HOSTILE.name, "parts": [{"size": 1000}], "by_name": {"a": {"size": 2}}}
    assert json.loads(json.dumps(plain({"report": HOSTILE, "numbers": (1, 2.5, None)}))) == {
        "report": HOSTILE.to_json(),
        "numbers": [1, 2.5, None],
    }


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
