"""The report of a load, as text and as JSON."""

from __future__ import annotations

import json
from dataclasses import replace
from types import MappingProxyType

from sluice.records import DeviceMemory, Peaks
from sluice.reports.load import LoadReport

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
    assert (
        value["predicted"]
        == value["measured"]
        == {
            "anon_bytes": 5 << 20,
            "file_bytes": 0,
            "shmem_bytes": 0,
            "total_bytes": 5 << 20,
        }
    )
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
