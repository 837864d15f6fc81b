"""Checkpoints for the cases of the memory contract, in every format."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import safetensors.torch
import torch
from torch import nn

import sluice
from support import gguf_files
from support.directories import save_sharded
from support.distributed import chunks, rows, write

MIB = 1 << 20

Shapes = tuple[tuple[int, ...], ...]

#: 48 MiB: one tensor larger than everything that the contract allows besides it, middle-sized ones, and small ones.
SHAPES: Shapes = ((9216, 1024), *[(512, 1024)] * 5, *[(300, 1024)] * 1, *[(64,)] * 40)

#: 68 MiB in tensors of one size, which is enough that files are read directly if they are cold.
EVEN: Shapes = ((4352, 256),) * 16

#: 256 MiB, several times what a conversion may take; each tensor is larger than the half of staging that holds several.
LARGE: Shapes = ((2048, 2048),) * 16

#: Small tensors; many of them.
MANY: Shapes = ((64,),) * 10_000
MOST: Shapes = ((16,),) * 100_000


def filled(shapes: Shapes, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    return {str(number): torch.full(shape, number % 7, dtype=dtype) for number, shape in enumerate(shapes)}


def _torch(shapes: Shapes) -> Callable[[Path], None]:
    return lambda path: torch.save(filled(shapes), path)


def _legacy(shapes: Shapes) -> Callable[[Path], None]:
    return lambda path: torch.save(filled(shapes), path, _use_new_zipfile_serialization=False)


def _unaligned_legacy(shapes: Shapes) -> Callable[[Path], None]:
    """Return a writer of a file with storages at odd addresses, which is where the length of the pickles puts them."""

    def save(path: Path) -> None:
        for letters in range(1, 9):
            state = {**filled(shapes), "x" * letters: torch.ones(0)}
            torch.save(state, path, _use_new_zipfile_serialization=False)
            with sluice.open(path) as checkpoint:
                if all(offset % 2 for offset in checkpoint.locate(range(len(shapes))).values()):
                    return
        raise AssertionError("no length of a name puts the storages at odd addresses")

    return save


def _views(path: Path) -> None:
    whole = torch.ones(9216, 2048)
    torch.save({"turned": whole[:, :1024].t(), "gaps": whole[::2, 1::2], "rows": whole[9000:]}, path)


def _safetensors(path: Path) -> None:
    safetensors.torch.save_file(filled(SHAPES), path)


def _unaligned_safetensors(path: Path) -> None:
    """Write a file whose elements are at odd addresses, as writers did that did not pad the header."""
    safetensors.torch.save_file(filled(SHAPES), path)
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    path.write_bytes((length + 1).to_bytes(8, "little") + data[8 : 8 + length] + b" " + data[8 + length :])


def _shards(path: Path) -> None:
    path.mkdir()
    names = [f"model-{number:05}-of-00003.safetensors" for number in (1, 2, 3)]
    split: dict[str, dict[str, torch.Tensor]] = {name: {} for name in names}
    for number, (name, tensor) in enumerate(filled(SHAPES).items()):
        split[names[number % 3]][name] = tensor
    save_sharded(path, "model.safetensors.index.json", split)


def _parameters(path: Path) -> None:
    path.mkdir()
    for name, tensor in filled(SHAPES).items():
        torch.save(tensor, path / f"{name}.pt")


def _distributed(path: Path) -> None:
    state = filled(SHAPES)
    whole = state.pop("0")
    grid = [((row, column), (4608, 512)) for row in (0, 4608) for column in (0, 512)]
    stored = {"0": chunks(whole, grid, files=2)}
    write(path, stored | {name: rows(tensor, 2, files=2) for name, tensor in state.items()})


def _training(path: Path) -> None:
    """Write a training file: the model, the state of its optimizer, and values."""
    model = filled(SHAPES)
    state = {
        number: {"step": torch.tensor(3.0), "exp_avg": tensor.clone(), "exp_avg_sq": tensor.clone()}
        for number, tensor in enumerate(filled(EVEN[:8]).values())
    }
    groups = torch.optim.AdamW([nn.Parameter(torch.ones(1)) for _ in state]).state_dict()["param_groups"]
    torch.save({"epoch": 7, "model": model, "optimizer": {"state": state, "param_groups": groups}}, path)


def _huggingface(path: Path) -> None:
    import transformers

    config = transformers.GPT2Config(n_layer=2, n_embd=1024, n_head=8, vocab_size=4096, n_positions=64)
    config.architectures = ["GPT2LMHeadModel"]
    config.save_pretrained(path)
    state = transformers.GPT2LMHeadModel(config).state_dict()
    del state["lm_head.weight"]  # tied
    safetensors.torch.save_file(state, path / "model.safetensors", metadata={"format": "pt"})


def _packed(path: Path) -> None:
    (_, kind, pack), _ = gguf_files.packed((1, 32))
    tensors = {str(i): (shape, kind, pack * (torch.Size(shape).numel() // 32)) for i, shape in enumerate(SHAPES)}
    gguf_files.write(path, tensors)


#: Checkpoints by name; a name without a suffix is that of a directory.
FILES: dict[str, Callable[[Path], None]] = {
    "zip.pt": _torch(SHAPES),
    "even.pt": _torch(EVEN),
    "large.pt": _torch(LARGE),
    "legacy.pt": _legacy(SHAPES),
    "even-legacy.pt": _legacy(EVEN),
    "unaligned-legacy.pt": _unaligned_legacy(SHAPES),
    "even-unaligned-legacy.pt": _unaligned_legacy(EVEN),
    "views.pt": _views,
    "plain.safetensors": _safetensors,
    "unaligned.safetensors": _unaligned_safetensors,
    "packed.gguf": _packed,
    "shards": _shards,
    "parameters": _parameters,
    "distributed": _distributed,
    "training.pt": _training,
    "many.pt": _torch(MANY),
    "most.pt": _torch(MOST),
    "huggingface": _huggingface,
}
