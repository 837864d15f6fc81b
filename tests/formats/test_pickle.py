"""The inert unpickler: honest pickles give what ``pickle`` gives, hostile ones a typed error or an inert leaf."""

from __future__ import annotations

import io
import pickle
import pickletools
import struct
import sys
import time
from collections import Counter, OrderedDict, defaultdict
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sluice._errors import (
    FormatError,
    LimitError,
    SluiceError,
    TruncatedError,
    UnsafeContentError,
    UnsupportedError,
)
from sluice._options import Limits
from sluice._records import Entry, Opaque
from sluice.formats import _pickle_opcodes
from sluice.formats._pickle import Unpickler
from sluice.formats._pickle_tensors import take_tensor
from sluice.formats._pickle_tree import check_tree
from sluice.formats._torch_objects import TorchObjects
from sluice.testing._archives import Call, Global, Persistent, Raw, encode, pickled, storage, tensor_call

LIMITS = Limits()

#: What a bomb may take on a slow and busy machine; here they take less than one.
SECONDS = 5

#: A module that does not exist: importing it would raise.
MISSING = Global("sluice_no_such_module", "run")


def machine(data: bytes, limits: Limits = LIMITS) -> Unpickler:
    return Unpickler(data, TorchObjects(limits, len(data)), limits=limits, file="file", offset=1000)


def load(value: object, limits: Limits = LIMITS) -> Any:
    """Return what a pickle, or the pickle of a value, gives once its tree was checked."""
    run = machine(value if isinstance(value, bytes) else pickled(value), limits)
    tree = run.load()
    check_tree(tree, limits, "file")
    if run.refusal is not None:
        raise run.refusal.error
    return tree


def body(opcodes: bytes) -> bytes:
    return b"\x80\x02" + opcodes + b"."


# Honest pickles


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
        | st.sets(st.integers() | st.binary(max_size=3), max_size=1)
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


@pytest.mark.parametrize("protocol", [2, 4])
def test_values_of_torch_become_plain(protocol: int) -> None:
    value = (torch.float32, torch.bfloat16, torch.uint16, torch.strided, torch.Size([2, 3]), torch.device("cuda", 1))
    found = load(pickle.dumps(value, protocol))
    assert found == ("torch.float32", "torch.bfloat16", "torch.uint16", "torch.strided", (2, 3), "cuda:1")
    assert type(found[4]) is tuple


def test_every_dtype_of_torch_becomes_its_name() -> None:
    dtypes = {value for value in vars(torch).values() if isinstance(value, torch.dtype)}
    for dtype in dtypes:
        assert load(pickle.dumps([dtype], 2)) == [str(dtype)]


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


def test_empty_bytes_of_protocol_2() -> None:
    assert load(pickle.dumps([b"", bytearray()], 2)) == [b"", bytearray()]


# What is never imported or called


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
    if _pickle_opcodes.HANDLERS[ord(opcode.code)] is _pickle_opcodes._refuse  # the table under test names them
]


@pytest.mark.parametrize("opcode", REFUSED, ids=lambda opcode: opcode.name)
def test_other_opcodes_are_refused_by_name_and_offset(opcode: Any) -> None:
    with pytest.raises(UnsafeContentError, match=rf"\b{opcode.name}\b") as caught:
        load(body(b"N" + opcode.code.encode("latin1") + bytes(20)))
    assert caught.value.offset == 1003


def test_the_dangerous_opcodes_are_among_the_refused() -> None:
    dangerous = {"INST", "OBJ", "EXT1", "EXT2", "EXT4", "NEWOBJ_EX", "PERSID", "PUT", "GET", "STRING", "UNICODE", "DUP"}
    assert dangerous <= {opcode.name for opcode in REFUSED}


def test_bytes_that_are_no_opcode_are_refused() -> None:
    with pytest.raises(UnsafeContentError, match="0xff"):
        load(body(b"\xff"))


@pytest.mark.parametrize(
    "value",
    [
        Call(5, ()),
        Call("torch.float32", ()),
        Raw(encode(MISSING) + b"NR"),  # arguments that are no tuple
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
        Call(Global("_codecs", "encode"), ("x", "zlib")),
        Call(Global("_codecs", "encode"), ("\u20ac", "latin1")),
        Call(Global("torch.serialization", "_get_layout"), (1,)),
    ],
)
def test_misused_values_and_constructors(value: object) -> None:
    with pytest.raises(FormatError):
        load([value])


# Damaged pickles


