"""Building a tensor in one step has the same result as its opcodes."""

from __future__ import annotations

import io
import pickletools
from collections import OrderedDict
from operator import length_hint

import pytest
import torch

from sluice._errors import FormatError, SluiceError
from sluice.formats.pickles import opcodes as _pickle_opcodes
from sluice.formats.pickles.tensor_opcodes import take_tensor
from sluice.formats.pickles.unpickler import Unpickler
from sluice.formats.torch_save.allowlist import TorchAllowlist
from sluice.records import Entry, elements_of
from support import torch_files
from support.hostile_archives import Global, encode
from support.pickles import LIMITS, body, load, machine


def saved(value: object, protocol: int) -> bytes:
    """Return data.pkl as ``torch.save`` writes it."""
    data: bytes = torch._C.PyTorchFileReader(io.BytesIO(torch_files.saved(value, protocol))).get_record("data.pkl")
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
    if optimized:  # without values that are not referred to again
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
    assert isinstance(fast.allowlist, TorchAllowlist)
    assert isinstance(slow.allowlist, TorchAllowlist)
    assert fast.allowlist.storages == slow.allowlist.storages
    # The bound of the memo: what ran, so that a gap after tensors that were taken at once is accepted too.
    ran_fast, ran_slow = (LIMITS.nodes - length_hint(run.steps) + run.untaken for run in (fast, slow))
    assert ran_slow <= 1.1 * ran_fast <= 1.4 * ran_slow  # optimized sequences are shorter


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
    entry = Entry(elements=elements_of("float32"), shape=(2, 3), stride=(3, 1), storage=0)
    for _ in range(2):
        assert load(one_tensor(after))[-1] == (entry, expected)
        monkeypatch.setattr(_pickle_opcodes, "take_tensor", lambda *_: None)


def test_a_second_tensor_with_the_persistent_id_and_hooks_of_the_first() -> None:
    again = b"h\x01(h\x06QK\x05)" + b")\x89h\x09tR"
    first, second = load(one_tensor(again))[-1]
    assert second == Entry(
        elements=elements_of("float32"), shape=(), stride=(), storage=first.storage, storage_offset=5
    )


def test_consumed_arguments_cannot_be_fetched() -> None:
    with pytest.raises(FormatError, match="arguments of a completed call"):
        load(one_tensor(b"h\x0a"))


@pytest.mark.parametrize(
    ("found", "changed"),
    [
        (b"K\x06t", b"K\x05t"),  # a view past the end
        (b"K\x02K\x03", b"J\xff\xff\xff\xffK\x03"),  # a negative size
        (b"K\x00K\x02", b"J\xff\xff\xff\xffK\x02"),  # a negative offset
        (b"X\x01\x00\x00\x007", b"X\x02\x00\x00\x0077"),
        (b"X\x01\x00\x00\x007", b"X\x02\x00\x00\x007"),  # text of a different length
        (b"q\x07", b"q\x09"),
        (b"h\x04", b"h\x02"),  # a different location
        (b"h\x00)", b"h\x01)"),  # hooks that are not an OrderedDict
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
