"""Measure how much memory one call takes, from outside the process that makes it.

Each call has a process of its own, whose heap has nothing freed to hide growth in. This process resets the kernel's
record of the peak (``VmHWM``, proc(5)) when everything before the call is done, and reads it while the call runs and
when it has returned. sluice resets the record too when a load starts, so that one reading at the end is not enough.

``FILES`` writes the checkpoints of the cases, in every format.
"""

from __future__ import annotations

import json
import select
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import safetensors.torch
import torch
from torch import nn

import sluice
from support import gguf_files
from support.directories import write_parameters
from support.distributed import chunks, rows, write
from support.fresh_process import SUBPROCESS

#: Seconds between two readings of the record.
_INTERVAL = 0.005

#: Imports the cases and prepares one; makes the call when it reads a line, and prints its outcome at the next.
_CHILD = """
import json, sys
from support import growth_cases
call = getattr(growth_cases, sys.argv[1])[sys.argv[2]].prepare(*sys.argv[3:])
print("ready", flush=True)
sys.stdin.readline()
outcome = next(call)
print("done", flush=True)
sys.stdin.readline()
print(json.dumps([outcome.predicted_bytes, outcome.reported_bytes, *outcome.sizes()]), flush=True)
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Result of a call; it keeps the finished tensors until the peak was read."""

    #: Growth that the report predicts, in bytes; None if it predicts none.
    predicted_bytes: int | None = None
    #: Growth that the report has measured, in bytes; None if it measures none.
    reported_bytes: int | None = None
    #: Returns the new tensors in host memory; several names of one tensor count once.
    new: Callable[[], Iterable[torch.Tensor]] = tuple
    #: Shapes of tensors that took no new memory: those of a file that was written, and existing parameters.
    moved: Iterable[tuple[int, ...]] = ()
    #: Allowance for each tensor, in bytes.
    tensor_bytes: int = 2048

    def sizes(self) -> tuple[int, int]:
        """Return F, and the allowance for the process, its tensors and those of 1 MiB or more, in bytes."""
        new = {id(tensor): tensor.nbytes for tensor in self.new()}
        every = [*new.values(), *(4 * torch.Size(shape).numel() for shape in self.moved)]
        large = sum(nbytes >= 1 << 20 for nbytes in every)
        return sum(new.values()), (32 << 20) + self.tensor_bytes * len(every) + 8192 * large


class Growth(NamedTuple):
    """Memory of one call, in bytes."""

    #: Growth to the peak, all kinds of memory together.
    measured_bytes: int
    #: Growth that the report predicts; None if it predicts none.
    predicted_bytes: int | None
    #: Growth that the report has measured; None if it measures none.
    reported_bytes: int | None
    #: Bytes of the finished tensors: F.
    final_bytes: int
    #: Allowance of the contract in addition to F and staging.
    overhead_bytes: int

    def allowed_bytes(self, staging_bytes: int) -> int:
        """Return the growth that the contract allows."""
        return self.final_bytes + staging_bytes + self.overhead_bytes


def measure_growth(table: str, case: str, path: Path, output: Path) -> Growth:
    """Make the call of a case in a fresh process, and return the memory that it took.

    Args:
        table: Name of the table of cases in ``growth_cases``.
        case: Name of the case.
        path: The checkpoint that it reads.
        output: Where it writes.
    """
    command = [sys.executable, "-c", _CHILD, table, case, str(path), str(output)]
    with SUBPROCESS.Popen(command, stdin=SUBPROCESS.PIPE, stdout=SUBPROCESS.PIPE, text=True) as process:
        if process.stdout.readline() != "ready\n":
            raise RuntimeError(f"{case} could not be prepared")
        Path(f"/proc/{process.pid}/clear_refs").write_text("5", encoding="ascii")
        before = _status(process.pid)["VmRSS"]
        process.stdin.write("go\n")
        process.stdin.flush()
        peak, ended = 0, False
        while not ended:
            ended = bool(select.select([process.stdout], [], [], _INTERVAL)[0])
            peak = max(peak, _status(process.pid).get("VmHWM", 0))
        done = process.stdout.readline()
        if done:
            process.stdin.write("end\n")
            process.stdin.flush()
        answer = process.stdout.readline()
    if not answer:
        raise RuntimeError(f"{case} failed")
    return Growth(peak - before, *json.loads(answer))


def _status(pid: int) -> dict[str, int]:
    lines = Path(f"/proc/{pid}/status").read_text(encoding="ascii", errors="replace").splitlines()
    fields = dict(line.split(":", 1) for line in lines)
    return {name: int(fields[name].split()[0]) << 10 for name in ("VmHWM", "VmRSS") if name in fields}


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


def _torch(shapes: Shapes, *, legacy: bool = False) -> Callable[[Path], None]:
    return lambda path: torch.save(filled(shapes), path, _use_new_zipfile_serialization=not legacy)


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


def _unaligned_safetensors(path: Path) -> None:
    """Write a file whose elements are at odd addresses, as writers did that did not pad the header."""
    safetensors.torch.save_file(filled(SHAPES), path)
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    path.write_bytes((length + 1).to_bytes(8, "little") + data[8 : 8 + length] + b" " + data[8 + length :])


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
FILES: dict[str, Callable[[Path], object]] = {
    "zip.pt": _torch(SHAPES),
    "even.pt": _torch(EVEN),
    "large.pt": _torch(LARGE),
    "legacy.pt": _torch(SHAPES, legacy=True),
    "even-legacy.pt": _torch(EVEN, legacy=True),
    "unaligned-legacy.pt": _unaligned_legacy(SHAPES),
    "even-unaligned-legacy.pt": _unaligned_legacy(EVEN),
    "views.pt": _views,
    "plain.safetensors": lambda path: safetensors.torch.save_file(filled(SHAPES), path),
    "unaligned.safetensors": _unaligned_safetensors,
    "packed.gguf": _packed,
    "shards": lambda path: sluice.save(filled(SHAPES), path, max_shard_size="8MiB"),
    "parameters": lambda path: write_parameters(path, filled(SHAPES)),
    "distributed": _distributed,
    "training.pt": _training,
    "many.pt": _torch(MANY),
    "most.pt": _torch(MOST),
    "huggingface": _huggingface,
}