SMALL = {
    "w": tensor_call(storage("0", 6), shape=(2, 3)),
    "text": "é",
    "more": [1, 2.5, None, True, b"x", (1, 2), {3: 4}],
    "leaf": Call(MISSING, ("x",)),
}


def _protocol_4() -> bytes:
    return pickle.dumps({"a": [1, (2, 3)], "b": {4}, "c": b"bytes", "d": bytearray(b"x"), "e": OrderedDict(f=1.5)}, 5)


@pytest.mark.parametrize("data", [pickled(SMALL), _protocol_4()], ids=["protocol 2", "protocol 5"])
def test_every_prefix_is_refused(data: bytes) -> None:
    for size in range(len(data)):
        with pytest.raises((TruncatedError, FormatError)):
            load(data[:size])


@pytest.mark.parametrize("data", [pickled(SMALL), _protocol_4()], ids=["protocol 2", "protocol 5"])
def test_every_changed_byte_gives_a_value_or_a_typed_error(data: bytes) -> None:
    for position in range(len(data)):
        for changed in {0, 0xFF, data[position] ^ 0x80, data[position] ^ 0x01, data[position] + 1 & 0xFF}:
            edited = data[:position] + bytes([changed]) + data[position + 1 :]
            try:
                load(edited)
            except SluiceError as error:
                assert str(error)


@given(data=st.binary(max_size=60))
def test_noise_gives_a_value_or_a_typed_error(data: bytes) -> None:
    try:
        load(b"\x80\x02" + data)
    except SluiceError as error:
        assert str(error)


PUSHES = st.sampled_from(
    [
        *(b"N", b")", b"]", b"}", b"\x8f", b"(", b"K\x05", b"h\x00", b"q\x00", b"\x94", encode("k"), encode(MISSING)),
        *(
            b"\x85",
            b"\x86",
            b"\x87",
            b"t",
            b"e",
            b"a",
            b"u",
            b"s",
            b"\x90",
            b"\x91",
            b"R",
            b"\x81",
            b"b",
            b"Q",
            b"\x93",
        ),
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
        (b"Nq\x01", FormatError),  # the memo starts at 0
        (b"Nr\xff\xff\xff\xff", FormatError),  # one PUT that would size the memo
        (b"q\x00", FormatError),
        (b"X\x02\x00\x00\x00\xc3\x28", FormatError),  # not UTF-8
        (b"X\x03\x00\x00\x00\xed\xa0\x80", FormatError),  # a lone surrogate
        (b"cmodule\n", TruncatedError),
        (b"\x80\x06N", UnsupportedError),
        (b"\x8b\xff\xff\xff\xffN", LimitError),
        (b"\x8b\x00\x00\x00\x10N", LimitError),
        (b"\x8a\xffN", TruncatedError),
    ],
)
def test_broken_structure(opcodes: bytes, kind: type[SluiceError]) -> None:
    with pytest.raises(kind):
        load(body(opcodes))


@pytest.mark.parametrize("opcode", [b"X", b"B"])
@pytest.mark.parametrize("declared", [100, 2**32 - 1])
def test_declared_lengths_of_32_bits(opcode: bytes, declared: int) -> None:
    with pytest.raises(TruncatedError, match="declares more than it holds"):
        load(body(opcode + struct.pack("<I", declared) + b"xx"))


@pytest.mark.parametrize("opcode", [b"\x8d", b"\x8e", b"\x96"])
@pytest.mark.parametrize("declared", [100, 4 << 30, 2**63, 2**64 - 1])
def test_declared_lengths_of_64_bits(opcode: bytes, declared: int) -> None:
    with pytest.raises(TruncatedError, match="declares more than it holds"):
        load(body(opcode + struct.pack("<Q", declared) + b"xx"))


def test_not_a_pickle() -> None:
    for data in (b"", b".", b"N.", b"\x00" * 10, b"(lp0\n."):
        with pytest.raises(FormatError, match="not a pickle"):
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
        (b"\x95" + struct.pack("<Q", 3) + b"N.N", "before it is finished"),
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
    start = time.process_time()
    with pytest.raises(LimitError) as caught:
        load(data, limits)
    assert time.process_time() - start < SECONDS
    return caught.value


@pytest.mark.parametrize("opcode", [b"\x85", b"\x94\x85"])
def test_a_tuple_a_million_deep(opcode: bytes) -> None:
    assert "nests deeper" in refused_quickly(body(b")" + opcode * 1_000_000)).problem


