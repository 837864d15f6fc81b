"""Arguments of the public functions as people write them: accepted, or refused in one line before a file is opened."""

from __future__ import annotations

import io
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import sluice
from sluice._arguments import memory_limits


class Net(nn.Linear):
    def __init__(self) -> None:
        super().__init__(4, 3)


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    torch.save(Net().state_dict(), "m.pth")
    return "m.pth"


@pytest.mark.parametrize("dtype", ["bf16", "bfloat16", "torch.bfloat16", torch.bfloat16])
def test_a_dtype_has_one_meaning_everywhere(file: str, dtype: Any) -> None:
    net = Net()
    sluice.load_into(net, file, dtype=dtype)
    assert net.weight.dtype == torch.bfloat16
    assert sluice.load_state_dict(file, dtype=dtype)["weight"].dtype == torch.bfloat16
    sluice.save(Net(), "saved.pth", dtype=dtype)
    sluice.convert(file, "converted.pth", dtype=dtype)
    for written in ("saved.pth", "converted.pth"):
        assert torch.load(written)["weight"].dtype == torch.bfloat16
    with sluice.open(file) as checkpoint:
        assert checkpoint["weight"].read(dtype=dtype).dtype == torch.bfloat16
    plan = sluice.plan(None, file, dtype=dtype)
    assert plan.final_bytes == 30
    cast = sluice.load_state_dict(file, rules=[sluice.rules.cast("weight", dtype)])
    assert cast["weight"].dtype == torch.bfloat16


#: Every function whose ``dtype=`` applies to floating-point tensors.
CASTS: list[Callable[[Any], object]] = [
    lambda dtype: sluice.load_into(Net(), "m.pth", dtype=dtype),
    lambda dtype: sluice.plan(Net(), "m.pth", dtype=dtype),
    lambda dtype: sluice.plan(None, "m.pth", dtype=dtype),
    lambda dtype: sluice.load_state_dict("m.pth", dtype=dtype),
    lambda dtype: sluice.save(Net(), "new.pth", dtype=dtype),
    lambda dtype: sluice.convert("m.pth", "new.pth", dtype=dtype),
    lambda dtype: sluice.open("m.pth")["weight"].read(dtype=dtype),
    lambda dtype: sluice.hf.from_pretrained(".", dtype=dtype),
]


@pytest.mark.parametrize("dtype", ["bf61", "int8", "bool", "complex64", torch.int8])
@pytest.mark.parametrize("call", CASTS)
def test_every_function_casts_to_floating_point_only(file: str, call: Callable[[Any], object], dtype: Any) -> None:
    text = rf"dtype {dtype!r} is not one of the floating-point dtypes auto .*bfloat16 \(bf16, BF16\)"
    with pytest.raises(ValueError, match=text):
        call(dtype)
    assert os.listdir() == ["m.pth"]


def test_a_rule_casts_to_any_dtype(file: str) -> None:
    with pytest.raises(ValueError, match=r"dtype 'bf61' is not one of .*bfloat16 \(bf16, BF16\)"):
        sluice.rules.cast("*", "bf61")


def test_auto_keeps_the_dtypes_of_the_file_where_none_does(file: str) -> None:
    assert sluice.load_state_dict(file, dtype="auto")["weight"].dtype == torch.float32
    sluice.convert(file, "converted.pth", dtype="auto")
    assert torch.load("converted.pth")["weight"].dtype == torch.float32


def test_a_dtype_that_the_installed_torch_lacks(file: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch, "float8_e8m0fnu", raising=False)
    with pytest.raises(ValueError, match="the installed torch has no float8_e8m0fnu"):
        sluice.load_state_dict(file, dtype="F8_E8M0")


@pytest.mark.parametrize("memory", ["64KiB", "64K", 65536, np.int64(65536), sluice.MemoryLimits(host="64KiB")])
def test_one_size_of_memory_is_that_of_the_host(file: str, memory: Any) -> None:
    calls: list[Callable[[], object]] = [
        lambda: sluice.load_into(Net(), file, memory=memory),
        lambda: sluice.load_state_dict(file, memory=memory),
        lambda: sluice.convert(file, "new.pth", memory=memory),
    ]
    for call in calls:
        with pytest.raises(sluice.BudgetError, match=r"64\.0 KiB \(MemoryLimits\(host"):
            call()
    assert not sluice.plan(None, file, memory=memory).fits


