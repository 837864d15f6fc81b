"""``python -m bench.many_ranks``: a load on 1,000 ranks from an object store, from the plans that they would make.

Nothing is read. The checkpoint has the headers of a Llama of 70 billion parameters in bf16, in 30 safetensors shards,
and no data (sparse files). ``sluice.plan(..., mesh=...)`` plans every rank; the seconds follow from the speeds and
limits of the store, which are options. The table says which limit a load meets first.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import click
import torch

import sluice
from sluice.benchmark import machine as _machine
from sluice.benchmark.folder import temporary_folder
from sluice.benchmark.llama import LlamaShape, llama
from sluice.benchmark.results import show_document
from sluice.benchmark.table import console_for_tables
from sluice.reports.ranks import RanksPlan

__all__ = ["MESHES", "Store", "limits", "main", "write_headers"]

LLAMA_70B = LlamaShape(
    vocab_size=128256,
    hidden_size=8192,
    intermediate_size=28672,
    num_hidden_layers=80,
    num_attention_heads=64,
    num_key_value_heads=8,
)

#: Meshes of 1,000 ranks: training, training with tensor parallelism, serving with copies.
MESHES: Mapping[str, Mapping[str, int]] = {
    "fully_shard": {"dp": 1000},
    "fully_shard of 8 x tensor parallel": {"dp": 125, "tp": 8},
    "replicas of fully_shard over 8": {"dp_replicate": 125, "dp": 8},
    "replicas of tensor parallel over 8": {"dp_replicate": 125, "tp": 8},
}

#: Of two patterns that match a module, the later one counts.
STYLES = {
    "model.embed_tokens": "rowwise",
    "model.layers.*.self_attn.*_proj": "colwise",
    "model.layers.*.self_attn.o_proj": "rowwise",
    "model.layers.*.mlp.*_proj": "colwise",
    "model.layers.*.mlp.down_proj": "rowwise",
    "lm_head": "colwise",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Store:
    """Speeds and limits of an object store and the network to it."""

    #: Bytes per second to all hosts together.
    total: float
    #: Bytes per second to one host.
    host: float
    #: Requests per second.
    requests: float
    #: Seconds until a request is answered.
    latency: float
    #: Requests of one rank under way.
    parallel: int


def limits(ranks: RanksPlan, store: Store, *, once_per_host: bool) -> dict[str, float]:
    """Return the seconds that each limit alone would take.

    Args:
        ranks: The loads of all ranks.
        store: Where they read from.
        once_per_host: Whether what several ranks of a host need is fetched once for all of them.
    """
    nbytes = [host.needed_bytes if once_per_host else host.read_bytes for host in ranks.hosts]
    reads = [rank.reads for rank in ranks.ranks]
    share = sum(nbytes) / max(1, ranks.read_bytes)  # of the requests, if hosts fetch for their ranks
    return {
        "bandwidth of the store": sum(nbytes) / store.total,
        "bandwidth of a host": max(nbytes) / store.host,
        "requests per second": sum(reads) * share / store.requests,
        "latency": max(reads) * store.latency / store.parallel,
    }


def write_headers(folder: Path, model: torch.nn.Module, shards: int) -> Path:
    """Write the files of a checkpoint in bf16 with headers and an index, and holes in the place of data."""
    state = {name: (list(tensor.shape), 2 * tensor.numel()) for name, tensor in model.state_dict().items()}
    share = sum(nbytes for _, nbytes in state.values()) / shards
    groups: list[dict[str, Any]] = [{} for _ in range(shards)]
    ends = [0] * shards
    passed = 0
    weight_map = {}
    for name, (shape, nbytes) in state.items():
        shard = min(shards - 1, int(passed / share))
        groups[shard][name] = {
            "dtype": "BF16",
            "shape": shape,
            "data_offsets": [ends[shard], ends[shard] + nbytes],
        }
        weight_map[name] = f"model-{shard + 1:05}-of-{shards:05}.safetensors"
        ends[shard] += nbytes
        passed += nbytes
    for shard, (header, nbytes) in enumerate(zip(groups, ends, strict=True)):
        text = json.dumps(header).encode()
        with (folder / f"model-{shard + 1:05}-of-{shards:05}.safetensors").open("wb") as file:
            file.write(len(text).to_bytes(8, "little") + text)
            file.truncate(8 + len(text) + nbytes)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return folder


def _rows(source: Path, model: torch.nn.Module, store: Store, ranks_per_host: int) -> Iterator[dict[str, Any]]:
    for name, mesh in MESHES.items():
        started = time.perf_counter()
        ranks = sluice.plan(model, source, mesh=mesh, ranks_per_host=ranks_per_host, tp_plan=STYLES).ranks
        assert ranks is not None
        for once in (False, True):
            found = limits(ranks, store, once_per_host=once)
            first = max(found, key=lambda limit: found[limit])
            yield {
                "mesh": name,
                "once_per_host": once,
                "plan_seconds": time.perf_counter() - started,
                "requests": sum(rank.reads for rank in ranks.ranks),
                "egress_bytes": sum(host.needed_bytes if once else host.read_bytes for host in ranks.hosts),
                "needed_bytes": ranks.needed_bytes,
                "fullest_rank_bytes": ranks.fullest.peak_bytes,
                "seconds": found,
                "first_limit": first,
            }


def _table(rows: list[dict[str, Any]]) -> list[str]:
    return [
        "| 1,000 ranks, 8 to a host | fetches | requests | egress | of the checkpoint | seconds | first limit |",
        "|---|---|---:|---:|---:|---:|---|",
        *map(_line, rows),
    ]


def _line(row: dict[str, Any]) -> str:
    fetches = "once for a host" if row["once_per_host"] else "each rank"
    return (
        f"| {row['mesh']} | {fetches} | {row['requests']:,} | {row['egress_bytes'] / 1e12:.2f} TB | "
        f"{row['egress_bytes'] / row['needed_bytes']:.2f} | {max(row['seconds'].values()):.1f} | {row['first_limit']} |"
    )


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--total", default=200e9, show_default=True, help="Bytes per second from the store to all hosts.")
@click.option("--host", default=12.5e9, show_default=True, help="Bytes per second to one host.")
@click.option("--requests", default=5500.0, show_default=True, help="Requests per second that the store answers.")
@click.option("--latency", default=0.03, show_default=True, help="Seconds until a request is answered.")
@click.option("--parallel", default=8, show_default=True, help="Requests of one rank under way.")
@click.option("--out", type=click.Path(path_type=Path), default=Path("bench-out"), show_default=True, help="Results.")
def main(total: float, host: float, requests: float, latency: float, parallel: int, out: Path) -> None:
    """Plan a load of 141 GB on 1,000 ranks from an object store; nothing is read."""
    store = Store(total=total, host=host, requests=requests, latency=latency, parallel=parallel)
    with torch.device("meta"):
        model = llama(**LLAMA_70B).to(torch.bfloat16)
    with temporary_folder(None) as folder:
        rows = list(_rows(write_headers(folder, model, 30), model, store, 8))
        described = _machine.describe(folder, ("torch", "sluice"))
    record = {"command": "python -m bench.many_ranks", "machine": described, "store": asdict(store), "rows": rows}
    show_document(console_for_tables(), out, "many_ranks", record, _table(rows))


if __name__ == "__main__":
    main()
