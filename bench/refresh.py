"""``python -m bench.refresh``: new weights in a live model, by ``sluice.refresh`` and by whole loads.

A bf16 model of 100 equal tensors holds the old weights. Of the new file 1, 11 or all of them differ; other methods read
all in any case. Each runs in a fresh process, with the new file cold and cached.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from pathlib import Path

import click
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import sluice
from bench._common import run_alone, show, working_folder
from sluice._units import format_bytes
from sluice.benchmark.machine import make_cold, make_warm
from sluice.benchmark.records import Work
from sluice.benchmark.results import TableSection

__all__ = ["main", "refreshing"]

_TENSORS, _SHARES = 100, (1, 11, 100)

_WHOLE: dict[str, Callable[[nn.Module, Path], object]] = {
    "sluice.load_into": lambda model, new: sluice.load_into(model, new).read_bytes,
    "torch.load + load_state_dict": lambda model, new: model.load_state_dict(torch.load(new)),
    "load_file + load_state_dict": lambda model, new: model.load_state_dict(load_file(new.with_suffix(".safetensors"))),
}


def _model(width: int, old: int | None = None) -> nn.Module:
    """Return a model whose first ``old`` tensors are 2, and the others 1."""
    model = nn.ModuleList(nn.Linear(width, width, bias=False, dtype=torch.bfloat16) for _ in range(_TENSORS))
    with torch.no_grad():
        for i, parameter in enumerate(model.parameters()):
            parameter.fill_(2 if i < (old or 0) else 1)
    return model


def refreshing(method: str, width: int, folder: str, share: int, *, cold: bool) -> Work:
    """Fill a live model with new weights; see ``BenchTask``."""
    model, old, new = _model(width), Path(folder, "0.pth"), Path(folder, f"{share}.pth")
    state = sluice.load_into(model, old).state
    (make_cold if cold else make_warm)(new.with_suffix(".safetensors") if "load_file" in method else new)
    yield
    yield
    if method in _WHOLE:
        read: object = _WHOLE[method](model, new)
    else:
        done = sluice.refresh(model, new, since=state, torn="allow" if "allow" in method else "never")
        assert done.report is not None
        read = done.report.read_bytes
    yield
    right = all(bool((each == (2 if i < share else 1)).all()) for i, each in enumerate(model.parameters()))
    return {"read": read if isinstance(read, int) else new.stat().st_size, "right": right}


@click.command()
@click.option("--megabytes", default=1400, show_default=True, help="Size of the model.")
@click.option("--runs", default=3, show_default=True, help="Repetitions; the table shows the median.")
@click.option("--directory", type=click.Path(path_type=Path), help="Keep checkpoints here.")
@click.option("--out", type=click.Path(path_type=Path), default=Path("bench-out"), help="Results.")
def main(*, megabytes: int, runs: int, directory: Path | None, out: Path) -> None:
    """Measure refreshes: seconds, bytes read and peak memory in addition to the model."""
    width, rows = max(8, int((megabytes * 1e6 / 2 / _TENSORS) ** 0.5)), []
    with working_folder(directory) as folder:
        for share in (0, *_SHARES):
            weights = _model(width, share).state_dict()
            torch.save(weights, folder / f"{share}.pth")
        save_file(weights, folder / "100.safetensors")
        del weights
        refreshes = [("sluice.refresh", share) for share in _SHARES]
        for method, share in [*refreshes, ('sluice.refresh, torn="allow"', 100), *((name, 100) for name in _WHOLE)]:
            arguments = {"method": method, "width": width, "folder": str(folder), "share": share}
            cells = []
            for cold in (True, False):
                outcomes = [
                    run_alone("bench.refresh:refreshing", {**arguments, "cold": cold}, claimed_bytes=megabytes * 10**6)
                    for _ in range(runs)
                ]
                if wrong := [each for each in outcomes if each.status != "ok" or not each.facts["right"]]:
                    raise click.ClickException(f"{method}: {wrong[0].reason or 'wrong weights'}")
                cells.append(f"{statistics.median(each.seconds for each in outcomes):.3f}")
            peak = max(each.total_bytes for each in outcomes)
            rows.append((f"{method}, {share} %", *cells, format_bytes(outcomes[0].facts["read"]), format_bytes(peak)))
    headings = ("method, changed", "cold, s", "cached, s", "read", "peak added to the model")
    section = TableSection(title="New weights in a live model", headings=headings, rows=tuple(rows))
    show(out, "refresh", ("torch", "safetensors"), [section])


if __name__ == "__main__":
    main()