def test_the_devices_of_limits_are_those_that_torch_writes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.accelerator.is_available", lambda: True)
    monkeypatch.setattr("torch.accelerator.current_device_index", lambda: 3)
    given: dict[Any, str] = {"cuda": "1KiB", torch.device("cuda:1"): "2KiB"}
    limits = memory_limits(sluice.MemoryLimits(device=given))
    assert limits == sluice.MemoryLimits(device={"cuda:3": "1KiB", "cuda:1": "2KiB"})
    with pytest.raises(ValueError, match="two limits for one of cuda:3"):
        memory_limits(sluice.MemoryLimits(device={"cuda": "1KiB", "cuda:3": "2KiB"}))


def test_limits_are_checked_when_they_are_written() -> None:
    with pytest.raises(ValueError, match=r"MemoryLimits\(host=\.\.\.\): not a size: 'lots'"):
        sluice.MemoryLimits(host="lots")
    with pytest.raises(ValueError, match=r"device\['cuda:0'\]"):
        sluice.MemoryLimits(device={"cuda:0": "many"})
    with pytest.raises(ValueError, match="negative"):
        sluice.MemoryLimits(device=-1)
    with pytest.raises(TypeError, match=r"MemoryLimits\(staging=\.\.\.\): a size is an int or a text"):
        sluice.MemoryLimits(staging=None)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "value", "error", "message"),
    [
        ("memory", "2 gigs", ValueError, "memory=: not a size"),
        ("memory", 2e9, TypeError, "memory= is a float; write a size such as '2GiB'"),
        ("memory", True, TypeError, "memory= is a bool"),
        *(
            ("memory", sluice.MemoryLimits(device={name: 1}), ValueError, "is not an accelerator such as 'cuda:0'")
            for name in ("gpu", "cuda:00", "cpu")
        ),
        ("limits", "2GiB", TypeError, "limits= is a str, not sluice.Limits"),
        ("key", ["model"], TypeError, "key= is a list; write a text"),
        ("strict", "false", TypeError, "strict= is a str, not True or False"),
        ("allow_empty", "no", TypeError, "allow_empty= is a str, not True or False"),
        ("allow_empty", True, ValueError, "allow_empty=True needs strict=False"),
        ("progress", "yes", TypeError, "progress= is a str, not True, False"),
        ("rename", "a=b", TypeError, "rename= is a str in a wrong form; write {'old': 'new'}"),
        ("rename", ["a", "b"], TypeError, "rename= is a list in a wrong form"),
        ("rename", {1: 2}, TypeError, "rename= is a dict in a wrong form"),
        ("rename", [(3, "up")], TypeError, "rename= is a list in a wrong form"),
        ("rename", [(re.compile(b"a"), "up")], TypeError, "rename= is a list in a wrong form"),
        ("rename", [("(", "up")], ValueError, "rename=: '(' is not a regular expression: missing ), unterminated"),
        ("rename", [("a{99999999999}", "up")], ValueError, "rename=: 'a{99999999999}' is not a regular expression"),
        ("rename", [("w(.*)", r"v\2")], ValueError, r"rename=: the replacement 'v\\2' does not fit 'w(.*)': inv"),
        ("rename", [("w(.*)", r"\g<n>")], ValueError, r"rename=: the replacement '\\g<n>' does not fit 'w(.*)'"),
        ("rules", sluice.rules.drop("bias"), TypeError, "rules= is an EachRule; write a list"),
        ("rules", {"a": "b"}, TypeError, "rename= for a mapping"),
        ("rules", "a", TypeError, "rules= is a str"),
        ("place", "mmap", ValueError, "place='mmap' is not one of 'copy', 'map'"),
        ("page_cache", "no", ValueError, "page_cache='no' is not one of 'auto', 'keep', 'bypass'"),
        ("share", "once", ValueError, r"share='once' is gone: ranks of one host fetch remote files once"),
        ("encoding", None, TypeError, "encoding= is None; write a text such as 'latin1', or 'bytes'"),
        ("encoding", "a\0b", ValueError, r"encoding: 'a\x00b' is not an encoding of text; expected 'utf-8', 'latin1'"),
        ("encoding", "undefined", ValueError, "encoding: 'undefined' is not an encoding of text"),
        ("device", "gpu", ValueError, "'gpu' cannot be used: torch has no such kind of device; this machine has cpu"),
        ("device", 1.5, TypeError, "device= is a float; write 'cpu', 'cuda:0'"),
        ("device", {"": "meta"}, ValueError, "cannot hold weights"),
        ("device", "cuda:99", ValueError, "cannot be used"),
    ],
)  # fmt: skip
def test_a_wrong_argument_is_refused_with_the_accepted_forms(
    file: str, name: str, value: Any, error: type[Exception], message: str
) -> None:
    arguments: dict[str, Any] = {name: value}
    with pytest.raises(error) as caught:
        sluice.load_into(Net(), file, **arguments)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_an_empty_destination_is_not_the_current_directory(file: str) -> None:
    with pytest.raises(ValueError, match="destination is empty"):
        sluice.convert(file, "")


