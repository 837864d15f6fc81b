"""``python -m bench.quantize --forms``: the memory of one model in every form, each in a process of its own."""

from __future__ import annotations

import json
from pathlib import Path

import click
import numpy as np
import torch

from bench._forms_child import FORMS, SAVED_CONFIG, quantized
from bench._watched_child import Row, run_watched
from sluice._units import format_bytes
from sluice.benchmark.cache import make_cold
from sluice.benchmark.folder import temporary_folder
from sluice.benchmark.gpt2 import gpt2, random_state_dict

__all__ = ["show_forms"]

#: Types of the packs in the GGUF files.
_PACKS = ("Q8_0", "Q4_0")


def show_forms(size: str, directory: Path | None, json_path: Path | None) -> None:
    """Print one row for each form.

    Args:
        size: Size of the model.
        directory: Where the files are made.
        json_path: Where the rows are written.
    """
    rows: list[Row] = []
    with temporary_folder(directory) as folder:
        _write(folder, size)
        files = sorted(folder.iterdir())
        click.echo(f"GPT-2 {size}: " + ", ".join(f"{file.name} {format_bytes(file.stat().st_size)}" for file in files))
        click.echo("\n| form | finished, MiB | predicted | measured | and pages of files |\n|---|---:|---:|---:|---:|")
        for form in FORMS:
            for file in files:
                make_cold(file)
            row = {"form": form, **run_watched("bench._forms_child", {"form": form, "path": str(folder), "size": size})}
            rows.append(row)
            click.echo(_line(row))
    if json_path is not None:
        json_path.write_text(json.dumps(rows, indent=1))


def _line(row: Row) -> str:
    if "failed" in row:
        return f"| {row['form']} | | | | {row['failed']} |"
    numbers = (row[name] / (1 << 20) for name in ("finished", "predicted", "anonymous", "peak"))
    return f"| {row['form']} | " + " | ".join(f"{number:.0f}" for number in numbers) + " |"


def _write(folder: Path, size: str) -> None:
    """Write the model in fp32, quantized, and in GGUF files with the names of the model."""
    import sluice

    with torch.device("meta"):
        model = gpt2(size)
    state = random_state_dict(size, torch.float32)
    sluice.save(state, folder / "fp32.safetensors")
    for kind in _PACKS:
        _write_gguf(state, folder / f"{kind.lower()}.gguf", kind)
    model.load_state_dict(state, assign=True)
    quantized(SAVED_CONFIG)(model)
    sluice.save(model, folder / "quantized.safetensors")


def _write_gguf(state: dict[str, torch.Tensor], path: Path, kind: str) -> None:
    import gguf

    packs = gguf.GGMLQuantizationType[kind]
    writer = gguf.GGUFWriter(path, "gpt2")
    for name, tensor in state.items():
        if tensor.ndim == 2 and name.endswith("weight"):
            writer.add_tensor(name, gguf.quants.quantize(tensor.numpy(), packs), raw_dtype=packs)
        else:
            writer.add_tensor(name, tensor.float().numpy().astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
