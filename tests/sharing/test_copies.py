"""``sluice.shared``: the key of a copy, one builder, killed builders, and models that map a copy."""

from __future__ import annotations

import io
import os
import random
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import sluice
from sluice.sharing import store as stores
from support import fresh_process
from support.range_server import RangeServer
from support.trained_net import empty

pytestmark = pytest.mark.usefixtures("fresh_processes")

_BUILD = """
import sys, time, sluice
copy = sluice.shared(sys.argv[1], directory=sys.argv[2], dtype="bf16")
print(int(copy.built), copy.key)
time.sleep(float(sys.argv[3]))
"""


def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))


@pytest.fixture
def model() -> nn.Module:
    torch.manual_seed(0)
    return net()


@pytest.fixture
def path(model: nn.Module, tmp_path: Path) -> Path:
    sluice.save(model.state_dict(), tmp_path / "model.safetensors")
    return tmp_path / "model.safetensors"


@pytest.fixture(autouse=True)
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SLUICE_SHARED_DIR", str(tmp_path / "store"))
    return tmp_path / "store"


def test_the_second_call_finds_what_the_first_has_built_until_it_is_closed(path: Path) -> None:
    with sluice.shared(path, dtype="bf16") as first, sluice.shared(path, dtype=torch.bfloat16) as second:
        assert (first.built, second.built) == (True, False)
        assert first.path == second.path
        assert first.nbytes == os.stat(first.path).st_size
        assert sluice.load_state_dict(first)["0.weight"].dtype == torch.bfloat16
        report = sluice.load_into(empty(net), first)
    assert (report.mapped_bytes, dict(report.cast)) == (0, {"bfloat16->float32": 4})  # a cast is copied
    with pytest.raises(ValueError, match="closed"):
        sluice.load_into(empty(net), first)


def test_keys_differ_by_content_and_by_arguments(model: nn.Module, path: Path, tmp_path: Path) -> None:
    sluice.save({name: -tensor for name, tensor in model.state_dict().items()}, tmp_path / "tuned.safetensors")
    arguments: list[dict[str, Any]] = [
        {},
        {"dtype": "bf16"},
        {"rename": lambda name: f"x.{name}"},
        {"rules": [sluice.rules.transpose("0.weight")]},
        {"rules": [sluice.rules.transpose("1.weight")]},
    ]
    keys = [
        sluice.shared(source, **each).key for source in (path, tmp_path / "tuned.safetensors") for each in arguments
    ]
    assert len(set(keys)) == len(keys)
    before = sluice.shared(path).key
    sluice.save({name: 2 * tensor for name, tensor in model.state_dict().items()}, path, overwrite=True)
    assert sluice.shared(path).key != before


def test_values_are_those_of_an_own_load_and_writes_stay_private(path: Path) -> None:
    first, second, own = empty(net), empty(net), empty(net)
    sluice.load_into(own, path, dtype="bf16")
    memory = sluice.MemoryLimits(staging="1MiB")  # less than a conversion takes
    assert sluice.load_into(first, path, dtype="bf16", place="shared", memory=memory).mapped_bytes > 0
    with torch.no_grad():
        first.get_parameter("0.weight").zero_()
    report = sluice.load_into(second, path, dtype="bf16", place="shared")
    assert report.mapped_bytes == sum(tensor.nbytes for tensor in own.state_dict().values())
    for name, tensor in own.state_dict().items():
        assert torch.equal(second.state_dict()[name], tensor), name


def test_key_rename_and_rules_are_applied_once(model: nn.Module, tmp_path: Path) -> None:
    state = {f"old.{name}": tensor.t().contiguous() for name, tensor in model.state_dict().items()}
    torch.save({"model": state, "epoch": 3}, tmp_path / "run.pt")
    loaded = empty(net)
    rules = [sluice.rules.transpose("*.weight")]
    sluice.load_into(loaded, tmp_path / "run.pt", place="shared", key="model", rename={"old.**": "**"}, rules=rules)
    assert all(map(torch.equal, loaded.state_dict().values(), model.state_dict().values()))


