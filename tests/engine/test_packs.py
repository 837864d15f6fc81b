"""Decoders of packs, against the reference implementation in the package gguf."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from sluice.engine.elementwise import cast
from sluice.engine.packs import DECODERS, decode_packs
from sluice.formats.gguf.types import TYPES
from sluice.records import Packing

SIZES = {each.name: (each.elements, each.nbytes) for each in TYPES.values()}


@pytest.fixture(scope="module")
def gguf() -> Any:
    return pytest.importorskip("gguf", reason="needs the reference: pip install gguf")


@pytest.mark.parametrize("name", DECODERS)
def test_bits_of_the_reference(gguf: Any, name: str) -> None:
    packs = np.random.default_rng(0).integers(0, 256, (3000, SIZES[name][1]), dtype=np.uint8)
    with np.errstate(all="ignore"):
        expected = gguf.quants.dequantize(packs, gguf.GGMLQuantizationType[name])
    found = DECODERS[name](torch.from_numpy(packs))
    assert found.dtype == torch.float32
    same = found.numpy().view(np.uint32) == expected.view(np.uint32)
    assert (same | (np.isnan(found.numpy()) & np.isnan(expected))).all()
    assert same.mean() > 0.7  # the others are sums of NaN, whose bits depend on the order of the operands


@pytest.mark.parametrize("name", DECODERS)
def test_pieces_and_parts_of_packs(name: str) -> None:
    elements, nbytes = SIZES[name]
    generator = np.random.default_rng(1)
    raw = torch.from_numpy(generator.integers(0, 60, nbytes * 700 + 1, dtype=np.uint8))[1:]  # any address
    packs = raw.view(7, 100, nbytes)
    whole = DECODERS[name](raw.view(700, nbytes)).view(7, 100, elements)
    packing = Packing(name=name, elements=elements, nbytes=nbytes, first=3, taken=elements - 5)
    target = torch.empty(elements - 5, 7, 100, dtype=torch.bfloat16).permute(1, 2, 0)
    decode_packs(target, packs, packing, cast)
    assert torch.equal(target, whole[:, :, 3 : elements - 2].bfloat16())