def test_several_devices_need_a_model(file: str) -> None:
    with pytest.raises(ValueError, match="device='auto' needs a model"):
        sluice.load_state_dict(file, device="auto")
    with pytest.raises(TypeError, match="several devices need a model"):
        sluice.load_state_dict(file, device={"": "cpu"})  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"need a model: allow_empty=$"):
        sluice.plan(None, file, allow_empty=True)
    with pytest.raises(ValueError, match=r"need a model: strict=, place=, device=$"):
        sluice.plan(None, file, strict=False, place="map", device="auto")
    with pytest.raises(ValueError, match=r"need a model: quantize=$"):
        sluice.plan(None, file, quantize="bitsandbytes")
    with pytest.raises(ValueError, match=r"need a model: rename=; without one, write rules=\[sluice\.rules\.rename\("):
        sluice.plan(None, file, rename={})
    assert sluice.load_state_dict(file, device=None)["weight"].device.type == "cpu"


def test_tracers_do_not_add_arguments(file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLUICE_SHARED_DIR", str(tmp_path / "store"))

    def look(frame: FrameType, *_: object) -> Any:
        return look if frame.f_locals else None

    former = sys.gettrace()
    try:
        sys.settrace(look)
        assert sluice.plan(Net(), file, place="shared").fits
        assert sluice.load_into(Net(), file, place="shared").tensors == 2
    finally:
        sys.settrace(former)


#: The package, for calls that a type checker refuses.
untyped: Any = sluice


def optimizer() -> torch.optim.Optimizer:
    return torch.optim.SGD(Net().parameters())


def scheduler() -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.ConstantLR(optimizer())


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: untyped.load_into("m.pth", Net()), "arguments are swapped: the first is a str, the second the model"),
        (lambda: untyped.plan(Path("m.pth"), Net()), "arguments are swapped"),
        (lambda: untyped.load_optimizer("m.pth", optimizer()), "swapped: the first is a str, the second the optimizer"),
        (lambda: untyped.save("new.pth", Net()), "obj is a path; the arguments are swapped"),
        (lambda: untyped.save("new.pth", {"a": torch.ones(1)}), "the arguments are swapped"),
        (lambda: untyped.save("m.pth", "new.pth"), r"convert\(source, destination\) copies a checkpoint"),
        (lambda: untyped.load_into(Net, "m.pth"), r"the class Net, not an instance; build it first: model = Net\("),
        (lambda: untyped.plan(Net, "m.pth"), r"plan\(model, source\): model is the class Net"),
        (lambda: untyped.load_optimizer(torch.optim.SGD, "m.pth"), "optimizer is the class SGD"),
        (lambda: untyped.load_optimizer(optimizer(), "m.pth", model=Net), "model is the class Net"),
        (lambda: untyped.load_optimizer(scheduler(), "m.pth"), "optimizer is a scheduler; pass"),
        (lambda: untyped.save(Net, "new.pth"), "obj is the class Net, not an instance"),
        (lambda: untyped.load_into(optimizer, "m.pth"), "model is a function; call it"),
        (lambda: untyped.load_into(None, "m.pth"), r"is None, .*; load_state_dict\(source\) loads without"),
        (lambda: untyped.load_into({}, "m.pth"), r"a dict, not a Module; load_state_dict\(source\) returns"),
        (lambda: untyped.load_optimizer(Net(), "m.pth"), r"optimizer is a module; load_into\(model, source\)"),
        (lambda: untyped.load_state_dict(Net()), r"source is a Net; sluice.load_into\(model, source\) loads"),
        (lambda: untyped.load_state_dict(Net(), "m.pth"), r"takes no module; load_into\(model, source\)"),
        (lambda: untyped.load_into(Net(), {}), "source is a dict; a state dict in memory needs no loading"),
        (lambda: untyped.load_into(Net(), None), "source is None; write the path"),
        (lambda: untyped.load_into(Net(), b"m.pth"), r"source is bytes; pass io.BytesIO\(data\)"),
        (lambda: untyped.save(Net(), b"new.pth"), "path is bytes; pass os.fsdecode"),
        (lambda: untyped.save(Net(), io.BytesIO()), "path is a BytesIO; pass the path of a file"),
        (lambda: untyped.convert("m.pth", 3), "destination is an int; write a path"),
        (lambda: untyped.convert("m.pth", "a.pt", overwrite="no"), "overwrite= is a str, not True or False"),
        (lambda: untyped.convert("m.pth", "a.pt", dry_run="no"), "dry_run= is a str, not True or False"),
        (lambda: untyped.merge(["m.pth"], "a.pt", overwrite="no"), "overwrite= is a str, not True or False"),
        (lambda: untyped.merge(["m.pth"], "a.pt", dry_run="no"), "dry_run= is a str, not True or False"),
        (lambda: untyped.save(Net(), "new.safetensors", metadata="x"), "metadata= is a str; write a dict"),
        (lambda: untyped.verify("m.pth", manifest=b"x"), "manifest is bytes; pass os.fsdecode"),
        (lambda: untyped.diff("m.pth", "m.pth", rtol="x"), "rtol= is a str, not a number"),
        (lambda: untyped.stream(Net(), "m.pth", blocks=5), "blocks must be a sequence of names of modules"),
        (lambda: untyped.hf.stream(".", blocks="fc"), "blocks must be a sequence of names of modules"),
        (lambda: untyped.refresh(Net(), "m.pth", lock=5), "lock= is an int, not a lock"),
        (lambda: untyped.shared("m.pth", directory=5), "directory is an int; write a path"),
        (lambda: untyped.load_into(Net(), "m.pth", rules=[5]), r"rules\[0\] is an int, not a rule"),
        (lambda: untyped.Limits(entries="5"), "not a number: entries"),
    ],
)  # fmt: skip
def test_a_wrong_object_is_recognized(file: str, call: Callable[[], object], message: str) -> None:
    with pytest.raises(TypeError, match=message) as caught:
        call()
    assert "\n" not in str(caught.value)
    assert os.listdir() == ["m.pth"]


