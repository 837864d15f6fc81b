"""The report of a load as text and as JSON, and its table: how each tensor was filled."""

from __future__ import annotations

import json
import pickle
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

import pytest
import safetensors.torch
import torch
from torch import nn

import sluice
from sluice.loading import module_job
from sluice.records import DeviceMemory, Peaks
from sluice.reports.document import Grid
from sluice.reports.load import LoadReport
from sluice.reports.table import TensorRow, TensorTable
from support.command_line import printed
from support.trained_net import empty
from support.watching import watch

_PREDICTED = Peaks(anon_bytes=5 << 20, file_bytes=0, shmem_bytes=0, total_bytes=5 << 20)
_REPORT = LoadReport(
    source="model.pth",
    format="torch-zip",
    files=("model.pth",),
    devices=("cpu",),
    loaded=11,
    total=12,
    loaded_bytes=3 << 20,
    tensors=12,
    final_bytes=4 << 20,
    read_bytes=8 << 20,
    seconds=0.5,
    predicted=_PREDICTED,
)


def test_speed_is_decimal_gigabytes() -> None:
    assert _REPORT.gb_per_second == (8 << 20) / 0.5 / 1e9
    assert replace(_REPORT, seconds=0.0).gb_per_second == 0.0


def words(report: LoadReport) -> list[str]:
    """Return the lines of the text, without the padding of columns."""
    return [" ".join(line.split()) for line in str(report).splitlines()]


def test_text_has_predicted_next_to_measured_memory() -> None:
    measured = Peaks(anon_bytes=6 << 20, file_bytes=0, shmem_bytes=0, total_bytes=6 << 20)
    assert "growth of memory predicted, at most measured" in words(_REPORT)
    assert "host, total 5.00 MiB 6.00 MiB" in words(replace(_REPORT, measured=measured))
    assert "host, total 5.00 MiB not available" in words(_REPORT)


def test_text_names_what_happened() -> None:
    text = str(
        replace(
            _REPORT,
            key="state.model",
            prefix="module.",
            reads={"direct": 6 << 20, "buffered": 2 << 20},
            stepped_down=3,
            tied=(("head.weight", "embed.weight"),),
            cast={"float32->bfloat16": 11},
            missing=tuple(f"layer.{number}" for number in range(9)),
            notes=("The file was cached.",),
        )
    )
    for part in (
        "loaded 11 of 12 tensors of the model from model.pth (torch-zip, key 'state.model'), 3.00 MiB on cpu",
        "read 8.00 MiB in 0.50 s, 0.02 GB/s: 6.00 MiB direct, 2.00 MiB buffered; 3 reads stepped down",
        "prefix stripped: module.",
        "tied (1): head.weight = embed.weight",
        "cast float32->bfloat16: 11 tensors",
        "missing (9): layer.0, layer.1",
        "layer.7 and 1 more",
        "note: The file was cached.",
    ):
        assert part in text


def test_json_holds_every_field() -> None:
    report = replace(_REPORT, measured=_PREDICTED, reads=MappingProxyType({"direct": 8 << 20}), tied=(("a", "b"),))
    value = json.loads(json.dumps(report.to_json()))
    assert set(value) == {*LoadReport.__dataclass_fields__, "gb_per_second"} - {"rows", "state_maker"}
    peaks = {"anon_bytes": 5 << 20, "file_bytes": 0, "shmem_bytes": 0, "total_bytes": 5 << 20}
    assert value["predicted"] == value["measured"] == peaks
    assert value["reads"] == {"direct": 8 << 20}
    assert value["tied"] == [["a", "b"]]


def test_accelerators_are_reported_with_the_host() -> None:
    memory = DeviceMemory(device="cuda:0", requested_bytes=4 << 20, predicted_bytes=10 << 20, reserved_bytes=8 << 20)
    report = replace(
        _REPORT, device_memory=(memory, DeviceMemory(device="mps:0", requested_bytes=1, predicted_bytes=1))
    )
    assert "cuda:0, reserved 10.0 MiB 8.00 MiB" in words(report)
    assert "mps:0, reserved 1 B not available" in words(report)
    plain = json.loads(json.dumps(report.to_json()))
    assert plain["device_memory"][0]["reserved_bytes"] == 8 << 20


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(600, 600)
        self.norm = nn.BatchNorm1d(3)
        self.head = nn.Linear(600, 600, bias=False)
        self.head.weight = self.embed.weight
        self.extra = nn.Linear(2, 2)
        self.register_buffer("nothing", torch.empty(0))
        self.register_buffer("angles", torch.ones(5), persistent=False)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    state = {f"module.{name}": tensor for name, tensor in Net().state_dict().items() if "extra" not in name}
    torch.save({"model": state, "epoch": 3}, tmp_path / "f.pth")
    return tmp_path / "f.pth"


def rows(report: sluice.LoadReport) -> dict[str, TensorRow]:
    return {row.name: row for row in report.table()}


def how(report: sluice.LoadReport) -> dict[str, str]:
    return {name: row.how for name, row in rows(report).items()}