class _Versioned(nn.Module):
    """Transposes the weight of an older version, and has extra state."""

    _version = 2

    def __init__(self, state: object = None) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(3, 3))
        self.state = state

    def _load_from_state_dict(self, state_dict: Any, prefix: str, local_metadata: Any, *others: Any) -> None:
        if (local_metadata.get("version") or 1) < 2:
            state_dict[prefix + "weight"] = state_dict[prefix + "weight"].t()
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *others)

    def get_extra_state(self) -> object:
        return self.state

    def set_extra_state(self, state: object) -> None:
        self.state = state


@pytest.mark.parametrize("state", [{"steps": [1, 2], "name": "x"}, torch.arange(4)])
def test_versions_and_extra_state_are_those_of_an_own_load(tmp_path: Path, state: Any) -> None:
    saved = _Versioned(state)
    saved.weight.data = torch.arange(9.0).view(3, 3)
    torch.save({"old": saved.state_dict(), "epoch": 3}, tmp_path / "model.pth")
    for source in (tmp_path / "model.pth", sluice.shared(tmp_path / "model.pth", dtype="float32")):
        loaded = _Versioned()
        report = sluice.load_into(loaded, source, place="shared", dtype="float32")
        assert torch.equal(loaded.weight, saved.weight)
        assert str(loaded.state) == str(state)
        assert report.source == str(tmp_path / "model.pth")


@pytest.mark.parametrize("state", [{"scale": torch.ones(2)}, torch.ones(2)])
def test_extra_state_that_a_copy_would_change_is_refused(tmp_path: Path, store: Path, state: Any) -> None:
    torch.save(_Versioned(state).state_dict(), tmp_path / "model.pth")
    with pytest.raises(sluice.UnsupportedError, match=r"'_extra_state'(?s:.)*place='copy'"):
        sluice.load_into(_Versioned(), tmp_path / "model.pth", place="shared", dtype="bf16")
    assert not list(store.iterdir())


def test_dtypes_are_those_of_an_own_load(tmp_path: Path) -> None:
    torch.save({**nn.Linear(4, 4).state_dict(prefix="0."), "steps": torch.tensor([7])}, tmp_path / "model.pth")
    loaded = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).to("meta")
    loaded.register_buffer("steps", torch.zeros(1, dtype=torch.int32))
    sluice.load_into(loaded, tmp_path / "model.pth", place="shared", dtype="bf16", strict=False)
    dtypes = {name: each.dtype for name, each in loaded.state_dict().items()}
    assert dtypes.pop("steps") == torch.int32
    assert set(dtypes.values()) == {torch.bfloat16}


def test_two_addresses_with_one_etag_are_two_copies(model: nn.Module, path: Path, tmp_path: Path) -> None:
    """Servers make ETags of sizes and times, and fine-tunes that are copied together have both in common."""
    pytest.importorskip("urllib3", reason="the extra 'remote' is not installed")
    tuned = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    tuned["0.weight"][32] += 1  # not near the ends of the file, of which this server makes its ETag
    sluice.save(tuned, tmp_path / "tuned.safetensors")
    contents = {f"/{each.stem}": each.read_bytes() for each in (path, tmp_path / "tuned.safetensors")}
    with RangeServer(contents) as server:
        loaded = [empty(net), empty(net)]
        for each, name in zip(loaded, contents, strict=True):
            sluice.load_into(each, server.url(name), place="shared")
        server.validators = "modified"
        with pytest.raises(sluice.UnsupportedError, match="strong ETag"):
            sluice.shared(server.url("/model"))
    assert torch.equal(loaded[0].get_parameter("0.weight"), model.get_parameter("0.weight"))
    assert torch.equal(loaded[1].get_parameter("0.weight"), tuned["0.weight"])


