"""The inert unpickler: valid pickles load as with ``pickle``, and nothing that a pickle names is imported."""

from __future__ import annotations

import pickle
import pickletools
import sys
from collections import Counter, OrderedDict, defaultdict
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sluice._errors import FormatError, UnsafeContentError, UnsupportedError
from sluice.formats.pickles import opcodes as _pickle_opcodes
from sluice.records import Opaque, TorchSize, TorchText
from support.hostile_archives import Call, Global, Raw, encode, pickled
from support.pickles import MISSING, body, load, machine

PLAIN = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers(-(2**1000), 2**1000)
    | st.floats(allow_nan=False)
    | st.complex_numbers(allow_nan=False)
    | st.text(st.characters(exclude_categories=["Cs"]))
    | st.binary()
    | st.binary().map(bytearray),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.tuples(inner, inner)
        | st.dictionaries(st.text(st.characters(exclude_categories=["Cs"])) | st.integers(-99, 99), inner, max_size=4)
        | st.dictionaries(st.tuples(st.text(max_size=3), st.integers(0, 9)), inner, max_size=3).map(OrderedDict)
        | st.sets(st.integers(-(2**61) + 2, 2**61 - 2) | st.binary(max_size=3), max_size=1)
        | st.frozensets(st.text(max_size=3, alphabet="ab"), max_size=1)
    ),
    max_leaves=20,
)


@given(value=PLAIN, protocol=st.integers(2, 5))
def test_plain_values_are_what_pickle_gives(value: object, protocol: int) -> None:
    found = load(pickle.dumps(value, protocol))
    assert found == value
    assert repr(found) == repr(value)  # the same types all the way down


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_long_text_outside_frames(protocol: int) -> None:
    value = ["x" * 100_000, b"y" * 100_000, bytearray(b"z" * 100_000), "end"]
    assert load(pickle.dumps(value, protocol)) == value


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_shared_objects_stay_shared(protocol: int) -> None:
    inner = [1]
    found = load(pickle.dumps({"a": inner, "b": inner, "c": [1]}, protocol))
    assert found["a"] is found["b"]
    assert found["a"] is not found["c"]


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_containers_of_collections(protocol: int) -> None:
    found = load(pickle.dumps([OrderedDict(b=1, a=2), Counter("aab"), defaultdict(list, k=[3])], protocol))
    assert [type(value) for value in found] == [OrderedDict, Counter, dict]
    assert found == [OrderedDict(b=1, a=2), Counter(a=2, b=1), {"k": [3]}]
    assert "initial items" in repr(load([Call(Global("collections", "defaultdict"), ("factory", {"a": 1}))]))
    assert "that picklers do not use" in repr(load([Call(Global("_codecs", "encode"), ("x", "rot13"))]))


@pytest.mark.parametrize("protocol", [2, 4])
def test_values_of_torch_become_plain(protocol: int) -> None:
    value = (torch.float32, torch.bfloat16, torch.uint16, torch.strided, torch.Size([2, 3]), torch.device("cuda", 1))
    found = load(pickle.dumps(value, protocol))
    assert found == ("torch.float32", "torch.bfloat16", "torch.uint16", "torch.strided", (2, 3), "cuda:1")
    assert [type(one) for one in found] == [TorchText] * 4 + [TorchSize, TorchText]


def test_metadata_of_a_state_dict_is_kept_and_other_attributes_are_not() -> None:
    state_dict: Any = OrderedDict(w=1)
    state_dict._metadata = OrderedDict({"": {"version": 1}})
    state_dict.note = "dropped"
    found = load(pickle.dumps(state_dict, 2))
    assert found._metadata == state_dict._metadata
    assert vars(found).keys() == {"_metadata"}


def test_an_attribute_cannot_hide_a_method() -> None:
    found = load(Call(Global("collections", "OrderedDict"), (), state={"items": 1, "_metadata": {}}))
    assert list(found.items()) == []


# Names that are never imported or called


