"""Read order of a verification: every byte once, and the bytes of each tensor in order."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from sluice import _defaults as defaults
from sluice.checking.read_order import FileRange, schedule

EXTENTS = ((0, 400_000), (7, 50), (0, 0))

GAPS = (defaults.COALESCE_GAP_BYTES,) * len(EXTENTS)


@st.composite
def ranges(draw: st.DrawFn) -> FileRange:
    file = draw(st.integers(0, 1))
    first, end = EXTENTS[file]
    step = 9_000 if file == 0 else 1
    begin = draw(st.integers(0, (end - first) // step - 1))
    length = draw(st.integers(1, min(6, (end - first) // step - begin)))
    return FileRange(file, first + begin * step, first + (begin + length) * step)


@given(st.lists(st.lists(ranges(), max_size=4), max_size=6))
def test_every_byte_once_and_accepted_wishes_in_order(wishes: list[list[FileRange]]) -> None:
    made = schedule(EXTENTS, wishes, GAPS)
    for file, (first, end) in enumerate(EXTENTS):
        own = sorted(span for span in made.ranges if span.file == file)
        assert [one.first for one in own] == [first, *(one.end for one in own[:-1])][: len(own)]
        assert (own[-1].end if own else first) == end
    for number, wanted in enumerate(wishes):
        if number in made.refused:
            assert len(wanted) > 1
            continue
        homes = [next(i for i, one in enumerate(made.ranges) if contains(one, span)) for span in wanted]
        places = [(home, span.first) for home, span in zip(homes, wanted, strict=True)]
        assert places == sorted(places)


def contains(home: FileRange, span: FileRange) -> bool:
    return home.file == span.file and home.first <= span.first and span.end <= home.end


def test_what_needs_no_order_is_read_as_it_lies() -> None:
    assert schedule(((0, 100), (5, 9)), [[FileRange(0, 50, 60)], [FileRange(0, 10, 90)]], GAPS).ranges == (
        FileRange(0, 0, 100),
        FileRange(1, 5, 9),
    )


def test_chunks_come_in_the_order_of_their_tensor() -> None:
    chunks = [FileRange(1, 500_000, 600_000), FileRange(0, 0, 100)]
    made = schedule(((0, 10**6), (0, 10**6)), [chunks, [FileRange(0, 50, 100)]], GAPS)
    assert made.ranges[:2] == (FileRange(1, 500_000, 600_000), FileRange(0, 0, 100))
    assert not made.refused


def test_two_orders_of_the_same_bytes_cannot_both_be_had() -> None:
    one, other = FileRange(0, 0, 100), FileRange(1, 0, 100)
    made = schedule(((0, 100), (0, 100)), [[one, other], [other, one], [one, other], [one]], GAPS)
    assert made.refused == {1}
    assert schedule(((0, 100),), [[FileRange(0, 0, 10), FileRange(0, 5, 20)]], GAPS).refused == {0}  # they overlap


def test_a_gap_is_read_along_if_the_source_reads_such_gaps() -> None:
    extents, gaps = ((0, 100), (0, 100)), (0, 30)
    near = [FileRange(0, 60, 70), FileRange(0, 10, 40), FileRange(1, 60, 70), FileRange(1, 10, 40)]
    assert schedule(extents, [near], gaps).ranges == (
        FileRange(0, 60, 70),
        FileRange(0, 10, 40),
        FileRange(1, 40, 70),
        FileRange(1, 10, 40),
        FileRange(0, 0, 10),
        FileRange(0, 40, 60),
        FileRange(0, 70, 100),
        FileRange(1, 0, 10),
        FileRange(1, 70, 100),
    )