def test_lists_and_calls_deep() -> None:
    assert "nests deeper" in refused_quickly(body(b"](" * 100_000 + b"e" * 100_000)).problem
    assert "nests deeper" in refused_quickly(body(b"]" * 100 + b"a" * 99)).problem


def test_depth_is_counted_exactly() -> None:
    limits = Limits(depth=3)
    assert load([[[1]]], limits) == [[[1]]]
    with pytest.raises(LimitError, match="deeper than 3"):
        load([[[[1]]]], limits)


def test_depth_through_shared_containers() -> None:
    # memo 0 holds [[]], which stands again three levels further down
    data = body(b"](" + b"]]aq\x00" + b"]](h\x00eae")
    assert load(data, Limits(depth=5))
    with pytest.raises(LimitError, match="deeper than 4"):
        load(data, Limits(depth=4))


def test_a_deep_tuple_as_key() -> None:
    data = body(b"}(" + b")" + b"\x85" * 1_000_000 + b"Nu")
    start = time.process_time()
    with pytest.raises(UnsupportedError, match="key of type tuple"):
        load(data)
    assert time.process_time() - start < SECONDS


def test_a_kilobyte_that_describes_a_trillion_leaves() -> None:
    doubled = b"]K\x00a\x94" + b"".join(b"](h%sh%se\x94" % (bytes([level]), bytes([level])) for level in range(50))
    assert len(doubled) < 1200
    assert "values" in refused_quickly(body(b"(" + doubled + b"t")).problem


@pytest.mark.parametrize("opcodes", [b"]q\x00h\x00a", b"}q\x00Nh\x00s", b"](]q\x00h\x00aNe"])
def test_a_container_that_holds_itself(opcodes: bytes) -> None:
    with pytest.raises(UnsupportedError, match="holds itself"):
        load(body(opcodes))


@pytest.mark.parametrize("step", [2**61 - 1, 2**64, 2**2000])
def test_colliding_integers_as_keys(step: int) -> None:
    items = b"".join(encode(number * step) + b"N" for number in range(20_000 if step < 2**99 else 8))
    assert "61 bits" in refused_quickly(body(b"}(" + items + b"u")).problem
    assert "61 bits" in refused_quickly(body(b"\x8f(" + items + b"\x90")).problem


def test_ordinary_integers_as_keys() -> None:
    value = dict.fromkeys((*range(1000), -(2**61) + 2, 2**61 - 2))
    assert load(value) == value


def test_many_tuples_as_keys() -> None:
    assert load({(number, 0): None for number in range(4000)})
    assert "tuples" in refused_quickly(pickled({(number, 0): None for number in range(5000)})).problem


@pytest.mark.parametrize("key", [[], {}, tensor_call(storage("0", 1)), MISSING, ([],), ((1,),), tuple(range(17))])
def test_keys_that_cannot_be_hashed_safely(key: object) -> None:
    with pytest.raises(UnsupportedError, match="key of type"):
        load(body(b"}(" + encode(key) + b"Nu"))
    with pytest.raises(UnsupportedError, match="key of type"):
        load(body(b"\x8f(" + encode(key) + b"\x90"))
    with pytest.raises(UnsupportedError, match="key of type"):
        load(Call(Global("builtins", "set"), ([key],)))


def test_the_limit_of_opcodes() -> None:
    limits = Limits(nodes=1000)
    assert load(body(b"](" + b"N" * 995 + b"e"), limits)
    assert "1000 opcodes" in refused_quickly(body(b"](" + b"N" * 1000 + b"e"), limits).problem


def test_many_memo_entries() -> None:
    assert "opcodes" in refused_quickly(body(b"N" + b"\x94" * 3_000_000), Limits(nodes=2_000_000)).problem


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


def test_too_many_tensors() -> None:
    limits = Limits(entries=10)
    views = [tensor_call(storage("0", 4), shape=(number % 4,)) for number in range(11)]
    assert len(load(views[:10], limits)) == 10
    assert "more than 10 tensors" in refused_quickly(pickled(views), limits).problem


# Storages and tensors


def test_a_tensor_and_its_storage() -> None:
    data = pickled({"w": tensor_call(storage("7", 10), shape=(2, 3), stride=(4, 1), offset=1, requires_grad=True)})
    objects = TorchObjects(LIMITS, len(data))
    tree = Unpickler(data, objects, limits=LIMITS, file="file").load()
    entry = Entry(dtype="float32", shape=(2, 3), stride=(4, 1), storage=0, storage_offset=1, requires_grad=True)
    assert tree == {"w": entry}
    assert [(found.key, found.nbytes) for found in objects.storages] == [("7", 40)]


