"""Checkpoints of every format, each with its tensors as torch loads them."""

from __future__ import annotations

import hashlib
import shutil
import struct
import tarfile
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import torch

import sluice
from sluice.formats.manifest import TensorHash
from support import directories, distributed, gguf_files, oracles, zero_files
from support.torch_files import saved_big_endian

Tensors = dict[str, torch.Tensor]


def plain_tensors() -> Tensors:
    generator = torch.Generator().manual_seed(1)
    return {
        "a.w": torch.randn(40, 12, generator=generator),
        "a.b": torch.randn(33, generator=generator).to(torch.bfloat16),
        "ints": torch.arange(9).reshape(3, 3),
        "half": torch.randn(5, 7, generator=generator).to(torch.float16),
        "scalar": torch.tensor(2.5),
        "empty": torch.empty(0, 3),
        "flags": torch.tensor([True, False, True]),
        "e4m3": torch.randn(6, generator=generator).to(torch.float8_e4m3fn),
    }


def views() -> Tensors:
    """Return tensors that only torch.save stores unchanged."""
    base = torch.randn(20, 30, generator=torch.Generator().manual_seed(2))
    numbers = torch.randn(11, dtype=torch.complex64, generator=torch.Generator().manual_seed(3))
    return {
        "base": base,
        "tied": base,
        "rows": base[3:9],
        "transposed": base.t(),
        "strided": base[::3, 1:20:4],
        "expanded": base[:1].expand(5, 30),
        "conjugate": numbers.conj(),
        "negative": numbers.clone().conj().imag,
    }


def composites() -> Tensors:
    matrix = torch.tensor([[0.0, 1.5, 0.0], [2.5, 0.0, 3.5], [0.0, 0.0, 4.5], [0.0, 5.5, 0.0]])
    sparse = matrix.to_sparse()
    return {
        "coo": sparse,
        "hollow": torch.zeros(3, 4).to_sparse(),
        "no dimensions": torch.tensor(3.0).to_sparse(),
        "empty rows": torch.zeros(0, 4).to_sparse_csr(),
        "csr": matrix.to_sparse_csr(),
        "bsc": matrix.to_sparse_bsc((2, 1)),
        "tensorwise": torch.quantize_per_tensor(matrix, 0.25, 3, torch.qint8),
        "channelwise": torch.quantize_per_channel(
            matrix, torch.tensor([0.1, 0.2, 0.3, 0.4]), torch.tensor([0, 1, 2, 3]), 0, torch.quint8
        ),
    }


def _maker(tensors: Callable[[], Tensors], write: Callable[[Tensors, Path], object]) -> Callable[[Path], Tensors]:
    """Return a function that writes a checkpoint of tensors, and returns them."""

    def make(path: Path) -> Tensors:
        write(tensors(), path)
        return tensors()

    return make


def _everything() -> Tensors:
    return plain_tensors() | views()


def _older(tensors: Tensors) -> Tensors:
    """Return the tensors of dtypes that formats of old torch hold."""
    return {name: one for name, one in tensors.items() if name != "e4m3"}


def _nested(path: Path) -> Tensors:
    tensors = plain_tensors()
    torch.save({"model": tensors, "epoch": 3, "more": [tensors["ints"]]}, path)
    return {**{f"model.{name}": one for name, one in tensors.items()}, "more.0": tensors["ints"]}


def _big_endian(path: Path) -> Tensors:
    path.write_bytes(saved_big_endian(_older(plain_tensors())))
    return dict(torch.load(path, weights_only=True))


def _distributed(path: Path) -> Tensors:
    tensors = {name: one for name, one in plain_tensors().items() if name not in {"scalar", "empty"}}
    stored = {name: distributed.rows(one, 1) for name, one in tensors.items()}
    stored["a.w"] = distributed.rows(tensors["a.w"], 4, files=2)
    distributed.write(path, stored, {"epoch": 3})
    return tensors


def _gguf(path: Path) -> Tensors:
    """Write plain tensors, and packs in rows that no piece of a file divides."""
    plain_ones = {"half": torch.linspace(0, 1, 77).half().view(7, 11), "counts": torch.arange(33)}
    packed = {f"blk.{kind}": gguf_files.packed((37, 96), kind) for kind in ("Q8_0", "Q4_0")}
    stored = {name: gguf_files.plain(tensor) for name, tensor in plain_ones.items()}
    gguf_files.write(path, stored | {name: tensor for name, (tensor, _) in packed.items()})
    return plain_ones | {name: elements for name, (_, elements) in packed.items()}


def _ranks(path: Path) -> Tensors:
    tensors = plain_tensors()
    parts = [dict(list(tensors.items())[rank::2]) for rank in range(2)]
    for rank, part in enumerate(parts):
        (path / f"mp_rank_0{rank}").mkdir(parents=True)
        torch.save({"model": part, "iteration": 3}, path / f"mp_rank_0{rank}" / "model_optim_rng.pt")
    return {f"mp_rank_0{rank}.{name}": one for rank, part in enumerate(parts) for name, one in part.items()}


def _tar(path: Path) -> Tensors:
    inner = path.with_name(f"{path.name}.unpacked")
    sluice.save(plain_tensors(), inner, max_shard_size=1000)
    with tarfile.open(path, "w") as archive:
        archive.add(inner, ".")
    shutil.rmtree(inner)
    return plain_tensors()


def _zero(path: Path) -> Tensors:
    training = zero_files.example()
    zero_files.write_zero(path, training, stage=3, world=3)
    return training.weights


MAKERS: Mapping[str, Callable[[Path], Tensors]] = {
    "torch-zip": _maker(_everything, torch.save),
    "torch-legacy": _maker(lambda: _older(_everything()), partial(torch.save, _use_new_zipfile_serialization=False)),
    "nested": _nested,
    "composites": _maker(composites, torch.save),
    "big-endian": _big_endian,
    "safetensors": _maker(plain_tensors, partial(sluice.save, format="safetensors")),
    "shards": _maker(plain_tensors, partial(sluice.save, max_shard_size=1000)),
    "parameters": _maker(plain_tensors, lambda tensors, path: directories.write_parameters(path, tensors)),
    "distributed": _distributed,
    "gguf": _gguf,
    "ranks": _ranks,
    "tar": _tar,
    "zero": _zero,
}


def files_of(path: Path) -> list[Path]:
    """Return the files of a checkpoint that hold data."""
    if path.is_file():
        return [path]
    return [one for one in path.rglob("*") if one.is_file() and one.suffix != ".json" and one.name[0] != "."]


def hashed(tensor: torch.Tensor) -> TensorHash:
    """Return the expected manifest entry of a tensor."""
    dense, _ = oracles.parts(tensor)
    content = b"".join(oracles.bits(one) for one in dense)
    if tensor.is_quantized and tensor.qscheme() is torch.per_tensor_affine:
        content += struct.pack("<dd", tensor.q_scale(), tensor.q_zero_point())
    layout = "quantized" if tensor.is_quantized else str(tensor.layout).removeprefix("torch.")
    return TensorHash(
        dtype=str(tensor.dtype).removeprefix("torch."),
        shape=tuple(tensor.shape),
        layout=layout,
        hash=hashlib.sha256(content).hexdigest(),
    )
