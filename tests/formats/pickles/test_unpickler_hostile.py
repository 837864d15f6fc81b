"""The inert unpickler: damaged pickles and bombs raise a typed error within bounded work, also inside larger files."""

from __future__ import annotations

import pickle
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sluice._errors import FormatError, LimitError, SluiceError, TruncatedError, UnsupportedError
from sluice._options import Limits
from sluice.formats.pickles.unpickler import unpickle_at
from sluice.formats.torch_save.allowlist import TorchAllowlist
from support.hostile_archives import Call, Global, encode, pickled, storage, tensor_call
from support.pickles import LIMITS, MISSING, body, load, machine
from support.sources import MemorySource, RecordingSource
from support.torch_files import PROTOCOLS
from support.work import at_most

# Damaged pickles


PUSHES = st.sampled_from(
    [
        *(b"N", b")", b"]", b"}", b"\x8f", b"(", b"K\x05", b"h\x00", b"q\x00", b"\x94", encode("k"), encode(MISSING)),
        *(bytes([opcode]) for opcode in b"\x85\x86\x87teaus\x90\x91R\x81bQ\x93"),
        *(encode(Global("collections", "OrderedDict")), encode(Global("builtins", "set")), encode(storage("0", 4))),
    ]
)


@given(opcodes=st.lists(PUSHES, max_size=25))
def test_any_order_of_opcodes_gives_a_value_or_a_typed_error(opcodes: list[bytes]) -> None:
    try:
        load(body(b"".join(opcodes)))
    except SluiceError as error:
        assert str(error)


@pytest.mark.parametrize(
    ("opcodes", "kind"),
    [
        (b"", FormatError),  # STOP on an empty stack
        (b"NN", FormatError),  # two values left
        (b"(N", FormatError),  # a mark left
        (b"\x85", FormatError),
        (b"N\x86", FormatError),
        (b"NR", FormatError),
        (b"t", FormatError),  # no mark
        (b"h\x05", FormatError),
        (b"j\xff\xff\xff\xff", FormatError),
        (b"q\x00", FormatError),
        (b"X\x02\x00\x00\x00\xc3\x28", FormatError),  # not UTF-8
        (b"cmodule\n", TruncatedError),
        (b"\x80\x06N", UnsupportedError),
        (b"\x8b\x00\x00\x00\x10N", LimitError),
        (b"\x8a\xffN", TruncatedError),
        (b"T\xff\xff\xff\xff", LimitError),  # text of negative length
        (b"\xff", FormatError),  # no opcode
    ],
)
def test_broken_structure(opcodes: bytes, kind: type[SluiceError]) -> None:
    with pytest.raises(kind):
        load(body(opcodes))


@pytest.mark.parametrize("opcode", [b"X", b"B", b"\x8d", b"\x8e", b"\x96"])
@pytest.mark.parametrize("declared", [100, 2**32 - 1, 4 << 30, 2**63, 2**64 - 1])
def test_declared_lengths(opcode: bytes, declared: int) -> None:
    wide = opcode not in {b"X", b"B"}
    length = struct.pack("<Q" if wide else "<I", declared if wide else min(declared, 2**32 - 1))
    with pytest.raises(TruncatedError, match="declares more bytes than the pickle holds"):
        load(body(opcode + length + b"xx"))


@pytest.mark.parametrize(
    ("data", "kind"),
    [
        (b"", TruncatedError),
        (b".", FormatError),
        (b"\x00" * 10, FormatError),
        (b"<html>", FormatError),
        (b"\x80\x02I12", TruncatedError),
    ],
)
def test_not_a_pickle(data: bytes, kind: type[SluiceError]) -> None:
    with pytest.raises(kind):
        load(data)


def test_what_follows_the_stop_is_not_read() -> None:
    run = machine(body(b"N") + pickled(Call(MISSING)) + b"\xff")
    assert run.load() is None
    assert run.end == len(body(b"N"))


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        (b"\x95" + struct.pack("<Q", 100) + b"N.", "declares more"),
        (b"\x95" + struct.pack("<Q", 2**64 - 1) + b"N.", "declares more"),
        (b"\x95" + struct.pack("<Q", 11) + b"\x95" + struct.pack("<Q", 2) + b"N.", "inside another"),
        (b"\x95" + struct.pack("<Q", 3) + b"\x8c\x02ab.", "crosses the end"),
        (b"\x95" + struct.pack("<Q", 2) + b"N.N.", None),
        (b"\x95" + struct.pack("<Q", 3) + b"N.N", "before it is complete"),
    ],
)
def test_frames_that_lie(data: bytes, problem: str | None) -> None:
    if problem is None:
        assert load(b"\x80\x04" + data) is None
        return
    with pytest.raises((FormatError, TruncatedError), match=problem):
        load(b"\x80\x04" + data)