FLOATS = storage("0", 10)


@pytest.mark.parametrize(
    ("tensor", "problem"),
    [
        (tensor_call(FLOATS, shape=(11,)), "past the end"),
        (tensor_call(FLOATS, shape=(10,), offset=1), "past the end"),
        (tensor_call(FLOATS, shape=(2, 5), stride=(6, 1)), "past the end"),
        (tensor_call(FLOATS, shape=(), offset=10), "past the end"),
        (tensor_call(FLOATS, shape=(2**62 + 1,), stride=(0,)), "more bytes than torch"),
        (tensor_call(FLOATS, shape=(2**31, 2**31), stride=(0, 0)), "more bytes than torch"),
        (tensor_call(FLOATS, shape=(2**62, 4, 0), stride=(0, 0, 0)), "more bytes than torch"),
        (tensor_call(FLOATS, shape=(1,), stride=(2**63,)), "no valid integer"),
        (tensor_call(FLOATS, shape=(-1,)), "no valid integer"),
        (tensor_call(FLOATS, shape=(2,), stride=(-1,), offset=5), "no valid integer"),
        (tensor_call(FLOATS, shape=(2,), offset=-1), "no valid integer"),
        (tensor_call(FLOATS, shape=(0,), offset=2**63), "no valid integer"),
        (tensor_call(FLOATS, shape=(True,), stride=(1,)), "no valid integer"),
        (tensor_call(FLOATS, shape=(1.0,), stride=(1,)), "no valid integer"),
        (tensor_call(FLOATS, shape=(2,), offset=False), "no valid integer"),
        (tensor_call(FLOATS, shape=(2,), stride=(1, 1)), "same length"),
        (tensor_call(FLOATS, shape=[2], stride=[1]), "same length"),
        (tensor_call(FLOATS, shape=None, stride=()), "same length"),
        (tensor_call(5), "no view"),
        (tensor_call(FLOATS, shape=65 * (1,)), "more than 64 dimensions"),
        (tensor_call(FLOATS, shape=(1,), requires_grad=1), "requires_grad"),
        (tensor_call(storage("1", 10, kind="IntStorage"), shape=(1,), requires_grad=True), "requires_grad"),
        (tensor_call(FLOATS, shape=(1,), hooks={"a": 1}), "hooks"),
        (tensor_call(FLOATS, shape=(1,), hooks=Raw(b"N")), "hooks"),
        (tensor_call(FLOATS, shape=(1,), extra=({"other": True},)), "unknown metadata"),
        (tensor_call(FLOATS, shape=(1,), extra=(None,)), "unknown metadata"),
        (tensor_call(FLOATS, shape=(1,), extra=({}, {})), "wrong number"),
        (tensor_call(FLOATS, shape=(1,), extra=("float32",), function="_rebuild_tensor_v3"), "no torch.dtype"),
        (
            Call(Global("torch._utils", "_rebuild_parameter"), (5, True, Call(Global("collections", "OrderedDict")))),
            "no tensor",
        ),
        (Call(Global("torch._utils", "_rebuild_tensor_v2"), ()), "wrong number"),
        (tensor_call(Persistent(("storage",))), "persistent id"),
        (tensor_call(Persistent("storage")), "persistent id"),
        (tensor_call(Persistent(("module", Global("torch", "FloatStorage"), "0", "cpu", 1))), "persistent id"),
        (tensor_call(Persistent(("storage", Global("os", "FloatStorage"), "0", "cpu", 1))), "malformed storage"),
        (tensor_call(storage(0, 1)), "malformed storage"),
        (tensor_call(storage(None, 1)), "malformed storage"),
        (tensor_call(storage("0", -1)), "malformed storage"),
        (tensor_call(storage("0", True)), "malformed storage"),
        (tensor_call(storage("0", 1.0)), "malformed storage"),
        (tensor_call(storage("0", 1, location="bogus:7")), "device"),
        (tensor_call(storage("0", 1, location="cüda")), "device"),
        (tensor_call(storage("0", 1, location=("cpu",))), "device"),
    ],
)
def test_bad_tensors_are_named(tensor: Call, problem: str) -> None:
    with pytest.raises(FormatError, match=problem) as caught:
        load({"layers": [{"weight": tensor_call(FLOATS, shape=(10,))}, {"bad": tensor}], "after": 1})
    assert caught.value.tensor == "layers.1.bad"
    assert caught.value.file == "file"
    assert caught.value.offset is not None
    assert caught.value.offset > 1000