def test_a_row_describes_how_each_name_was_filled(file: Path) -> None:
    report = sluice.load_into(empty(Net), file, strict=False, page_cache="keep")
    assert how(report) == {
        "embed.weight": "direct into place",
        "head.weight": "tied to embed.weight",
        "norm.weight": "through staging",
        "norm.bias": "through staging",
        "norm.running_mean": "through staging",
        "norm.running_var": "through staging",
        "norm.num_batches_tracked": "through staging",
        "extra.weight": "initialised",
        "extra.bias": "initialised",
        "nothing": "empty",
        "angles": "computed",
    }
    assert rows(report)["embed.weight"] == TensorRow(
        name="embed.weight",
        file_dtype="float32",
        dtype="float32",
        shape=(600, 600),
        nbytes=1_440_000,
        device="cpu",
        how="direct into place",
        source_names=("model.module.embed.weight",),
    )
    held = [row.nbytes for row in report.table() if row.how != "computed" and "tied" not in row.how]
    assert sum(held) == report.final_bytes


def test_casts_live_tensors_and_mapped_ones(file: Path) -> None:
    cast = rows(sluice.load_into(empty(Net), file, strict=False, dtype=torch.bfloat16))
    row = cast["embed.weight"]
    assert (row.how, row.file_dtype, row.dtype) == ("cast", "float32", "bfloat16")
    assert cast["extra.weight"].dtype == "bfloat16"
    live = how(sluice.load_into(Net(), file, strict=False))
    assert live["extra.weight"] == "kept"
    assert live["embed.weight"] in {"direct into place", "through staging"}
    report = sluice.load_into(empty(Net), file, strict=False, place="map")
    mapped = how(report)
    assert mapped["embed.weight"] == mapped["norm.bias"] == "mapped"
    assert mapped["extra.weight"] == "initialised"
    assert not any("are copied" in note for note in report.notes)


def test_parts_are_traced_to_the_tensors_that_hold_them(tmp_path: Path) -> None:
    torch.save({"qkv": torch.ones(6, 2), "a": torch.ones(2, 2), "b": torch.ones(1, 2)}, tmp_path / "f.pth")
    rows_of = {"q": 2, "k": 2, "v": 2, "ab": 3}
    model = nn.ParameterDict({name: nn.Parameter(torch.empty(count, 2)) for name, count in rows_of.items()})
    rules = [sluice.rules.split("qkv", ("q", "k", "v")), sluice.rules.concatenate(("a", "b"), "ab")]
    table = sluice.load_into(model, tmp_path / "f.pth", rules=rules).table()
    fused = dict.fromkeys("qkv", ("qkv",))
    assert {row.name: row.source_names for row in table} == {**fused, "ab": ("a", "b")}


def test_tensors_of_rules_are_described_by_the_rules(tmp_path: Path) -> None:
    torch.save({"weight": torch.ones(2, 3), "bias": torch.ones(3)}, tmp_path / "f.pth")
    model = empty(lambda: nn.Linear(2, 3))
    table = sluice.load_into(model, tmp_path / "f.pth", rules=[sluice.rules.transpose("weight")]).table()
    assert (table[0].source_names, table[1].source_names) == (("weight",), ("bias",))
    assert (table[0].origin, table[1].origin) == ("weight transposed", "")
    assert "weight transposed" in str(table)


def test_one_long_name_does_not_push_every_row_to_the_right() -> None:
    lines = list(Grid(("name", "how"), [["x" * 4096, "cast"], ["y", "cast"]]).lines())
    assert [len(line) for line in lines] == [105, 4102, 106]


def test_rows_can_be_sliced_and_an_empty_table_prints(file: Path) -> None:
    table = sluice.load_into(empty(Net), file, strict=False).table()
    assert isinstance(table[:2], TensorTable)
    assert len(table[:2]) == 2
    assert repr(table) == "<TensorTable of 11 rows>"
    assert str(TensorTable([])) == "name  dtype  shape  bytes  device  how  from"


def test_a_report_makes_its_rows_when_asked_and_can_be_pickled(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[object] = []
    watch(monkeypatch, module_job, "tensor_rows", lambda *decided: asked.append(decided))
    report = sluice.load_into(empty(Net), file, strict=False)
    str(report), report.to_json()
    assert not asked
    assert len(report.table()) == 11
    monkeypatch.undo()
    report = sluice.load_into(empty(Net), file, strict=False)
    assert list(pickle.loads(pickle.dumps(report)).table()) == list(report.table())


def test_a_module_without_tensors_has_no_rows(tmp_path: Path) -> None:
    safetensors.torch.save_file({"unused": torch.ones(1)}, tmp_path / "f.safetensors")
    report = sluice.load_into(nn.Identity(), tmp_path / "f.safetensors", strict=False)
    assert len(report.table()) == 0


def test_the_command_prints_it(tmp_path: Path) -> None:
    torch.save(nn.Linear(2, 3).state_dict(), tmp_path / "f.pth")
    command = ["load", tmp_path / "f.pth", "--model", "torch.nn:Linear", "--model-args", "[2, 3]"]
    assert "weight  float32  [3, 2]   24 B  cpu     through staging  weight" in printed(*command, "--table")
    found = json.loads(printed(*command, "--table", "--json"))["table"]
    assert [(row["name"], row["how"], row["source_names"]) for row in found] == [
        ("weight", "through staging", ["weight"]),
        ("bias", "through staging", ["bias"]),
    ]
    assert "table" not in json.loads(printed(*command, "--json"))