@pytest.mark.parametrize(
    "value",
    [
        MISSING,
        Call(MISSING, ("id",)),
        Call(Global("os", "system"), ("exit 1",)),
        Call(Global("builtins", "eval"), ("1/0",)),
        Call(Call(Global("builtins", "getattr"), (Global("os", "x"), "system")), ("exit 1",)),
        Call(MISSING, (), state={"a": 1}),
        Raw(encode(MISSING) + b")\x81"),
        Raw(encode(MISSING) + b")\x81" + encode({"a": 1}) + b"b"),
        Raw(encode(Call(MISSING)) + b"(" + encode(1) + encode(2) + b"e"),
        Raw(encode(Call(MISSING)) + encode("k") + encode("v") + b"s"),
        Raw(encode("sluice_no_such_module") + encode("run") + b"\x93)R"),
    ],
)
def test_unknown_globals_are_inert_leaves(value: object) -> None:
    found = load({"before": 1, "leaf": value, "after": [2]})
    assert isinstance(found["leaf"], Opaque)
    assert (found["before"], found["after"]) == (1, [2])
    assert "sluice_no_such_module" not in sys.modules


@pytest.mark.parametrize(
    "name",
    [
        Global("torch", "_utils._rebuild_tensor_v2"),  # a dotted name that spells a permitted path
        Global("torch._utils._rebuild_tensor_v2", ""),
        Global("os", "OrderedDict"),
        Global("__builtin__", "eval"),
        Global("collections.OrderedDict", "fromkeys"),
        Global("builtins.set", "x"),
    ],
)
def test_only_exact_pairs_are_permitted(name: Global) -> None:
    found = load([Call(name, ([1],))])
    assert found == [Opaque(qualified_name=f"{name.module}.{name.name}")]


def test_the_name_of_a_leaf_is_that_of_the_file() -> None:
    run = machine(pickled([Call(Global("argparse", "Namespace")), Global("argparse", "Namespace")]))
    assert run.load() == 2 * [Opaque(qualified_name="argparse.Namespace")]
    assert [leaf.qualified_name for leaf in run.opaque.values()] == ["argparse.Namespace"]


REFUSED = [
    opcode
    for opcode in pickletools.opcodes
    if _pickle_opcodes.HANDLERS[ord(opcode.code)] is _pickle_opcodes._refuse  # the table under test contains them
]


CALLING = {"INST", "OBJ", "EXT1", "EXT2", "EXT4", "NEWOBJ_EX"}


@pytest.mark.parametrize("opcode", REFUSED, ids=lambda opcode: opcode.name)
def test_other_opcodes_are_refused_by_name_and_offset(opcode: Any) -> None:
    """Those that would import or call something are unsafe. The others are harmless, but torch never writes them."""
    kind = UnsafeContentError if opcode.name in CALLING else UnsupportedError
    with pytest.raises(kind, match=rf"\b{opcode.name}\b") as caught:
        load(body(b"N" + opcode.code.encode("latin1") + bytes(20)))
    assert caught.value.offset == 1003
    assert "damaged" not in str(caught.value)


def test_the_dangerous_opcodes_are_among_the_refused() -> None:
    assert {*CALLING, "PERSID", "PUT", "GET", "STRING", "UNICODE", "DUP"} <= {opcode.name for opcode in REFUSED}


# Pickles of Python 2, and of protocol 1


def test_the_memo_may_start_at_any_number_and_have_gaps() -> None:
    """Python 2's cPickle numbers from 1, its pickletools.optimize leaves gaps."""
    assert load(body(b"]q\x01h\x01\x86")) == ([], [])
    assert load(body(b"(" + b"N" * 50 + b"]q\x30h\x30t"))[-1] == []
    assert load(body(b"(K\x01q\x00K\x02q\x01K\x03q\x00h\x01t")) == (1, 2, 3, 2)  # of one number, the last
    with pytest.raises(FormatError, match="refers to memo entry 0, which it did not store"):
        load(body(b"]q\x01h\x00\x86"))


@pytest.mark.parametrize(
    ("opcodes", "largest"),
    [
        (b"Nr\xff\xff\xff\xff", 3),
        (b"X\xe8\x03\x00\x00" + b"x" * 1000 + b"r\xe8\x03\x00\x00", 3),  # one opcode has a thousand bytes
    ],
    ids=["after one byte", "after a long text"],
)
def test_an_index_above_the_number_of_opcodes_would_size_the_memo(opcodes: bytes, largest: int) -> None:
    with pytest.raises(FormatError, match="larger than the number of objects") as caught:
        load(body(opcodes))
    assert caught.value.expected == f"at most {largest}"