# Bombs


def refused_quickly(data: bytes, limits: Limits = LIMITS) -> LimitError:
    with at_most(60 * len(data) + 100_000), pytest.raises(LimitError) as caught:
        load(data, limits)
    return caught.value


def test_deep_tuples_and_lists() -> None:
    for opcodes in (b")" + b"\x85" * 200_000, b")" + b"\x94\x85" * 200_000):
        assert "limit 'depth'" in refused_quickly(body(opcodes)).problem
    for opcodes in (b"](" * 100_000 + b"e" * 100_000, b"]" * 100 + b"a" * 99):
        assert "limit 'depth'" in refused_quickly(body(opcodes)).problem


def test_depth_is_counted_exactly() -> None:
    limits = Limits(depth=3)
    assert load([[[1]]], limits) == [[[1]]]
    with pytest.raises(LimitError, match="at most 3"):
        load([[[[1]]]], limits)


def test_depth_through_shared_containers() -> None:
    # memo 0 holds [[]], which occurs again three levels below
    data = body(b"](" + b"]]aq\x00" + b"]](h\x00eae")
    assert load(data, Limits(depth=5))
    with pytest.raises(LimitError, match="at most 4"):
        load(data, Limits(depth=4))


def test_a_deep_tuple_as_key() -> None:
    data = body(b"}(" + b")" + b"\x85" * 200_000 + b"Nu")
    with at_most(60 * len(data) + 100_000), pytest.raises(UnsupportedError, match="key has the unsupported type tuple"):
        load(data)


@pytest.mark.parametrize("opcodes", [b"]q\x00h\x00a", b"}q\x00Nh\x00s", b"](]q\x00h\x00aNe"])
def test_a_container_that_holds_itself(opcodes: bytes) -> None:
    with pytest.raises(UnsupportedError, match="contains itself"):
        load(body(opcodes))


@pytest.mark.parametrize("step", [2**61 - 1, 2**64, 2**2000])
def test_colliding_integers_as_keys(step: int) -> None:
    items = b"".join(encode(number * step) + b"N" for number in range(20_000 if step < 2**99 else 8))
    assert "61 bits" in refused_quickly(body(b"}(" + items + b"u")).problem
    assert "61 bits" in refused_quickly(body(b"\x8f(" + items + b"\x90")).problem


def test_ordinary_integers_as_keys() -> None:
    value = dict.fromkeys((*range(1000), -(2**61) + 2, 2**61 - 2))
    assert load(value) == value
    for number in (2**61 - 1, -(2**61) + 1, ("a", 2**61)):
        assert "61 bits" in refused_quickly(pickled({number: None})).problem
    assert load(body(b"}(" + encode(Global("torch", "float32")) + b"Nu")) == {"torch.float32": None}


def test_many_tuples_as_keys() -> None:
    assert load({(number, 0): None for number in range(4000)})
    assert len(load({(kind, kind): None for number in range(5000) for kind in (str(number), b"%d" % number)})) == 10_000
    mixed = {tuple("a" if number >> bit & 1 else b"a" for bit in range(13)): None for number in range(5000)}
    assert "tuples" in refused_quickly(pickled(mixed)).problem
    assert "tuples" in refused_quickly(pickled({(number, 0): None for number in range(5000)})).problem


FROZEN = Call(Global("builtins", "frozenset"))


@pytest.mark.parametrize(
    "key", [[], {}, tensor_call(storage("0", 1)), (MISSING,), ([],), ((1,),), tuple(range(17)), FROZEN]
)
def test_keys_that_cannot_be_hashed_safely(key: object) -> None:
    with pytest.raises(UnsupportedError, match="key has the unsupported type"):
        load(body(b"}(" + encode(key) + b"Nu"))
    with pytest.raises(UnsupportedError, match="key has the unsupported type"):
        load(body(b"\x8f(" + encode(key) + b"\x90"))
    assert "key has the unsupported type" in repr(
        load([Call(Global("builtins", "set"), ([key],))])
    )  # a separate value: a leaf