def test_the_largest_view_that_fits() -> None:
    for tensor in (
        tensor_call(FLOATS, shape=(10,)),
        tensor_call(FLOATS, shape=(), offset=9),
        tensor_call(FLOATS, shape=(2, 5), stride=(5, 1)),
        tensor_call(FLOATS, shape=(2**40,), stride=(0,), offset=9),
        tensor_call(FLOATS, shape=(0,), offset=99),
        tensor_call(FLOATS, shape=64 * (1,)),
    ):
        assert isinstance(load({"w": tensor})["w"], Entry)


@pytest.mark.parametrize(
    "second",
    [storage("0", 9), storage("0", 11), storage("0", 10, kind="IntStorage"), storage("0", 5, kind="LongStorage")],
)
def test_one_storage_declared_in_two_ways(second: Persistent) -> None:
    with pytest.raises(FormatError, match="declared twice") as caught:
        load({"a": tensor_call(FLOATS, shape=(1,)), "b": tensor_call(second, shape=(1,))})
    assert caught.value.tensor == "b"


def test_one_empty_storage_of_two_dtypes() -> None:
    found = load(
        [tensor_call(storage("0", 0), shape=(0,)), tensor_call(storage("0", 0, kind="LongStorage"), shape=(0,))]
    )
    assert [(entry.dtype, entry.storage) for entry in found] == [("float32", 0), ("int64", 0)]


@pytest.mark.parametrize("flag", ["conj", "neg"])
def test_conjugated_and_negated_views(flag: str) -> None:
    complex_numbers = storage("0", 10, kind="ComplexFloatStorage")
    assert isinstance(load([tensor_call(complex_numbers, shape=(1,), extra=({flag: False},))])[0], Entry)
    with pytest.raises(UnsupportedError, match="conjugated") as caught:
        load({"w": tensor_call(complex_numbers, shape=(1,), extra=({flag: True},))})
    assert caught.value.tensor == "w"


def test_a_storage_that_no_tensor_views() -> None:
    with pytest.raises(UnsupportedError, match="no tensor views") as caught:
        load({"a": [FLOATS]})
    assert caught.value.tensor == "a.0"


def test_classes_as_values_are_inert_leaves() -> None:
    for name in ("FloatStorage", "QInt8Storage"):
        assert isinstance(load([Global("torch", name)])[0], Opaque)
    assert isinstance(load([Global("collections", "OrderedDict")])[0], Opaque)


def test_rebuilding_inside_rebuilding_does_not_recurse() -> None:
    rebuild = Global("torch._tensor", "_rebuild_from_type_v2")
    nested: object = (rebuild, Global("torch", "Tensor"), (), {})
    for _ in range(20):
        nested = (rebuild, Global("torch", "Tensor"), nested, {})
    with pytest.raises(UnsupportedError, match="a way of its own"):
        load([Call(rebuild, nested if isinstance(nested, tuple) else ())])


def test_a_refused_tensor_that_the_tree_does_not_hold() -> None:
    bad = tensor_call(FLOATS, shape=(99,))
    with pytest.raises(FormatError, match="past the end"):
        load([Call(MISSING, (bad,))])


# The step for whole tensors


def saved(value: object, protocol: int) -> bytes:
    """Return data.pkl as ``torch.save`` writes it."""
    buffer = io.BytesIO()
    torch.save(value, buffer, pickle_protocol=protocol)
    buffer.seek(0)
    data: bytes = torch._C.PyTorchFileReader(buffer).get_record("data.pkl")
    return data


def many_tensors() -> dict[str, object]:
    base = torch.arange(100_000.0)
    return {
        **{f"layer.{number}": torch.ones(1 + number % 5, 2) for number in range(300)},
        "views": [base[10:20], base[::2], base.view(10, 10, 10, 100), base.view(2, 5, 10, 10, 100)],
        "kinds": [torch.zeros(3, dtype=dtype) for dtype in (torch.int64, torch.bool, torch.uint16, torch.bfloat16)],
        "scalar": torch.tensor(5),
        "parameter": torch.nn.Parameter(torch.ones(70_000)),
        "empty": torch.empty(0, 3),
        "leaf": torch.ones(2, requires_grad=True),
    }


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
@pytest.mark.parametrize("optimized", [False, True])
def test_whole_tensors_at_once_are_what_the_opcodes_build(
    monkeypatch: pytest.MonkeyPatch, protocol: int, optimized: bool
) -> None:
    data = saved(many_tensors(), protocol)
    if optimized:  # without what nothing refers to again
        data = pickletools.optimize(data)
    taken: list[int | None] = []

    def counted(run: Unpickler, position: int) -> int | None:
        taken.append(take_tensor(run, position))
        return taken[-1]

    monkeypatch.setattr(_pickle_opcodes, "take_tensor", counted)
    fast = machine(data)
    tree = fast.load()
    assert sum(position is not None for position in taken) > 250
    monkeypatch.setattr(_pickle_opcodes, "take_tensor", lambda *_: None)
    slow = machine(data)
    assert slow.load() == tree
    assert fast.end == slow.end
    assert isinstance(fast.allowlist, TorchObjects)
    assert isinstance(slow.allowlist, TorchObjects)
    assert fast.allowlist.storages == slow.allowlist.storages