def test_a_copy_of_a_cached_url_is_that_of_its_first_download(path: Path, tmp_path: Path) -> None:
    pytest.importorskip("urllib3", reason="the extra 'remote' is not installed")
    with RangeServer({"/m": path.read_bytes()}) as server:
        remote = sluice.Remote(server.url("/m"), cache=tmp_path / "cache")
        with sluice.shared(remote) as first, sluice.shared(remote) as second:
            assert (first.built, second.built) == (True, False)


def test_a_base_under_deltas_is_shared(model: nn.Module, path: Path, tmp_path: Path) -> None:
    model.get_parameter("0.bias").data += 1
    sluice.save(model, tmp_path / "new.safetensors")
    sluice.diff(path, tmp_path / "new.safetensors", patch=tmp_path / "delta.safetensors", sparse=True)
    patched, loaded = sluice.Patched(path, tmp_path / "delta.safetensors"), empty(net)
    sluice.load_into(loaded, patched, place="shared")
    assert torch.equal(loaded.get_parameter("0.bias"), model.get_parameter("0.bias"))
    with sluice.shared(patched) as copy, sluice.shared(path) as base:
        assert not copy.built
        assert copy.key != base.key


@pytest.mark.parametrize("dtype", [None, "bf16"])
def test_casts_of_rules_are_those_of_a_load(path: Path, dtype: str | None) -> None:
    changes: dict[str, Any] = {"dtype": dtype, "rules": [sluice.rules.cast("0.*", "float16")]}
    own, mapped = empty(net), empty(net)
    sluice.load_into(own, path, **changes)
    plan = sluice.plan(mapped, path, place="shared", **changes)
    assert sluice.load_into(mapped, path, place="shared", **changes).mapped_bytes == plan.mapped_bytes > 0
    assert {name: each.dtype for name, each in own.state_dict().items()} == {
        name: each.dtype for name, each in mapped.state_dict().items()
    }
    mixed = empty(net)
    mixed.get_submodule("0").half()
    if dtype is None:
        with pytest.raises(ValueError, match=r"several \(float16, float32\)"):
            sluice.load_into(mixed, path, place="shared", **changes)


def test_a_plan_shows_the_mapping_before_and_after_the_build(path: Path, store: Path) -> None:
    before = sluice.plan(empty(net), path, dtype="bf16", place="shared")
    assert not list(store.iterdir())
    assert any("not built yet" in note for note in before.notes)
    copy = sluice.shared(path, dtype="bf16")
    after = sluice.plan(empty(net), path, dtype="bf16", place="shared")
    assert (before.source, before.files) == (after.source, after.files) == (str(path), (copy.path,))
    again = sluice.plan(empty(net), copy, dtype="auto")
    assert before.mapped_bytes == after.mapped_bytes == again.mapped_bytes > 0
    assert sluice.plan(None, copy).total == 4


@pytest.mark.parametrize("replaced", [True, False])
def test_a_copy_is_read_only_and_built_again_once_it_was_changed(
    path: Path, monkeypatch: pytest.MonkeyPatch, *, replaced: bool
) -> None:
    with sluice.shared(path) as copy:
        assert os.stat(copy.path).st_mode & 0o777 == 0o400
    os.chmod(copy.path, 0o600)
    if replaced:
        sluice.convert(path, copy.path, dtype="bf16", overwrite=True)
    else:
        with open(copy.path, "r+b") as file:
            file.seek(-4, os.SEEK_END)
            file.write(bytes(4))
    assert "not built yet" in sluice.plan(empty(net), path, place="shared").notes[-1]
    with sluice.shared(path) as again:
        assert again.built
        assert Path(again.path).read_bytes() == path.read_bytes()
        os.utime(again.path)
        monkeypatch.setattr("sluice.sharing.copies._WORD_SECONDS", 0.05)
        with pytest.raises(sluice.SaveError, match="was changed while it is in use"):
            sluice.shared(path)


