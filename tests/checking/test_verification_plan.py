"""``sluice.verify`` reads every byte once, in the order that its hashes need."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import sluice
from sluice import _defaults as defaults
from sluice.testing import record_reads
from support import distributed
from support.torch_files import saved_big_endian
from support.whole_checkpoints import MAKERS, Tensors, files_of, hashed

pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.quantize_per"),
    pytest.mark.filterwarnings("ignore:Sparse"),
    pytest.mark.filterwarnings("ignore:TypedStorage is deprecated"),
]


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


FORMS = {"torch-zip": pickled, "big-endian": big_endian, "sparse": sparse, "chunks": chunks}


def header_bytes(path: Path) -> int:
    """Return the reads that locate the records of an open checkpoint."""
    with sluice.open(path) as checkpoint:
        recordings = record_reads(checkpoint)
        checkpoint.checksums()
        checkpoint.locate(range(len(checkpoint.index.storages)))
    return sum(one.read_bytes for one in recordings)


@pytest.mark.parametrize(
    "form", [*FORMS.values(), *MAKERS.values()], ids=[*FORMS, *(f"small {name}" for name in MAKERS)]
)
@pytest.mark.parametrize("window", [4096, defaults.SCAN_WINDOW_BYTES])
def test_everything_is_read_once(tmp_path: Path, form: object, window: int, monkeypatch: pytest.MonkeyPatch) -> None:
    assert callable(form)
    monkeypatch.setattr(defaults, "SCAN_WINDOW_BYTES", window)
    monkeypatch.setattr(defaults, "COALESCE_GAP_BYTES", 0)  # small gaps may be read again to save time
    tensors = form(tmp_path / "c")
    headers = header_bytes(tmp_path / "c")
    with sluice.open(tmp_path / "c") as checkpoint:
        recordings = record_reads(checkpoint)
        report = sluice.verify(checkpoint, hashes="sha256", nan=True)
    assert report.ok, report
    assert report.hashes == {name: hashed(tensor) for name, tensor in tensors.items()}
    whole = sum(path.stat().st_size for path in files_of(tmp_path / "c"))
    assert report.nbytes == whole
    # The end of the last record of an archive is checked with up to 24 bytes after its data.
    assert whole <= sum(one.read_bytes for one in recordings) <= whole + headers + 24


def test_what_is_too_large_to_be_held_is_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(defaults, "SCAN_GATHERED_BYTES", 50_000)
    tensors = pickled(tmp_path / "c")
    report = sluice.verify(tmp_path / "c", hashes="sha256")
    assert report.hashes == {name: hashed(tensor) for name, tensor in tensors.items()}
    again = sum(one.nbytes for name, one in tensors.items() if name not in {"base", "half"})
    assert report.nbytes == (tmp_path / "c").stat().st_size + again


def test_two_tensors_that_want_the_same_bytes_in_two_orders(tmp_path: Path) -> None:
    """The indices of each are the values of the other: hashes need indices first, so one range is read twice."""
    a, b = torch.arange(3), torch.tensor([4, 0, 2])
    tensors = {"ab": torch.sparse_coo_tensor(a[None], b, (9,)), "ba": torch.sparse_coo_tensor(b[None], a, (9,))}
    torch.save(tensors, tmp_path / "c")
    with sluice.open(tmp_path / "c") as checkpoint:
        assert len(checkpoint.index.storages) == 2
    report = sluice.verify(tmp_path / "c", hashes="sha256")
    assert report.ok
    assert report.hashes == {name: hashed(tensor) for name, tensor in tensors.items()}
    assert report.nbytes == (tmp_path / "c").stat().st_size + 2 * a.nbytes