def one_tensor(after: bytes) -> bytes:
    """Return the pickle of a pair: a tensor as torch.save writes it, then what ``after`` pushes.

    The memo holds OrderedDict at 0, the function at 1, "storage" at 2, the class at 3, the location at 4, then the key,
    the persistent id, size, stride, hooks and arguments of the tensor at 5 to 10.
    """
    before = (
        *(Global("collections", "OrderedDict"), Global("torch._utils", "_rebuild_tensor_v2"), "storage"),
        *(Global("torch", "FloatStorage"), "cpu"),
    )
    stored = b"".join(encode(value) + b"q%c" % number for number, value in enumerate(before))
    tensor = (
        b"h\x01((h\x02h\x03" + encode("7") + b"q\x05h\x04K\x06tq\x06QK\x00K\x02K\x03\x86q\x07K\x03K\x01\x86q\x08"
        b"\x89h\x00)Rq\x09tq\x0aR"
    )
    return body(b"(" + stored + b"(" + tensor + after + b"tt")


@pytest.mark.parametrize(
    ("after", "expected"),
    [
        (b"h\x05", "7"),
        (b"h\x07", (2, 3)),
        (b"h\x08", (3, 1)),
        (b"h\x09", OrderedDict()),
        (b"h\x09" + encode("k") + b"Ns", OrderedDict(k=None)),
    ],
)
def test_the_memo_of_a_whole_tensor(monkeypatch: pytest.MonkeyPatch, after: bytes, expected: object) -> None:
    entry = Entry(dtype="float32", shape=(2, 3), stride=(3, 1), storage=0)
    for _ in range(2):
        assert load(one_tensor(after))[-1] == (entry, expected)
        monkeypatch.setattr(_pickle_opcodes, "take_tensor", lambda *_: None)


def test_a_second_tensor_with_the_persistent_id_and_hooks_of_the_first() -> None:
    again = b"h\x01(h\x06QK\x05)" + b")\x89h\x09tR"
    first, second = load(one_tensor(again))[-1]
    assert second == Entry(dtype="float32", shape=(), stride=(), storage=first.storage, storage_offset=5)


def test_consumed_arguments_cannot_be_fetched() -> None:
    with pytest.raises(FormatError, match="arguments of a finished call"):
        load(one_tensor(b"h\x0a"))


@pytest.mark.parametrize(
    ("found", "changed"),
    [
        (b"K\x06t", b"K\x05t"),  # a view past the end
        (b"K\x02K\x03", b"J\xff\xff\xff\xffK\x03"),  # a negative size
        (b"K\x00K\x02", b"J\xff\xff\xff\xffK\x02"),  # a negative offset
        (b"X\x01\x00\x00\x007", b"X\x02\x00\x00\x0077"),
        (b"X\x01\x00\x00\x007", b"X\x02\x00\x00\x007"),  # text of another length
        (b"q\x07", b"q\x09"),
        (b"h\x04", b"h\x02"),  # another location
        (b"h\x00)", b"h\x01)"),  # hooks that are no OrderedDict
        (b"h\x03", b"h\x63"),
    ],
)
def test_changed_tensors_end_alike_in_both_ways(monkeypatch: pytest.MonkeyPatch, found: bytes, changed: bytes) -> None:
    data = one_tensor(b"N")
    assert found in data
    ends: list[object] = []
    for _ in range(2):
        try:
            ends.append(load(data.replace(found, changed))[-1])
        except SluiceError as error:
            ends.append((type(error), error.problem, error.tensor))
        monkeypatch.setattr(_pickle_opcodes, "take_tensor", lambda *_: None)
    assert ends[0] == ends[1]