def test_classes_as_keys() -> None:
    item = encode(MISSING) + encode({"best": 1})
    assert repr(load(body(b"}(" + item + b"u"))) == "{<not loaded: sluice_no_such_module.run>: {'best': 1}}"
    for refused in (b"}(" + item * 2 + b"u", b"\x8f(" + encode(MISSING) + b"\x90"):
        with pytest.raises(UnsupportedError, match="key has the unsupported type Opaque"):
            load(body(refused))


def test_long_names() -> None:
    limits = Limits(name_bytes=10)
    assert load({"x" * 10: 1}, limits)
    for value in ({"x" * 11: 1}, Global("m" * 6, "n" * 5), {("x" * 11,): 1}):
        with pytest.raises(LimitError):
            load(value, limits)


@pytest.mark.parametrize(
    ("argument", "function"),
    [
        ("x" * 10_000, Global("_codecs", "encode")),
        (b"x" * 10_000, Global("builtins", "bytearray")),
        ([1] * 10_000, Global("builtins", "set")),
        ([1] * 10_000, Global("torch", "Size")),
        (dict.fromkeys(range(10_000), 1), Global("collections", "Counter")),
    ],
)
def test_one_object_copied_over_and_over(argument: object, function: Global) -> None:
    arguments = b"h\x00" + (encode("latin1") + b"\x86" if function.name == "encode" else b"\x85")
    call = b"h\x01" + arguments + b"R"
    data = body(encode(argument) + b"q\x00" + encode(function) + b"q\x01\x86" + b"](" + call * 1000 + b"e\x86")
    assert "copy" in refused_quickly(data).problem


# Pickles inside a larger file


def allowlist() -> TorchAllowlist:
    return TorchAllowlist(Limits(), 1 << 20)


@PROTOCOLS
def test_pickles_one_after_the_other(protocol: int) -> None:
    values = [{"a": 1}, "x" * 10_000, list(range(5000)), None]
    parts = [pickle.dumps(value, protocol) for value in values]
    source = MemorySource(b"head" + b"".join(parts) + b"tail")
    end = 4
    for value, part in zip(values, parts, strict=True):
        start = end
        found, unpickler, end = unpickle_at(source, start, allowlist(), Limits())
        assert found == value
        assert end == start + len(part)
        assert unpickler.refusal is None


@PROTOCOLS
def test_a_short_pickle_is_one_read_of_one_small_window(protocol: int) -> None:
    source = RecordingSource(MemorySource(pickle.dumps(7, protocol) + bytes(1 << 20)))
    assert unpickle_at(source, 0, allowlist(), Limits())[0] == 7
    assert [(read.offset, read.nbytes) for read in source.reads] == [(0, 4096)]


@PROTOCOLS
def test_at_most_the_length_of_the_pickle_and_a_frame_are_read_beyond_its_end(protocol: int) -> None:
    part = pickle.dumps(list(range(100_000)), protocol)
    source = RecordingSource(MemorySource(part + bytes(4 << 20)))
    assert unpickle_at(source, 0, allowlist(), Limits())[2] == len(part)
    assert max(read.offset + read.nbytes for read in source.reads) <= 2 * len(part) + (64 << 10)


def test_the_header_limit_bounds_the_length() -> None:
    content = pickle.dumps(list(range(10_000)), 2)
    assert unpickle_at(MemorySource(content), 0, allowlist(), Limits(header_bytes=len(content)))[2] == len(content)
    with pytest.raises(LimitError, match="header_bytes") as caught:
        unpickle_at(MemorySource(b"12345" + content), 5, allowlist(), Limits(header_bytes=len(content) - 1))
    assert caught.value.offset == 5


def test_offsets_in_errors_count_from_the_start_of_the_file() -> None:
    with pytest.raises(TruncatedError, match="where a pickle should start") as caught:
        unpickle_at(MemorySource(b"1234567"), 7, allowlist(), Limits())
    assert caught.value.offset == 7
    with pytest.raises(FormatError, match="not a pickle") as wrong:
        unpickle_at(MemorySource(b"1234567"), 3, allowlist(), Limits())
    assert wrong.value.offset == 3
    long = b"\x80\x02](" + b"K\x01" * 10_000  # the data ends before STOP, in a later window
    with pytest.raises(TruncatedError) as short:
        unpickle_at(MemorySource(b"123" + long), 3, allowlist(), Limits())
    assert short.value.offset == 3 + len(long)