def test_arguments_that_need_an_open_checkpoint(file: str) -> None:
    with sluice.open(file) as checkpoint:
        with pytest.raises(TypeError, match=r"obj is an open checkpoint; convert\(source, destination\) writes it"):
            untyped.save(checkpoint, "new.pth")
        with pytest.raises(TypeError, match="out= is an int, not a tensor"):
            checkpoint["weight"].read(out=5)  # type: ignore[arg-type]


def test_a_manifest_is_not_on_the_hub(file: str) -> None:
    with pytest.raises(sluice.MissingFileError) as caught:
        sluice.verify(file, manifest="hashes/manifest")
    assert caught.value.advice == "There is no directory 'hashes'."


def test_a_tilde_is_the_home_directory(file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "home").mkdir()
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    sluice.convert(file, "~/copy.pth", manifest="~/copy.json")
    sluice.save(Net(), Path("~/saved.pth"))
    assert {path.name for path in (tmp_path / "home").iterdir()} == {"copy.pth", "copy.json", "saved.pth"}
    assert sluice.verify("~/copy.pth", manifest="~/copy.json").ok
    assert sluice.diff(file, "~/copy.pth").same
    with pytest.raises(sluice.MissingFileError) as caught:
        sluice.open("~/none.pth")
    assert caught.value.file == str(tmp_path / "home" / "none.pth")
    (tmp_path / "~").mkdir()
    torch.save({"other": torch.ones(1)}, "~/copy.pth")
    assert list(sluice.load_state_dict("~/copy.pth")) == ["other"]  # a name that exists is taken literally
