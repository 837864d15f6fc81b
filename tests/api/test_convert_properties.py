"""Round trips of random objects through every form."""

from __future__ import annotations

import io
import os
import tempfile
from collections import OrderedDict
from pathlib import Path
from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import sluice
from support.oracles import same

#: A directory in memory, if the system has one: on a disk each file would wait for its sync.
_MEMORY = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None

_DTYPES = [torch.float32, torch.bfloat16, torch.float64, torch.int16, torch.uint8, torch.bool, torch.complex64]


@st.composite
def tensors(draw: st.DrawFn) -> torch.Tensor:
    """A view of a storage: any dtype, order of dimensions, step and start."""
    shape = draw(st.lists(st.integers(0, 5), max_size=3))
    dtype = draw(st.sampled_from(_DTYPES))
    base = torch.randint(0, 2, shape or [1]).to(dtype)
    base = base if shape else base[0]
    if base.dim() and draw(st.booleans()):
        base = base.permute(draw(st.permutations(range(base.dim()))))
    if base.dim() and base.shape[0] > 1 and draw(st.booleans()):
        base = base[draw(st.integers(0, 1)) :: draw(st.integers(1, 2))]
    if base.dim() and draw(st.booleans()):
        base = base[None].expand(draw(st.integers(1, 3)), *base.shape)
    if dtype.is_floating_point and draw(st.booleans()):
        return torch.nn.Parameter(base, requires_grad=draw(st.booleans()))
    return base.conj() if dtype.is_complex and draw(st.booleans()) else base


#: Without empty bytes objects: their pickle calls ``bytes``, which torch refuses.
_PLAIN = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**70), 2**70),
    st.floats(),
    st.text(max_size=5),
    st.binary(min_size=1, max_size=5),
)


def trees() -> st.SearchStrategy[Any]:
    keys = st.one_of(st.text(max_size=4), st.integers(-3, 3))
    return st.recursive(
        st.one_of(tensors(), _PLAIN),
        lambda inner: st.one_of(
            st.lists(inner, max_size=3),
            st.tuples(inner, inner),
            st.dictionaries(keys, inner, max_size=3),
            st.dictionaries(keys, inner, max_size=3).map(OrderedDict),
        ),
        max_leaves=8,
    )


@settings(max_examples=50, deadline=None)
@given(trees(), st.sampled_from([True, False]))
def test_a_torch_file_holds_the_same_object(tree: object, zipped: bool) -> None:
    content = io.BytesIO()
    torch.save(tree, content, _use_new_zipfile_serialization=zipped)
    content.seek(0)
    with tempfile.TemporaryDirectory(dir=_MEMORY) as directory:
        path = Path(directory) / "out.pt"
        sluice.convert(content, path)
        content.seek(0)
        expected = torch.load(content, weights_only=True)
        assert same(torch.load(path, weights_only=True), expected)
        assert same(torch.load(path, weights_only=True, mmap=True), expected)
