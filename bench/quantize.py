"""``python -m bench.quantize``: a quantized model from a file in bf16, by sluice and by other ways.

Each run is a new process with a cold page cache, whose memory another process samples. The methods take turns. The
clock starts after all imports, before the model is built. All results must have the same bits.

``--forms`` loads GPT-2 medium in every form, once each: finished, predicted and measured memory.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import click

from bench._forms import show_forms
from bench._quantize_child import CONFIGS, METHODS
from bench._watched_child import Row, run_watched
from sluice._units import format_bytes
from sluice.benchmark.cache import make_cold
from sluice.benchmark.folder import temporary_folder
from sluice.benchmark.llama import LLAMA_1B, LLAMA_TINY, LlamaShape, write_directory

__all__ = ["main", "medians"]

_SHAPES: Mapping[str, LlamaShape] = {
    "tiny": LLAMA_TINY,
    "small": {**LLAMA_1B, "hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 12},
    "1b": LLAMA_1B,
}


def medians(runs: Mapping[str, Sequence[Row]]) -> Iterator[Row]:
    """Yield one row for each method: medians of its runs, and whether the bits are those of the first good run."""
    hashes = [run["hash"] for each in runs.values() for run in each if "hash" in run]
    for method, own in runs.items():
        good = [run for run in own if "hash" in run]
        if not good:
            yield {"method": method, "failed": own[0]["failed"]}
            continue
        yield {
            "method": method,
            "same": all(run["hash"] == hashes[0] for run in good),
            **{name: statistics.median(run[name] for run in good) for name in ("seconds", "peak", "bytes")},
        }


def _run(method: str, config: str, path: Path, shape: LlamaShape) -> Row:
    make_cold(path)
    job = {"method": method, "config": config, "path": str(path), "shape": shape}
    return run_watched("bench._quantize_child", job)


def _cells(row: Row) -> Sequence[str]:
    if "failed" in row:
        return (row["method"], "-", "-", "-", row["failed"])
    peak, nbytes = row["peak"], row["bytes"]
    return (
        row["method"],
        f"{row['seconds']:.2f}",
        format_bytes(peak),
        format_bytes(peak - nbytes),
        "yes" if row["same"] else "NO",
    )


@click.command()
@click.option("--size", type=click.Choice(list(_SHAPES)), default="1b", show_default=True, help="Size of the model.")
@click.option("--configs", default="int8,float8", show_default=True, help=f"Any of {', '.join(CONFIGS)}.")
@click.option("--methods", default=",".join(METHODS), show_default=True, help="Separated by commas.")
@click.option("--shards", default=2, show_default=True, help="Files of the checkpoint.")
@click.option("--rounds", default=5, show_default=True, help="Processes of each method.")
@click.option("--directory", type=click.Path(path_type=Path), default=None, help="Where the checkpoint is made.")
@click.option("--forms", "only_forms", is_flag=True, help="Memory of GPT-2 in every form, instead.")
@click.option("--json", "json_path", type=click.Path(path_type=Path), default=None, help="Write all runs to a file.")
def main(
    size: str,
    configs: str,
    methods: str,
    shards: int,
    rounds: int,
    directory: Path | None,
    json_path: Path | None,
    *,
    only_forms: bool,
) -> None:
    """Measure the memory and the time of loads that quantize."""
    if only_forms:
        show_forms("tiny" if size == "tiny" else "medium", directory, json_path)
        return
    chosen = [each.strip() for each in methods.split(",")]
    wanted = [each.strip() for each in configs.split(",")]
    for given, known in ((chosen, list(METHODS)), (wanted, list(CONFIGS))):
        unknown = [each for each in given if each not in known]
        if unknown:
            raise click.UsageError(f"unknown: {unknown[0]!r}; known: {', '.join(known)}")
    shape = _SHAPES[size]
    document: Row = {"size": size, "configs": {}}
    failed = False
    with temporary_folder(directory) as folder:
        path = folder / "model"
        write_directory(path, shape, shards=shards)
        stored = sum(file.stat().st_size for file in path.glob("*.safetensors"))
        click.echo(f"{size}: {format_bytes(stored)} in bf16")
        for config in wanted:
            runs: dict[str, list[Row]] = {method: [] for method in chosen}
            for number in range(rounds):
                for method in [*chosen[number % len(chosen) :], *chosen[: number % len(chosen)]]:
                    runs[method].append(_run(method, config, path, shape))
            rows = list(medians(runs))
            document["configs"][config] = {"rows": rows, "runs": runs}
            nbytes = next((row["bytes"] for row in rows if "bytes" in row), 0)
            click.echo(f"\n{config}: {format_bytes(int(nbytes))} finished")
            click.echo("method | s | peak | above the model | same bits")
            for row in rows:
                click.echo(" | ".join(_cells(row)))
            failed |= any(not row.get("same", True) for row in rows)
    if json_path is not None:
        json_path.write_text(json.dumps(document, indent=1))
    if failed:
        raise click.ClickException("results differ")


if __name__ == "__main__":
    main()
