"""Refreshes: only what changed is read, all of it is installed or nothing, and holders of the tensors see it."""

from __future__ import annotations

import contextlib
import errno
import io
import itertools
import json
import pickle
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any
from unittest import mock

import pytest
import safetensors.torch
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import sluice
from sluice import rules
from support.range_server import RangeServer
from support.ranks import Ranks
from support.system_calls import Injection, failing


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, 16)
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))
        self.head = nn.Linear(16, 50, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("steps", torch.zeros(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embedding(x)
        for layer in self.layers:
            x = layer(x).relu()
        y: torch.Tensor = self.head(x)
        return y


def written(model: nn.Module, path: Path, **options: Any) -> Path:
    sluice.save(model, path, overwrite=True, **options)
    return path


def changed_copy(model: Tied, *names: str) -> Tied:
    other = type(model)()
    other.load_state_dict(model.state_dict())
    with torch.no_grad():
        for name in names:
            other.get_parameter(name).add_(1)
    return other


def same(a: nn.Module, b: nn.Module) -> bool:
    return all(torch.equal(value, b.state_dict()[name]) for name, value in a.state_dict().items())


@pytest.mark.parametrize("torn", ["never", "undo", "allow"])
def test_only_what_changed_is_read_and_holders_see_it(tmp_path: Path, torn: Any) -> None:
    model, old = Tied(), written(Tied(), tmp_path / "a.pth")
    state = sluice.load_into(model, old).state
    new = changed_copy(model, "layers.1.weight", "embedding.weight")
    pointers = {name: value.data_ptr() for name, value in model.state_dict().items()}
    versions = {name: value._version for name, value in model.named_parameters()}
    refreshed = sluice.refresh(model, written(new, tmp_path / "b.pth"), since=state, torn=torn)
    assert same(model, new)
    assert model.head.weight is model.embedding.weight
    assert refreshed.changed == ("embedding.weight", "layers.1.weight")
    assert refreshed.unchanged == 6
    assert refreshed.report is not None
    assert sum(row.how == "kept" for row in refreshed.report.table()) == 6
    assert refreshed.report.loaded_bytes == 4 * (50 * 16 + 16 * 16)
    assert refreshed.report.read_bytes < 6_000  # with the gap between them
    assert {name: value.data_ptr() for name, value in model.state_dict().items()} == pointers
    moved = {name for name, value in model.named_parameters() if value._version > versions[name]}
    assert moved == {"embedding.weight", "layers.1.weight"}
    again = sluice.refresh(model, tmp_path / "b.pth", since=pickle.loads(pickle.dumps(refreshed)))
    assert pickle.loads(pickle.dumps(refreshed.report)).state.contents == refreshed.contents
    assert (again.changed, again.version) == ((), refreshed.version)


def test_what_is_known_of_a_file_decides(tmp_path: Path) -> None:
    model = Tied()
    path, manifest = tmp_path / "m.safetensors", tmp_path / "m.json"
    written(model, path, manifest=manifest)
    state = sluice.refresh(model, path, manifest=manifest)
    assert len(state.changed) == 8
    new = changed_copy(model, "layers.0.bias")
    written(new, path, manifest=manifest)
    assert sluice.refresh(model, path, since=state, manifest=manifest).changed == ("layers.0.bias",)
    assert len(sluice.refresh(model, path, since=state).changed) == 8  # safetensors has no checksums
    assert same(model, new)
    written(new, path, metadata={"model_version": "step 40"})
    assert sluice.refresh(model, path).version == "step 40"
    paths = [tmp_path / "1.pth", tmp_path / "2.pth"]
    torch.save({"weight": torch.ones(2, 2)}, paths[0])
    torch.save({"bias": torch.ones(2)}, paths[1])
    assert sluice.refresh(nn.Linear(2, 2), paths).version != "3"  # that of the format


def test_manifests_of_old_and_new_weights_are_compared(tmp_path: Path) -> None:
    model = Tied()
    old, new = tmp_path / "old.json", tmp_path / "new.json"
    written(model, tmp_path / "a.safetensors", manifest=old)
    path = written(changed_copy(model, "layers.0.bias"), tmp_path / "b.safetensors", manifest=new)
    with pytest.raises(TypeError, match="needs manifest="):
        sluice.refresh(model, path, since=old)
    empties: list[Any] = ["", {}]
    for empty in empties:
        with pytest.raises(sluice.CheckpointError, match=r"the path is empty|not a manifest"):
            sluice.refresh(model, path, since=empty, manifest=new)
    lacking = [json.loads(each.read_bytes()) for each in (old, new)]
    for content in lacking:
        del content["tensors"]["steps"]  # unknown, so it is read
    for each in (new, lacking[1]):
        assert set(sluice.refresh(model, path, since=lacking[0], manifest=each).changed) == {"layers.0.bias", "steps"}
    state = sluice.refresh(model, path, since=old, manifest=json.loads(new.read_bytes()))
    assert state.changed == ("layers.0.bias",)
    assert sluice.verify(model=model, manifest=new).ok


@pytest.mark.parametrize(("validators", "known"), [("strong", True), ("weak", False), ("modified", False)])
def test_an_equal_etag_reads_nothing(validators: Any, *, known: bool) -> None:
    pytest.importorskip("urllib3", reason="the extra 'remote' is not installed")
    contents = [safetensors.torch.save({"weight": torch.full((64, 64), value)}) for value in (1.0, 2.0)]
    model = nn.Linear(64, 64, bias=False)
    with RangeServer({"/m.safetensors": contents[0]}, validators=validators) as server:
        state = sluice.load_into(model, server.url("/m.safetensors")).state
        again = sluice.refresh(model, server.url("/m.safetensors"), since=state)
        assert again.report is not None
        assert (again.changed, again.report.read_bytes) == ((), 0) if known else (("weight",), 16384)
        assert state is not None
        assert (again.version == state.version) == known
        server.files["/other.safetensors"] = contents[0]  # another object with an equal ETag
        moved = sluice.refresh(model, server.url("/other.safetensors"), since=again)
        assert moved.changed == ("weight",)
        server.files["/m.safetensors"] = contents[1]
        assert sluice.refresh(model, server.url("/m.safetensors"), since=again).changed == ("weight",)
    assert torch.equal(model.weight, torch.full((64, 64), 2.0))
    with pytest.raises(TypeError, match="since is a dict, but not the content of a manifest"):
        sluice.refresh(model, io.BytesIO(contents[0]), since={"weight": model.weight})
    memory = [io.BytesIO(content) for content in contents]  # of one size; nothing else is known
    state = sluice.refresh(model, memory[0])
    assert sluice.refresh(model, memory[1], since=state).changed == ("weight",)


@pytest.mark.parametrize("torn", ["never", "allow"])
@pytest.mark.parametrize("suffix", [".pth", ".safetensors"])  # with checksums and without
def test_copies_of_tied_tensors_are_compared(tmp_path: Path, suffix: str, torn: Any) -> None:
    model = nn.ModuleDict({"a": nn.Linear(8, 8, bias=False), "b": nn.Linear(8, 8, bias=False)})
    values = torch.ones(8, 8)
    model["b"].weight = model["a"].weight
    tied, untied = tmp_path / f"tied{suffix}", tmp_path / f"untied{suffix}"
    sluice.save({"a.weight": values, "b.weight": values.clone()}, tied)
    sluice.save({"a.weight": values, "b.weight": values + 1}, untied)
    state = sluice.load_into(model, tied).state
    again = sluice.refresh(model, tied, since=state, torn=torn)
    assert state is not None
    assert (again.changed, again.unchanged, again.version) == ((), 1, state.version)
    with pytest.raises(sluice.MismatchError, match="are tied in the model and differ"):
        sluice.refresh(model, untied, since=state, torn=torn)
    report = sluice.refresh(model, untied, since=state, torn=torn, strict=False).report
    assert report is not None
    assert "are tied in the model and differ" in str(report.notes)


def test_a_streamed_model_is_refused(tmp_path: Path) -> None:
    path = written(nn.Linear(8, 8), tmp_path / "m.pth")
    model = nn.Linear(8, 8)
    outer = nn.Sequential(model)
    with sluice.stream(model, path):
        for verb, each in itertools.product((sluice.refresh, sluice.load_into, sluice.plan), (model, outer)):
            with pytest.raises(sluice.StreamError, match="a streamed model cannot"):
                verb(each, path)
    sluice.load_into(model, path)
    sluice.refresh(model, path)


def test_inference_tensors_are_filled(tmp_path: Path) -> None:
    with torch.inference_mode():
        model = nn.Linear(8, 8)
    model.bias = nn.Parameter(torch.zeros(8))  # an ordinary one after that
    saved = nn.Linear(8, 8)
    path = written(saved, tmp_path / "m.pth")
    sluice.refresh(model, path)
    assert same(model, saved)
    with torch.inference_mode():
        sluice.refresh(saved, path)
    assert saved.weight._version > 0


def test_casts_and_rules_follow_the_load(tmp_path: Path) -> None:
    saved = nn.Linear(8, 8)
    path = written(saved, tmp_path / "a.pth")
    model = nn.Linear(8, 8, device="meta")
    arguments: dict[str, Any] = {"dtype": "bf16", "rules": [rules.transpose("weight")]}
    state = sluice.load_into(model, path, **arguments).state
    with torch.no_grad():
        saved.weight.mul_(2)
    new = sluice.refresh(model, written(saved, tmp_path / "b.pth"), since=state, **arguments)
    assert new.changed == ("weight",)
    assert torch.equal(model.weight, saved.weight.t().to(torch.bfloat16))
    with pytest.raises(sluice.MismatchError, match="cannot be filled in place"):
        sluice.refresh(nn.Linear(8, 8), path, dtype="bf16")


def holds(model: nn.Module, versions: list[Any]) -> list[bool]:
    """Return which of the versions a model holds; it refuses calls if it holds none."""
    held = [same(model, version) for version in versions]
    if not any(held):
        with pytest.raises(sluice.StreamError):
            model(torch.tensor([1]))
    return held


def pair(tmp_path: Path) -> tuple[list[Tied], list[Path]]:
    old = Tied()
    versions = [old, changed_copy(old, "embedding.weight", "layers.0.weight", "layers.2.bias")]
    return versions, [written(each, tmp_path / f"{i}.pth") for i, each in enumerate(versions)]


@pytest.mark.parametrize("torn", ["never", "undo", "allow"])
def test_every_failed_read_leaves_old_or_new_or_refused(
    tmp_path: Path, torn: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    (old, new), files = pair(tmp_path)
    model, failed = Tied(), 0
    for at in range(1, 100):
        state = sluice.load_into(model, files[0]).state
        with monkeypatch.context() as patch:
            injection = Injection(patch, failing(errno.EIO), at)
            try:
                sluice.refresh(model, files[1], since=state, torn=torn)
            except (sluice.ReadError, sluice.PartialLoadError) as error:
                failed += 1
                assert same(model, old) or isinstance(error, sluice.PartialLoadError)
        if not injection.hits:
            break
        held = holds(model, [old, new])
        assert torn == "allow" or held == [True, False]
        if not held[0]:  # what it holds is unknown, so the old state does not count
            sluice.refresh(model, files[0], since=state)
            assert holds(model, [old]) == [True]
    assert failed > 1
    assert holds(model, [new]) == [True]


# An interrupt between the opening of a file and its with statement drops the file object: it is closed, with a warning.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("torn", ["never", "allow"])
def test_interrupts_leave_old_or_new_or_refused(tmp_path: Path, torn: Any) -> None:
    versions, files = pair(tmp_path)
    model, random, interrupted = Tied(), Random(1), 0
    former = signal.signal(signal.SIGALRM, signal.default_int_handler)
    try:
        for step in range(60):
            try:
                signal.setitimer(signal.ITIMER_REAL, random.uniform(0.001, 0.03))
                sluice.refresh(model, files[step % 2], torn=torn)
                signal.setitimer(signal.ITIMER_REAL, 0)
            except KeyboardInterrupt:
                interrupted += 1
            if step:
                holds(model, versions)
            else:
                sluice.refresh(model, files[0])
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, former)
    assert interrupted


@pytest.mark.parametrize("error", [OSError, KeyboardInterrupt])
@pytest.mark.parametrize("again", [False, True])
def test_a_lock_that_fails_leaves_the_old_weights_or_names_the_new(
    tmp_path: Path, error: type[BaseException], *, again: bool
) -> None:
    (old, new), files = pair(tmp_path)
    model, asked = Tied(), list[str]()
    state = sluice.load_into(model, files[0]).state

    @contextlib.contextmanager
    def lock(path: str) -> Iterator[None]:
        asked.append(path)
        if path == "layers.0" or (again and "layers.0" in asked):
            raise error("planted")
        yield

    with pytest.raises((sluice.PartialLoadError, OSError, KeyboardInterrupt)) as caught:
        sluice.refresh(model, files[1], since=state, lock=lock)
    assert holds(model, [old, new]) == [not again, False]
    assert isinstance(caught.value, sluice.PartialLoadError if again and error is OSError else error)
    text = str(caught.value) + "".join(getattr(caught.value, "__notes__", ()))
    assert ("1 done, 0 torn, 2 untouched" in text) == again
    busy = mock.NonCallableMagicMock(__enter__=mock.Mock(side_effect=OSError("busy")))
    with pytest.raises(OSError, match="busy"):
        sluice.refresh(model, files[1], since=state, lock=busy)  # before anything changes
    assert sluice.refresh(model, files[0], since=state).changed or not again
    assert holds(model, [old]) == [True]


def test_an_interrupt_between_any_two_copies_leaves_the_old_weights(tmp_path: Path) -> None:
    torch.manual_seed(0)
    (old, new) = versions = [nn.Linear(3000, 3000), nn.Linear(3000, 3000)]  # several pieces
    files = [written(each, tmp_path / f"{i}.pth") for i, each in enumerate(versions)]
    model, interrupted = nn.Linear(3000, 3000), 0
    state = sluice.load_into(model, files[0]).state

    class Interrupt(TorchDispatchMode):  # type: ignore[no-untyped-call]
        left = 0

        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if function in {torch.ops.aten.copy_.default, torch.ops.aten.clone.default}:
                self.left -= 1
                if self.left == 0:
                    raise KeyboardInterrupt
            return function(*args, **(kwargs or {}))

    for interrupted in range(1, 100):
        with Interrupt() as mode, contextlib.suppress(KeyboardInterrupt):  # type: ignore[no-untyped-call]
            mode.left = interrupted
            sluice.refresh(model, files[1], since=state)
        if mode.left > 0:
            break
        assert same(model, old)
    assert interrupted > 20
    assert same(model, new)


def test_memory_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    model = nn.Linear(2048, 2048)
    path = written(model, tmp_path / "a.pth")
    with pytest.raises(sluice.BudgetError, match=r"torn='allow': it needs no memory for what changed\.$"):
        sluice.refresh(model, path, memory=sluice.MemoryLimits(host="20MiB", staging="1MiB"))
    sluice.refresh(model, path, memory=sluice.MemoryLimits(host="48MiB", staging="1MiB"), torn="allow")


def test_columns_of_a_matrix_need_memory_for_themselves_alone(tmp_path: Path) -> None:
    fused, model = torch.zeros(1024, 3072), nn.ParameterList(torch.ones(1024, 1024) for _ in range(3))
    path = written(model, tmp_path / "a.pth")
    for number in range(3):
        model[number] = nn.Parameter(fused[:, number * 1024 : (number + 1) * 1024])
    report = sluice.refresh(model, path, memory=sluice.MemoryLimits(host="30MiB", staging="1MiB")).report
    assert report is not None
    assert report.final_bytes == fused.nbytes
    assert torch.equal(fused, torch.ones(1024, 3072))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lock = threading.Lock()
        self.query, self.key = nn.Linear(64, 64, bias=False), nn.Linear(64, 64, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with self.lock:
            return torch.cat([self.query(x), self.key(x)])


@pytest.mark.parametrize("per_block", [False, True])
def test_no_forward_sees_two_versions(tmp_path: Path, *, per_block: bool) -> None:
    model, whole, seen = nn.ModuleList(Block() for _ in range(4)), threading.Lock(), set[tuple[float, ...]]()
    names = list(model.state_dict())
    for number in range(3):
        torch.save({name: torch.full((64, 64), float(number)) for name in names}, tmp_path / f"{number}.pth")
    sluice.load_into(model, tmp_path / "0.pth")
    stop = threading.Event()

    def serve() -> None:
        with torch.no_grad():
            while not stop.is_set():
                with contextlib.nullcontext() if per_block else whole:
                    outputs = [block(torch.eye(64)).unique().tolist() for block in model]
                seen.update(map(tuple, outputs if per_block else [sorted({y for x in outputs for y in x})]))

    lock: Any = (lambda path: model.get_submodule(path.split(".")[0]).lock) if per_block else whole
    thread = threading.Thread(target=serve)
    thread.start()
    try:
        for step in range(30):
            sluice.refresh(model, tmp_path / f"{step % 3}.pth", lock=lock)
    finally:
        stop.set()
        thread.join()
    assert seen <= {(0.0,), (1.0,), (2.0,)}
    assert model[3](torch.eye(64)).unique().tolist() == [2.0]


def test_a_lock_for_each_module_covers_its_own_tensors(tmp_path: Path) -> None:
    model = Tied()
    path = written(changed_copy(model, "layers.0.weight"), tmp_path / "b.pth")
    held: list[tuple[str, set[str]]] = []

    @contextlib.contextmanager
    def lock(module: str) -> Iterator[None]:
        before = {name: value._version for name, value in model.named_parameters()}
        yield
        held.append((module, {name for name, value in model.named_parameters() if value._version > before[name]}))

    sluice.refresh(model, path, lock=lock)
    assert dict(held)["layers.0"] == {"layers.0.weight", "layers.0.bias"}
    assert sorted(module for module, _ in held) == ["", "embedding", "head", "layers.0", "layers.1", "layers.2"]
    assert dict(held)["embedding"] == dict(held)["head"] == {"embedding.weight"}  # tied: both are held


class _Stateful(Tied):
    def get_extra_state(self) -> int:
        return 1

    def set_extra_state(self, state: int) -> None:
        pass


def divided(old: Path, new: Path, fail: str) -> tuple[bool, str]:
    """Refresh a divided model on each rank; return whether it has the new weights, and the error."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model = _Stateful()
    fully_shard(model, mesh=init_device_mesh("cpu", (torch.distributed.get_world_size(),)))
    state = sluice.load_into(model, old).state
    error, seen = "", list[torch.Tensor]()
    planted = mock.Mock(side_effect=OSError("planted"))
    failing = {fail: planted} if torch.distributed.get_rank() == 1 else {}
    weight: Any = model.get_parameter("layers.1.weight")
    model.register_load_state_dict_post_hook(lambda *_: seen.append(weight.to_local().clone()))  # type: ignore[no-untyped-call]
    if "hook" in failing:
        model.register_load_state_dict_post_hook(planted)  # type: ignore[no-untyped-call]
    known = state if torch.distributed.get_rank() == 0 else None  # what changed may differ between ranks
    try:
        sluice.refresh(model, new, since=known, progress=failing.get("read", False), lock=failing.get("lock"))
    except sluice.RankError as caught:
        error = str(caught)
    if fail == "hook":
        with pytest.raises(sluice.StreamError, match="the load failed"):  # on every rank: one alone would wait
            model(torch.zeros(1, dtype=torch.int64))
    assert not seen or torch.equal(seen[-1], weight.to_local())  # what hooks compute is that of the weights
    return torch.equal(weight.full_tensor(), torch.load(new)["layers.1.weight"]), error


@pytest.mark.ranks
@pytest.mark.parametrize("fail", ["", "read", "lock", "hook"])
def test_ranks_change_together_or_not_at_all(tmp_path: Path, two_ranks: Ranks, fail: str) -> None:
    model = _Stateful()
    old = written(model, tmp_path / "a.pth")
    new = written(changed_copy(model, "layers.1.weight"), tmp_path / "b.pth")
    outcomes = two_ranks.run(divided, old, new, fail)
    assert [done for done, _ in outcomes] == [fail in {"", "hook"}] * 2
    text = "the tensors are new on rank 0, new in part on rank 1" if fail == "hook" else "nothing was changed"
    text = "no tensor was changed, but extra state may be new" if fail == "lock" else text
    assert all(("planted" in error and text in error) == bool(fail) for _, error in outcomes)
