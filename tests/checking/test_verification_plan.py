"""``sluice.verify`` reads every byte once, and twice what is not in the form that its hashes need."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import sluice
from sluice import _defaults as defaults
from support import distributed
from support.sources import record_reads
from support.torch_files import saved_big_endian
from support.whole_checkpoints import Tensors, files_of, hashed

pytestmark = pytest.mark.filterwarnings(
    "ignore:torch.quantize_per", "ignore:Sparse", "ignore:TypedStorage is deprecated"
)


def large() -> Tensors:
    generator = torch.Generator().manual_seed(4)
    base = torch.randn(700, 500, generator=generator)
    return {
        "base": base,
        "transposed": base.t(),
        "strided": base[::2, 3:400],
        "conjugate": torch.view_as_complex(torch.randn(300, 200, 2, generator=generator)).conj(),
        "permuted": torch.randn(20, 30, 40, generator=generator).permute(2, 0, 1),
        "half": torch.randn(300, 400, generator=generator).half(),
    }


def pickled(path: Path) -> Tensors:
    torch.save(large(), path)
    return large()


def big_endian(path: Path) -> Tensors:
    path.write_bytes(saved_big_endian(large() | {"large": torch.arange(200_000)}))
    return dict(torch.load(path, weights_only=True, mmap=False))


def sparse(path: Path) -> Tensors:
    matrix = torch.rand(400, 300, generator=torch.Generator().manual_seed(5))
    matrix = matrix * (matrix > 0.6)
    tensors = {"coo": matrix.to_sparse(), "csr": matrix.to_sparse_csr(), "bsr": matrix.to_sparse_bsr((4, 3))}
    tensors["q"] = torch.quantize_per_channel(matrix, torch.rand(400) + 0.1, torch.arange(400) % 9, 0, torch.quint8)
    torch.save(tensors, path)
    return tensors


def chunks(path: Path) -> Tensors:
    tensors = large() | {"vector": torch.arange(200_000)}
    stored = {name: distributed.rows(one.resolve_conj().contiguous(), 5, files=2) for name, one in tensors.items()}
    distributed.write(path, stored, {"epoch": 3})
    return tensors


#: Names of the tensors whose elements are in order in the file.
IN_ORDER = {"base", "half", "large"}

FORMS = {"torch-zip": pickled, "big-endian": big_endian, "sparse": sparse, "chunks": chunks}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("window", [4096, defaults.SCAN_WINDOW_BYTES])
def test_what_is_in_order_is_read_once(tmp_path: Path, form: str, window: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(defaults, "SCAN_WINDOW_BYTES", window)
    monkeypatch.setattr(defaults, "COALESCE_GAP_BYTES", 0)  # small gaps may be read again to save time
    tensors = FORMS[form](tmp_path / "c")
    with sluice.open(tmp_path / "c") as checkpoint:
        recordings = record_reads(checkpoint)
        report = sluice.verify(checkpoint, hashes="sha256", nan=True)
    assert report.ok, report
    assert report.hashes == {name: hashed(tensor) for name, tensor in tensors.items()}
    whole = sum(path.stat().st_size for path in files_of(tmp_path / "c"))
    if form in {"torch-zip", "big-endian"}:  # what a swap changes is not the bytes of the record
        again = sum(one.nbytes for name, one in tensors.items() if name not in IN_ORDER or form == "big-endian")
        assert report.nbytes == whole + again
    assert whole <= sum(one.read_bytes for one in recordings) <= 3 * whole


def test_without_hashes_every_byte_is_read_once(tmp_path: Path) -> None:
    pickled(tmp_path / "c")
    assert sluice.verify(tmp_path / "c").nbytes == (tmp_path / "c").stat().st_size