@pytest.mark.parametrize(
    ("opcodes", "value"),
    [
        (b"I01\n", True),
        (b"I00\n", False),
        (b"I-12\n", -12),
        (b"I1099511627776\n", 2**40),
        (b"L1180591620717411303424L\n", 2**70),
        (b"L-5L\n", -5),
        (b"L" + str(-(2**2039)).encode() + b"L\n", -(2**2039)),
    ],
)
def test_integers_in_decimal(opcodes: bytes, value: int) -> None:
    for data in (body(opcodes), opcodes + b"."):  # protocol 1 has no PROTO
        found = load(data)
        assert (type(found), found) == (type(value), value)


@pytest.mark.parametrize("digits", [b"", b"0x10", b"1_0", b" 1", b"1L2", b"-", b"\xb2", b"9" * 700])
def test_integers_that_are_not_decimal(digits: bytes) -> None:
    with pytest.raises(FormatError, match="not in decimal"):
        load(body(b"I" + digits + b"\n"))


@pytest.mark.parametrize("opcode", [b"U\x05", b"T\x05\0\0\0"], ids=["SHORT_BINSTRING", "BINSTRING"])
def test_text_of_python_2_in_an_encoding(opcode: bytes) -> None:
    assert load(body(opcode + b"caf\xc3\xa9")) == "café"
    assert machine(body(opcode + b"caf\xe9s"), encoding="latin1").load() == "cafés"
    assert machine(body(opcode + b"caf\xe9s"), encoding="bytes").load() == b"caf\xe9s"
    with pytest.raises(UnsupportedError, match="not utf-8") as caught:
        load(body(opcode + b"caf\xe9s"))
    assert "encoding='latin1'" in str(caught.value)
    assert "damaged" not in str(caught.value)


def test_lone_surrogates_are_kept() -> None:
    """Python has them in file names that are not UTF-8, and pickles them."""
    value = {"path": "caf\udce9"}
    assert load(pickle.dumps(value, 2)) == value


@pytest.mark.parametrize(
    "value",
    [
        Call(5, ()),
        Call("torch.float32", ()),
        Raw(encode(MISSING) + b"NR"),  # arguments that are not a tuple
        Raw(encode(Global("collections", "OrderedDict")) + b")\x81" + b"" + encode(1) + b"b"),
        Raw(encode([]) + encode({"a": 1}) + b"b"),
        Raw(encode(5) + b"(" + encode(1) + b"e"),
        Raw(encode({}) + b"(" + encode(1) + b"e"),
        Raw(encode([]) + b"(" + encode(1) + encode(2) + b"u"),
        Raw(encode(()) + b"(" + encode(1) + b"\x90"),
        Raw(b"}(" + encode("key without value") + b"u"),
        Raw(encode(1) + encode(2) + b"\x93"),
        Call(Global("collections", "OrderedDict"), ("text",)),
        Call(Global("collections", "Counter"), ("text",)),
        Call(Global("torch", "Size"), (["a"],)),
        Call(Global("torch", "Size"), ((True,),)),
        Call(Global("torch", "device"), (1,)),
        Call(Global("torch", "device"), ()),
        Call(Global("builtins", "complex"), ("1", "2")),
        Call(Global("builtins", "bytes"), (10**12,)),
        Call(Global("builtins", "bytearray"), (10**12,)),
        Call(Global("builtins", "set"), (1, 2)),
        Call(Global("_codecs", "encode"), ("\u20ac", "latin1")),
        Call(Global("torch.serialization", "_get_layout"), (1,)),
    ],
)
def test_misused_values_and_constructors(value: object) -> None:
    with pytest.raises(FormatError):
        load([value])


@pytest.mark.parametrize("index", [-1, 128, 10**30, True])
def test_devices_that_torch_does_not_have(index: object) -> None:
    assert load([Call(Global("torch", "device"), ("cuda", 127))]) == ["cuda:127"]
    with pytest.raises(FormatError, match=r"torch\.device"):
        load([Call(Global("torch", "device"), ("cuda", index))])