def test_what_cannot_be_shared_is_refused_by_name(path: Path, store: Path) -> None:
    with pytest.raises(sluice.UnsupportedError, match="Write it to a file"):
        sluice.shared(io.BytesIO(path.read_bytes()))  # which has no identity
    with pytest.raises(ValueError, match=r"place='shared' does not quantize.*sluice\.save"):
        sluice.load_into(empty(net), path, place="shared", quantize=lambda model: model)
    with pytest.raises(TypeError, match="quantize"):
        sluice.shared(path, quantize=object())  # type: ignore[call-arg]
    assert not list(store.iterdir())


def test_a_copy_lives_as_long_as_its_models(path: Path, store: Path) -> None:
    model = empty(net)
    sluice.load_into(model, path, place="shared")
    (copy,) = stores.copies(store)
    assert copy.in_use
    assert not stores.drop(store, copy.key)
    del model
    assert stores.drop(store, copy.key)
    assert not list(store.iterdir())


def test_processes_that_start_together_build_once(path: Path, store: Path) -> None:
    sluice.save({f"w{number}": torch.full((256, 1024), float(number)) for number in range(16)}, path, overwrite=True)
    started = [fresh_process.Process([sys.executable, "-c", _BUILD, str(path), str(store), "0"]) for _ in range(3)]
    lines = []
    for process in started:
        with process:
            lines.append(process.stdout.read().split())
    assert sorted(built for built, _ in lines) == ["0", "0", "1"]
    assert len({key for _, key in lines}) == 1


def test_a_forked_child_uses_the_copy_of_its_parent(path: Path, store: Path) -> None:
    code = """
import os, sys, sluice
from sluice.sharing import copies, store
from pathlib import Path
copies._WAIT_SECONDS, (ours, theirs), children = 1, os.pipe(), []
def fork(_):  # while the copy is built
    if not children:
        children.append(os.fork())
        if not children[0]:
            os.close(theirs)
            os.read(ours, 1)
            os._exit(0)
copy = sluice.shared(sys.argv[1], progress=fork)
copy.close()
print(store.drop(Path(sys.argv[2]), copy.key))
os.close(theirs)
os.wait()
print(store.drop(Path(sys.argv[2]), copy.key))
"""
    done = fresh_process.run(code, path, store)
    assert done.stdout.split() == ["False", "True"], done.stderr


def test_a_killed_builder_leaves_nothing_or_a_complete_copy(path: Path, store: Path) -> None:
    tensors = {f"w{number}": torch.full((512, 1024), float(number)) for number in range(24)}
    sluice.save(tensors, path, overwrite=True)
    choose = random.Random(5)
    for _ in range(6):
        with fresh_process.Process([sys.executable, "-c", _BUILD, str(path), str(store), "0"]) as process:
            time.sleep(choose.uniform(0.0, 0.15))
            os.kill(process.pid, signal.SIGKILL)
            process.wait()
        with sluice.shared(path, dtype="bf16") as copy:
            found = sluice.load_state_dict(copy)
            assert all(torch.equal(found[name], tensor.bfloat16()) for name, tensor in tensors.items())
            assert sorted(os.listdir(os.path.dirname(copy.path))) == ["lock", "model.safetensors"]
        assert stores.drop(store, copy.key)


def test_waiting_has_a_word_and_a_bound(
    path: Path, store: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with sluice.shared(path) as copy:
        key = copy.key
    stores.drop(store, key)
    builder = stores.lock_free(store / key)
    assert builder is not None
    monkeypatch.setattr("sluice.sharing.copies._WORD_SECONDS", 0.05)
    monkeypatch.setattr("sluice.sharing.copies._WAIT_SECONDS", 0.2)
    with pytest.raises(sluice.SaveError, match="another process has been building"):
        sluice.shared(path)
    assert "waiting for another process" in caplog.text
    builder.close()
    assert sluice.shared(path).built
