"""Defaults of a comparison: methods, states and size, and the checkpoint that each method reads."""

from __future__ import annotations

import errno
import shutil
from collections import OrderedDict
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import sluice
from sluice.benchmark import sizes as _sizes
from sluice.benchmark.comparison import Checkpoints, builtin_subject, default_methods, own_subject
from sluice.benchmark.loads import verdict
from sluice.benchmark.methods import METHODS
from sluice.benchmark.records import MethodJob
from sluice.benchmark.sizes import Choice, Conditions, Extent, choose, choose_here
from sluice.benchmark.subjects import final_bytes, kind_of, main_dtype
from sluice.benchmark.summary import typical_runs
from support.comparisons import runs_of, scenario

_FINALS = {"small": 1 << 30, "medium": 2 << 30, "large": 4 << 30}

_MODEL = f"{__name__}:Tied"


class Tied(nn.Module):
    """Two names for one weight, an integer buffer, and a non-persistent buffer."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5, width)
        self.head = nn.Linear(width, 5, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("steps", torch.tensor(3))
        self.register_buffer("positions", torch.arange(4), persistent=False)


#: Runs of the demo: a reference for each dtype, and six methods for each dtype and state.
_COUNTS: dict[Extent, int] = {
    (("cold", "warm"), ("float32", "bfloat16")): 26,
    (("cold", "warm"), ("float32",)): 13,
    (("cold",), ("float32",)): 7,
}
_ALL, _FP32, _COLD = _COUNTS


def _choose(counts: dict[Extent, int] = _COUNTS, **changes: Any) -> Choice:
    plenty = {"memory_bytes": 1 << 40, "disk_bytes": 1 << 40, "seconds_per_process": 0.0, "seconds_per_byte": 0.0}
    return choose(_FINALS, counts, Conditions(**{**plenty, **changes}))


@pytest.mark.parametrize(
    ("changes", "size", "extent"),
    [
        ({}, "large", _ALL),
        ({"memory_bytes": 8 << 30}, "medium", _ALL),
        ({"disk_bytes": 3 << 30}, "small", _ALL),
        ({"device_bytes": 5 << 30}, "medium", _ALL),
        ({"seconds_per_byte": 5e-10}, "large", _ALL),
        ({"seconds_per_byte": 1.5e-9}, "medium", _ALL),  # cold and cached loads are preferred to a larger size
        ({"seconds_per_byte": 3e-9}, "small", _ALL),
        ({"seconds_per_byte": 5e-9}, "small", _FP32),
        ({"seconds_per_process": 6.0, "seconds_per_byte": 3e-9}, "medium", _COLD),  # a busy machine
        ({"seconds_per_process": 40.0}, "small", _COLD),  # it takes too long, but there is nothing smaller
        ({"memory_bytes": 0}, "small", _ALL),
    ],
)
def test_all_loads_of_the_largest_size_that_fits_and_fewer_if_none_does(
    changes: dict[str, Any], size: str, extent: Extent
) -> None:
    chosen = _choose(**changes)
    assert (chosen.size, (chosen.states, chosen.dtypes)) == (size, extent)


def test_the_estimate_keeps_two_minutes_whatever_the_machine() -> None:
    """A quiet machine of two cores, and busier ones."""
    for times in (1, 2, 4, 6):
        chosen = _choose(seconds_per_process=1.5 * times, seconds_per_byte=1e-9 * times)
        assert chosen.seconds <= 120


def test_more_runs_leave_time_for_less() -> None:
    assert _choose({_COLD: 14}, seconds_per_byte=1.5e-9).size == "large"
    assert _choose({_COLD: 38}, seconds_per_byte=1.5e-9).size == "small"


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({}, "it is the largest size"),
        ({"memory_bytes": 8 << 30}, "memory or disk space is too small for GPT-2 large"),
        ({"seconds_per_byte": 3e-9}, "GPT-2 medium would take about 179 s"),
    ],
)
def test_the_choice_explains_why_nothing_larger(changes: dict[str, Any], reason: str) -> None:
    assert _choose(**changes).reason == reason


@pytest.mark.long
def test_probes_describe_this_machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(_sizes, "_PROBE_BYTES", 1 << 20)
    monkeypatch.setattr(_sizes, "_CHOICE", ("small",))
    monkeypatch.setattr("sluice.benchmark.machine.free_memory_bytes", lambda: 0)
    asked: list[Conditions] = []

    def choose_of(finals: object, counts: dict[Extent, int], conditions: Conditions) -> Choice:
        asked.append(conditions)
        return choose(_FINALS, counts, conditions)

    monkeypatch.setattr(_sizes, "choose", choose_of)
    assert choose_here(tmp_path, "cpu", _COUNTS).size == "small"
    (conditions,) = asked
    assert conditions.seconds_per_byte > 0
    assert conditions.seconds_per_process > 0.05
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def own(tmp_path: Path) -> Path:
    """A training checkpoint of ``Tied`` with its weights under a key."""
    torch.manual_seed(0)
    path = tmp_path / "run.pth"
    torch.save({"model": Tied().state_dict(), "epoch": 3}, path)
    return path


def test_what_a_checkpoint_is(own: Path, tmp_path: Path) -> None:
    save_file({"w": torch.ones(2)}, tmp_path / "w.safetensors")
    parts = tmp_path / "parts"
    parts.mkdir()
    save_file({"a": torch.ones(2)}, parts / "model-00001-of-00002.safetensors")
    save_file({"b": torch.ones(2)}, parts / "model-00002-of-00002.safetensors")
    singles = tmp_path / "singles"
    singles.mkdir()
    torch.save(torch.ones(2), singles / "w.pt")
    found = [kind_of(path) for path in (own, tmp_path / "w.safetensors", parts, singles)]
    assert found == [".pth", ".safetensors", "shards", ""]


def test_the_dtype_is_that_of_most_bytes(tmp_path: Path) -> None:
    tensors = {"a": torch.ones(9, dtype=torch.bfloat16), "b": torch.ones(2), "c": torch.ones(99, dtype=torch.int64)}
    save_file(tensors, tmp_path / "w.safetensors")
    assert main_dtype(tmp_path / "w.safetensors") == "bfloat16"


def test_the_finished_size_counts_ties_once_and_keeps_integers() -> None:
    assert final_bytes(_MODEL, '{"width": 16}', torch.bfloat16) == 5 * 16 * 2 + 8


def test_own_checkpoints_are_read_directly_if_a_method_can(own: Path, tmp_path: Path) -> None:
    subject = own_subject(own, _MODEL, "{}", "model")
    assert default_methods(subject) == ["naive", "sequential", "meta-sequential", "mmap", "sluice"]
    folder = tmp_path / "made"
    folder.mkdir()
    checkpoints = Checkpoints(subject, folder)
    assert checkpoints.path_for("naive") == own
    assert list(folder.iterdir()) == []


def test_others_get_a_copy_of_the_weights_alone(own: Path, tmp_path: Path) -> None:
    folder = tmp_path / "made"
    folder.mkdir()
    checkpoints = Checkpoints(own_subject(own, _MODEL, "{}", "model"), folder)
    copied = load_file(checkpoints.path_for("fastsafetensors"))
    assert set(copied) == {"embedding.weight", "head.weight", "steps"}
    made = (folder / "model.safetensors").stat().st_mtime_ns
    assert checkpoints.path_for("runai-streamer") == folder / "model.safetensors"
    assert (folder / "model.safetensors").stat().st_mtime_ns == made  # once for all methods
    assert checkpoints.path_for("accelerate") == folder / "model.pth"  # the method takes no key
    assert {path.name for path in checkpoints.path_for("per-parameter").iterdir()} == {
        "embedding.weight.pt", "head.weight.pt", "steps.pt"
    }  # fmt: skip


@pytest.mark.parametrize("built_in", [False, True])
def test_a_checkpoint_that_the_disk_has_no_room_for_is_not_begun(
    built_in: bool, own: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=100))
    subject = builtin_subject("tiny") if built_in else own_subject(own, _MODEL, "{}", "model")
    with pytest.raises(OSError, match=r"a checkpoint of .* does not fit: 100 B are free") as caught:
        Checkpoints(subject, tmp_path).path_for("per-parameter")
    assert caught.value.errno == errno.ENOSPC
    assert not (tmp_path / "parameters").exists()


def test_what_only_sluice_reads_is_not_converted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sluice.benchmark.subjects.kind_of", lambda _: "other")
    subject = own_subject(tmp_path / "dcp", _MODEL, "{}", None)
    assert default_methods(subject) == ["sluice"]
    with pytest.raises(sluice.UnsupportedError, match="neither torch nor safetensors reads this checkpoint"):
        Checkpoints(subject, tmp_path).path_for("naive")


@pytest.mark.parametrize("method", ["naive", "sequential", "meta-sequential", "mmap", "sluice", "sluice-load-into"])
def test_the_truth_of_an_own_model_is_what_torch_reads(method: str, own: Path) -> None:
    job = MethodJob(
        method=method, model=_MODEL, checkpoint=str(own), key="model", dtype="bfloat16", device="cpu", verify=True
    )
    truth, found = (METHODS[name].start(job)() for name in ("reference", method))
    assert isinstance(truth, nn.Module)
    assert isinstance(found, nn.Module)
    assert truth.state_dict()["steps"] == 3
    assert verdict(found, with_logits=False) == verdict(truth, with_logits=False)


def test_the_truth_finds_a_tied_weight_under_its_other_name(tmp_path: Path) -> None:
    weights = OrderedDict(Tied().state_dict())
    del weights["head.weight"]
    torch.save(weights, tmp_path / "tied.pth")
    job = MethodJob(
        method="sluice", model=_MODEL, checkpoint=str(tmp_path / "tied.pth"), dtype="float32", device="cpu", verify=True
    )
    truth = METHODS["reference"].start(job)()
    assert isinstance(truth, nn.Module)
    assert torch.equal(truth.state_dict()["head.weight"], weights["embedding.weight"])


def test_the_typical_run_is_the_one_in_the_middle() -> None:
    one = scenario()
    run = next(run for run in runs_of(one) if run.method == "sluice")
    runs = [
        replace(run, repetition=number, outcome=replace(run.outcome, seconds=seconds))
        for number, seconds in enumerate((3.0, 1.0, 2.0))
    ]
    runs.append(replace(run, repetition=3, outcome=replace(run.outcome, status="killed", seconds=0.0)))
    (typical,) = typical_runs(one, runs)
    assert typical.outcome.seconds == 2.0
