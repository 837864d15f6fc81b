"""Storages and tensors of torch's pickles: their records, and refused arguments."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from sluice._errors import FormatError, LimitError, UnsupportedError
from sluice.formats.torch_save.tree_limits import check_object
from sluice.records import Entry, Opaque, TorchText, UnsupportedValue
from support.hostile_archives import Call, Global, Persistent, Raw, encode, pickled, storage, tensor_call
from support.pickles import LIMITS, MISSING, load, machine

FLOATS, QUANTIZED = storage("0", 10), storage("1", 40, kind="QInt8Storage")
HOOKS = Call(Global("collections", "OrderedDict"))
PLAIN, FROM_TYPE = Global("torch._utils", "_rebuild_tensor_v2"), Global("torch._tensor", "_rebuild_from_type_v2")


@pytest.mark.parametrize(
    ("tensor", "problem"),
    [
        (tensor_call(FLOATS, shape=(11,)), "past the end"),
        (tensor_call(FLOATS, shape=(10,), offset=1), "past the end"),
        (tensor_call(FLOATS, shape=(2, 5), stride=(6, 1)), "past the end"),
        (tensor_call(FLOATS, shape=(), offset=10), "past the end"),
        (tensor_call(FLOATS, shape=(2**62 + 1,), stride=(0,)), "more bytes than torch"),
        (tensor_call(FLOATS, shape=(2**62, 4, 0), stride=(0, 0, 0)), "more bytes than torch"),
        (tensor_call(FLOATS, shape=(1,), stride=(2**63,)), "not a valid integer"),
        (tensor_call(FLOATS, shape=(2,), stride=(-1,), offset=5), "not a valid integer"),
        (tensor_call(FLOATS, shape=(2,), offset=-1), "not a valid integer"),
        (tensor_call(FLOATS, shape=(0,), offset=2**63), "not a valid integer"),
        (tensor_call(FLOATS, shape=(1.0,), stride=(1,)), "not a valid integer"),
        (tensor_call(FLOATS, shape=(2,), offset=False), "not a valid integer"),
        (tensor_call(FLOATS, shape=(2,), stride=(1, 1)), "equal length"),
        (tensor_call(FLOATS, shape=[2], stride=[1]), "equal length"),
        (tensor_call(5), "not a view"),
        (tensor_call(FLOATS, shape=(1,), requires_grad=1), "requires_grad"),
        (tensor_call(storage("1", 10, kind="IntStorage"), shape=(1,), requires_grad=True), "requires_grad"),
        (tensor_call(FLOATS, shape=(1,), extra=({"conj": 1},)), "is not True"),
        (tensor_call(FLOATS, shape=(1,), extra=({"neg": False},)), "is not True"),
        (tensor_call(FLOATS, shape=(1,), extra=({"conj": True},)), "a tensor of float32 is marked as conjugated"),
        (tensor_call(FLOATS, shape=(1,), extra=("float32",), function="_rebuild_tensor_v3"), "not a torch.dtype"),
        (Call(Global("torch._utils", "_rebuild_tensor_v2"), ()), "wrong number"),
        (Call(FROM_TYPE, (PLAIN, Global("torch", "Tensor"), (1, 2), {})), "wrong number of arguments"),
        (Call(Global("torch._utils", "_rebuild_parameter"), (3, True, HOOKS)), "data of a parameter is not a tensor"),
        (tensor_call(Persistent(("storage",))), "persistent id"),
        (tensor_call(Persistent(("module", Global("torch", "FloatStorage"), "0", "cpu", 1))), "persistent id"),
        (tensor_call(storage(0, 1)), "storage is malformed"),
        (tensor_call(storage("0", -1)), "storage is malformed"),
        (tensor_call(storage("0", True)), "storage is malformed"),
        (tensor_call(storage("0", 1.0)), "storage is malformed"),
        (tensor_call(storage("0", 10, location=("cpu",)), shape=(10,)), "device"),
    ],
)
def test_bad_tensors_are_named(tensor: Call, problem: str) -> None:
    with pytest.raises(FormatError, match=problem) as caught:
        load({"layers": [{"weight": tensor_call(FLOATS, shape=(10,))}, {"bad": tensor}], "after": 1})
    assert caught.value.tensor == "layers.1.bad"
    assert caught.value.file == "file"
    assert caught.value.offset is not None
    assert caught.value.offset > 1000


@pytest.mark.parametrize(
    ("tensor", "found"),
    [
        (tensor_call(FLOATS, shape=(1,), hooks={"a": 1}), "torch._utils._rebuild_tensor_v2"),
        (tensor_call(FLOATS, shape=(1,), extra=({"other": True},)), "{'other': True}"),
        (tensor_call(FLOATS, shape=(1,), extra=({}, {})), "torch._utils._rebuild_tensor_v2"),
        (tensor_call(FLOATS, shape=(1,), extra=(Global("torch", "float5"),), function="_rebuild_tensor_v3"), "float5"),
        (tensor_call(Persistent(("storage", Global("torch", "Float5Storage"), "1", "cpu", 1))), "torch.Float5Storage"),
        (Call(Global("torch._utils", "_rebuild_meta_tensor_no_storage"), ()), "_rebuild_meta_tensor_no_storage"),
        (Call(FROM_TYPE, (PLAIN, Global("my", "Sub"), (FLOATS, 0, (1,), (1,), False, HOOKS), {})), "my.Sub"),
    ],
)
def test_what_sluice_does_not_know_is_a_leaf_that_names_it(tensor: Call, found: str) -> None:
    """A newer torch or a vendor may have written it: the other tensors are read."""
    tree = load({"known": tensor_call(FLOATS, shape=(10,)), "unknown": tensor})
    assert isinstance(tree["known"], Entry)
    assert isinstance(tree["unknown"], UnsupportedValue)
    assert found in tree["unknown"].qualified_name


def test_the_device_on_which_a_storage_was_does_not_matter() -> None:
    assert isinstance(load([tensor_call(storage("1", 1, location="bogus:7"))])[0], Entry)


@pytest.mark.parametrize(
    "tensor",
    [
        tensor_call(Persistent(("storage", Global("os", "FloatStorage"), "1", "cpu", 1))),
        Call(Global("torch._utils", "_rebuild_parameter"), (Call(MISSING), True, {})),
    ],
)
def test_a_tensor_made_of_an_unknown_global_is_the_leaf_of_that_global(tensor: Call) -> None:
    leaf = load([tensor])[0]
    assert type(leaf) is Opaque
    assert leaf.qualified_name in {"os.FloatStorage", "sluice_no_such_module.run"}


@pytest.mark.parametrize("how", [{"hooks": Raw(b"N")}, {"extra": (None,)}, {"extra": ({},)}])
def test_hooks_and_metadata_of_none(how: Any) -> None:
    """torch 0.4 wrote None in place of no hooks."""
    assert load(tensor_call(FLOATS, shape=(10,), **how)) == load(tensor_call(FLOATS, shape=(10,)))


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
    [storage("0", 9), storage("0", 11), storage("0", 0), storage("0", 10, kind="IntStorage")],
)
def test_one_storage_declared_in_two_ways(second: Persistent) -> None:
    with pytest.raises(FormatError, match="declared twice") as caught:
        load({"a": tensor_call(FLOATS, shape=(1,)), "b": tensor_call(second, shape=(1,))})
    assert caught.value.tensor == "b"


@pytest.mark.parametrize(
    ("state", "problem"),
    [
        ([], "are not text"),
        (5, "are not text"),
        ({1: 2}, "are not text"),
        (({}, {}, {}), "wrong length"),
        (({}, {b"x": 2}), "are not text"),
    ],
)
def test_attributes_that_are_none(state: object, problem: str) -> None:
    tensor = tensor_call(FLOATS, shape=(10,))
    parameter = Call(Global("torch._utils", "_rebuild_parameter_with_state"), (tensor, True, HOOKS, state))
    inner = (FLOATS, 0, (10,), (1,), False, HOOKS)
    typed = Call(FROM_TYPE, (PLAIN, Global("torch", "Tensor"), inner, state))
    for value in (parameter, typed):
        with pytest.raises(FormatError, match=problem) as caught:
            load({"w": value})
        assert caught.value.tensor == "w"


def test_attributes() -> None:
    function, inner = Global("torch.tensor", "_rebuild_from_type_v2"), (FLOATS, 0, (10,), (1,), False, HOOKS)
    states = [({"a": 1}, {"b": 2}), (None, {"b": 2}), ({}, None), {}]
    found = load([Call(function, (PLAIN, Global("torch", "Tensor"), inner, state)) for state in states])
    assert [entry.attributes for entry in found] == [{"a": 1, "b": 2}, {"b": 2}, None, None]


@pytest.mark.parametrize("nested", [lambda o: o, lambda o: [1, (o, 2)], lambda o: {"x": {o: 1}}, lambda _: QUANTIZED])
def test_attributes_with_objects_that_are_not_built_are_dropped(nested: Callable[[object], object]) -> None:
    shared = Raw(encode({"held": [nested(MISSING)], "kept": [1]}) + b"q\x09")
    rebuilt = tensor_call(FLOATS, shape=(10,)).arguments
    tensors = [Call(FROM_TYPE, (PLAIN, Global("torch", "Tensor"), rebuilt, state)) for state in (shared, Raw(b"h\x09"))]
    run = machine(pickled({"w": tensors[0], "inner": [tensors[1]]}))
    tree: Any
    tree, notes = check_object(run.load(), run, LIMITS, "file")
    assert [tree["w"].attributes, tree["inner"][0].attributes] == [{"kept": [1]}] * 2
    assert notes[-1] == "2 Python attributes of tensors are not kept."


def test_what_a_wrapper_keeps_of_its_attributes() -> None:
    """Later opcodes may fill a list, also with itself; and many wrappers may have one dict."""
    arguments, cycle = (FLOATS, 0, (10,), (1,), False, HOOKS), Raw(b"]q\x01h\x01a")
    tensor = Call(FROM_TYPE, (PLAIN, Global("torch", "Tensor"), arguments, {"x": cycle}))
    state = {"data": tensor, "block": [1, 2], "dtype": Global("torch", "int8"), "own": MISSING, "loop": cycle}
    inner = load([Call(FROM_TYPE, (MISSING, MISSING, (), state))])[0].inner
    assert inner.pop("data").attributes is None
    assert {name: str(value) for name, value in inner.items()} == {
        "block": "(1, 2)",
        "dtype": "torch.int8",
        "own": "<not loaded: sluice_no_such_module.run>",
        "loop": "<not loaded: list>",
    }
    wrapper = encode(FROM_TYPE) + b"(" + encode(MISSING) * 2 + b")h\x09tR"
    shared = encode(dict.fromkeys(map(str, range(1000)))) + b"q\x09"
    with pytest.raises(LimitError, match="copy more"):
        load(Raw(b"(" + shared + wrapper * 1000 + b"t"))


def test_attributes_nest_no_deeper_than_the_limit() -> None:
    tensor: object = tensor_call(FLOATS, shape=(10,))
    for _ in range(100):
        tensor = Call(
            Global("torch._utils", "_rebuild_parameter_with_state"),
            (tensor_call(FLOATS, shape=(10,)), True, HOOKS, {"next": tensor}),
        )
    with pytest.raises(LimitError, match="'depth'"):
        load({"w": tensor})


def test_a_bad_attribute_is_named() -> None:
    bad = tensor_call(FLOATS, shape=(11,))
    state = {"main": [bad]}
    parameter = (tensor_call(FLOATS, shape=(10,)), True, HOOKS, state)
    with pytest.raises(FormatError, match="past the end") as caught:
        load({"w": Call(Global("torch._utils", "_rebuild_parameter_with_state"), parameter)})
    assert caught.value.tensor == "w.main.0"


def test_a_storage_that_no_tensor_views() -> None:
    shared = Raw(encode((1, [(FLOATS,)])) + b"q\0")
    tree = load({"a": [FLOATS, tensor_call(FLOATS, shape=(10,))], "b": FLOATS, "c": shared, "d": (Raw(b"h\0"), FLOATS)})
    for leaf in (tree["a"][0], tree["b"], tree["c"][1][0][0], tree["d"][1]):
        assert leaf is tree["b"]
        assert (leaf.bare, leaf.dtype, leaf.shape, leaf.stride) == (True, "float32", (10,), (1,))
    assert isinstance(tree["a"][1], Entry)
    assert not tree["a"][1].bare
    assert tree["c"][0] == 1
    assert tree["d"][0][1] is tree["c"][1]
    assert load((FLOATS, 2))[0].bare
    assert load(FLOATS).bare
    assert isinstance(load({"q": QUANTIZED})["q"], UnsupportedValue)
    with pytest.raises(UnsupportedError, match="not viewed by a tensor"):  # the file has no other content
        load(QUANTIZED)


def test_storages_among_attributes_and_versions() -> None:
    rebuilt = tensor_call(FLOATS, shape=(10,)).arguments
    state = {"own": (FLOATS, 1), "other": FLOATS}
    tensor = Call(FROM_TYPE, (PLAIN, Global("torch", "Tensor"), rebuilt, state))
    versions = Raw(encode(Call(Global("collections", "OrderedDict"))) + encode({"_metadata": (FLOATS,)}) + b"b")
    tree = load({"w": tensor, "v": versions})
    attributes = tree["w"].attributes
    for leaf in (attributes["own"][0], attributes["other"], tree["v"]._metadata[0]):
        assert leaf.bare
    assert attributes["own"][1] == 1


def test_classes_as_values_are_inert_leaves() -> None:
    for name in ("FloatStorage", "QInt8Storage"):
        assert isinstance(load([Global("torch", name)])[0], Opaque)
    assert isinstance(load([Global("collections", "OrderedDict")])[0], Opaque)


@pytest.mark.parametrize("name", ["bcomplex32", "float6_e3m2fn", "uint128", "bits3x5"])
def test_a_dtype_of_a_later_torch_is_unsupported_and_not_unsafe(name: str) -> None:
    dtype = Global("torch", name)
    tensor = tensor_call(FLOATS, shape=(2,), extra=(dtype,), function="_rebuild_tensor_v3")
    tree = load({"w": tensor, "known": tensor_call(FLOATS, shape=(3,)), "dtype": dtype})
    assert tree["dtype"] == TorchText(f"torch.{name}")
    assert type(tree["dtype"]) is TorchText
    assert tree["known"].shape == (3,)
    assert type(tree["w"]) is UnsupportedValue
    assert "a dtype that sluice does not read; torch.load may" in tree["w"].reason
    assert tree["w"].qualified_name == f"torch.{name}"


@pytest.mark.parametrize(("module", "name"), [("torch", "interpolate"), ("torch", "print3"), ("numpy", "float32")])
def test_other_names_are_not_dtypes(module: str, name: str) -> None:
    assert load([Global(module, name)]) == [Opaque(qualified_name=f"{module}.{name}")]


def test_rebuilding_inside_rebuilding_does_not_recurse() -> None:
    nested: tuple[object, ...] = (FROM_TYPE, Global("torch", "Tensor"), (), {})
    for _ in range(20):
        nested = (FROM_TYPE, Global("torch", "Tensor"), nested, {})
    leaf = load([Call(FROM_TYPE, nested)])[0]
    assert "a custom rebuild function" in repr(leaf)


def test_a_refused_tensor_that_the_tree_does_not_hold() -> None:
    bad = tensor_call(FLOATS, shape=(99,))
    with pytest.raises(FormatError, match="past the end"):
        load([Call(MISSING, (bad,))])


@pytest.mark.parametrize("value", ["doubled", "deep"])
def test_an_unknown_value_is_shown_in_bounded_time(value: str) -> None:
    """Its text would have 2**60 characters, or be deeper than Python's stack."""
    body = b"](K\1K\1e"
    for index in range(60):
        body = b"](" + body + b"q%ch%ce" % (index, index)
    unknown = Raw(body) if value == "doubled" else Raw(b"]" * 20_000 + b"a" * 19_999)
    made = tensor_call(FLOATS, shape=(10,))
    tree = load({"w": Call(made.function, (*made.arguments, unknown))})
    assert isinstance(tree["w"], UnsupportedValue)
