"""Decoders of packs, against the reference implementation in the package gguf."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from sluice.engine.packs import DECODERS, compute, decode_packs
from sluice.formats.gguf.header import TYPES
from sluice.records import Packing
from support import fresh_process
from support.oracles import bits

BY_PACKAGE = [each.name for each in TYPES.values() if each.package]
SIZES = {each.name: (each.elements, each.nbytes) for each in TYPES.values()}


@pytest.fixture(scope="module")
def gguf() -> Any:
    return pytest.importorskip("gguf", reason="needs the reference: pip install gguf")


@pytest.mark.parametrize("name", DECODERS)
def test_bits_of_the_reference(gguf: Any, name: str) -> None:
    packs = np.random.default_rng(0).integers(0, 256, (3000, SIZES[name][1]), dtype=np.uint8)
    with np.errstate(all="ignore"):
        expected = gguf.quants.dequantize(packs, gguf.GGMLQuantizationType[name])
    found = torch.empty(len(packs), SIZES[name][0])
    DECODERS[name](torch.from_numpy(packs), found)
    same = found.numpy().view(np.uint32) == expected.view(np.uint32)
    assert (same | (np.isnan(found.numpy()) & np.isnan(expected))).all()
    assert same.mean() > 0.7  # the others are sums of NaN, whose bits depend on the order of the operands


@pytest.mark.parametrize("name", [*DECODERS, *BY_PACKAGE])
def test_pieces_in_another_order(gguf: Any, name: str) -> None:
    elements, nbytes = SIZES[name]
    generator = np.random.default_rng(1)
    raw = torch.from_numpy(generator.integers(0, 60, nbytes * 700 + 1, dtype=np.uint8))[1:]  # any address
    packs = raw.view(7, 100, nbytes)
    reference = gguf.quants.dequantize(raw.numpy().reshape(700, nbytes), gguf.GGMLQuantizationType[name])
    whole = torch.from_numpy(reference).view(7, 100, elements)
    packing = Packing(name=name, elements=elements, nbytes=nbytes)
    target = torch.empty(elements, 7, 100, dtype=torch.bfloat16).permute(1, 2, 0)
    with torch.device("meta"):  # the default device of torch
        decode_packs(target, packs, packing)
    assert torch.equal(target, whole.bfloat16())


_GROWTH = """
import threading, torch
from sluice.engine.packs import decode_packs
from sluice.machine.processes import read_memory
from sluice.records import Packing

packing = Packing(name={name!r}, elements={elements}, nbytes={nbytes})
count = (16 << 20) // {elements}
packs, target = torch.zeros(count, {nbytes}, dtype=torch.uint8), torch.zeros(count, {elements})
decode_packs(target[:64], packs[:64], packing)  # what torch allocates for a first call
before = read_memory().anon_bytes
work = threading.Thread(target=decode_packs, args=(target, packs, packing))
work.start()
work.join()
print(read_memory().anon_bytes - before)
"""


@pytest.mark.usefixtures("fresh_processes")
@pytest.mark.parametrize("name", ["Q8_0", "Q4_K"])
def test_little_memory_stays_in_the_heap_of_a_thread(name: str) -> None:
    elements, nbytes = SIZES[name]
    done = fresh_process.run(_GROWTH.format(name=name, elements=elements, nbytes=nbytes))
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 3 << 19


def test_casts_and_arithmetic() -> None:
    rows = torch.randn(4, 5)
    target = torch.empty(4, 5, dtype=torch.bfloat16)
    compute(target, rows)
    assert bits(target) == bits(rows.bfloat16())
    compute(target, rows, (("mul", 0.5), ("add", 3.0)))
    assert bits(target) == bits((rows * 0.5 + 3.0).bfloat16())
