"""Models of the Hub: the real huggingface_hub against a server that answers as the Hub does."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import huggingface_hub
import pytest
import torch
from huggingface_hub import constants

import sluice
from sluice import _defaults as defaults
from sluice.sources.remote.caching import CompleteFile
from sluice.sources.remote.hub import HubAddress, parse_address
from support.range_server import RangeServer, cut, moved, status
from support.torch_files import saved

COMMIT = "5f0e1b2c" * 5
OLDER = "0a1b2c3d" * 5
SHARDS = {
    "model-00001-of-00002.safetensors": {"a": torch.arange(6.0).view(2, 3)},
    "model-00002-of-00002.safetensors": {"b": torch.arange(4, dtype=torch.bfloat16)},
}


def contents() -> dict[str, bytes]:
    """Return the files of the model ``org/net``."""
    from safetensors.torch import save

    files = {name: save(tensors) for name, tensors in SHARDS.items()}
    weight_map = {name: file for file, tensors in SHARDS.items() for name in tensors}
    return {
        **files,
        "model.safetensors.index.json": json.dumps({"metadata": {}, "weight_map": weight_map}).encode(),
        "old/net.pth": saved({"w": torch.ones(3)}),
        "part/model.safetensors": save({"w": torch.ones(3)}),
        "README.md": b"# net",
    }


def information(names: Iterable[str]) -> bytes:
    """Return what the hub says about a model with some files."""
    return json.dumps({"id": "org/net", "sha": COMMIT, "siblings": [{"rfilename": name} for name in names]}).encode()


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[RangeServer]:
    """Start the server, and make it the hub of an empty cache."""
    files = contents()
    served = {f"/api/models/{name}/revision/main": information(files) for name in ("org/net", "net")}
    served |= {f"/org/net/resolve/{COMMIT}/{name}": content for name, content in files.items()}
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("HF_TOKEN", raising=False)
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "token"))
    with RangeServer(served) as server:
        monkeypatch.setenv("HF_ENDPOINT", server.url(""))
        yield server
    huggingface_hub.close_session()


def data_requests(server: RangeServer) -> list[str]:
    return [request.path.rpartition("/")[2] for request in server.requests if "/resolve/" in request.path]


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("hf://org/net", ("org/net", "main", "")),
        ("hf://models/org/net/", ("org/net", "main", "")),
        ("hf://gpt2", ("gpt2", "main", "")),
        ("hf://gpt2/model.safetensors", ("gpt2", "main", "model.safetensors")),
        ("hf://org/model.zip", ("org/model.zip", "main", "")),
        ("hf://gpt2/tf_model.h5", ("gpt2", "main", "tf_model.h5")),
        ("hf://gpt2@v1/sub/model.bin", ("gpt2", "v1", "sub/model.bin")),
        ("hf://org/net@refs/pr/3/model.bin", ("org/net", "refs/pr/3", "model.bin")),
        ("hf://org/net@a%2Fb/old/net.pth", ("org/net", "a/b", "old/net.pth")),
    ],
)
def test_parts_of_an_address(url: str, expected: tuple[str, str, str]) -> None:
    address = parse_address(url)
    assert address == HubAddress(repository=expected[0], revision=expected[1], path=expected[2])


@pytest.mark.parametrize("url", ["hf://", "hf://org/net@/x", "hf://org/ne t", "hf://../x"])
def test_what_is_no_address(url: str) -> None:
    with pytest.raises(sluice.RemoteError, match="OWNER/NAME"):
        parse_address(url)


def test_datasets_are_refused() -> None:
    with pytest.raises(sluice.UnsupportedError, match="only models"):
        sluice.open("hf://datasets/org/rows/x.pt")


def test_a_model_of_shards_is_read_from_one_commit(hub: RangeServer) -> None:
    state = sluice.load_state_dict("hf://org/net")
    expected = {name: tensor for tensors in SHARDS.values() for name, tensor in tensors.items()}
    assert {name: tensor.tolist() for name, tensor in state.items()} == {n: t.tolist() for n, t in expected.items()}
    assert sorted(data_requests(hub)) == [*SHARDS, "model.safetensors.index.json"]
    assert sum("/api/" in request.path for request in hub.requests) == 1


@pytest.mark.parametrize("path", ["/old/net.pth", "@main/old/net.pth", "/weights", "/old/weights", "/part"])
def test_of_a_file_or_directory_the_revision_is_resolved_once(hub: RangeServer, path: str) -> None:
    """Also for a file whose name does not tell that it is one."""
    names = [*contents(), "weights", "old/weights"]
    hub.files["/api/models/org/net/revision/main"] = information(names)
    for name in names[-2:]:
        hub.files[f"/org/net/resolve/{COMMIT}/{name}"] = contents()["old/net.pth"]
    assert sluice.load_state_dict(f"hf://org/net{path}")["w"].tolist() == [1, 1, 1]
    assert sum("/api/" in request.path for request in hub.requests) == 1


def cached(tmp_path: Path, names: list[str], commit: str = COMMIT) -> None:
    """Put files into the cache of huggingface_hub, as the commit of ``main``."""
    model = tmp_path / "cache" / "models--org--net"
    (model / "refs").mkdir(parents=True)
    (model / "refs" / "main").write_text(commit)
    snapshot = model / "snapshots" / commit
    snapshot.mkdir(parents=True)
    for name in names:
        (snapshot / name).write_bytes(contents()[name])


def test_cached_files_are_read_from_the_cache(hub: RangeServer, tmp_path: Path) -> None:
    first = next(iter(SHARDS))
    cached(tmp_path, [first])
    sluice.load_state_dict("hf://org/net")
    assert first not in data_requests(hub)
    assert len(data_requests(hub)) == 2


@pytest.mark.parametrize("offline", [False, True])
def test_without_a_connection_the_cache_is_used(
    monkeypatch: pytest.MonkeyPatch, hub: RangeServer, tmp_path: Path, offline: bool
) -> None:
    monkeypatch.setattr(defaults, "REMOTE_UNREACHED_SECONDS", 0.0)
    if offline:
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    else:
        monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:1")
    with pytest.raises(sluice.RemoteError, match="the cache of huggingface_hub does not have the model"):
        sluice.open("hf://org/net")
    cached(tmp_path, [*SHARDS, "model.safetensors.index.json"], OLDER)
    model = torch.nn.Module()
    for name, tensor in (each for tensors in SHARDS.values() for each in tensors.items()):
        model.register_buffer(name, torch.zeros_like(tensor))
    report = sluice.load_into(model, "hf://org/net")
    why = "HF_HUB_OFFLINE is set" if offline else "the server cannot be reached: Connection refused"
    assert f"2 files: commit {OLDER[:12]} in the cache of huggingface_hub: {why}" in report.notes
    assert not hub.requests


def test_an_index_whose_revision_is_not_resolved_is_an_error(monkeypatch: pytest.MonkeyPatch, hub: RangeServer) -> None:
    """The commit of the next response may be a newer one than that of the index."""
    monkeypatch.setattr(defaults, "REMOTE_PATIENCE_SECONDS", 0.0)
    hub.faults = {0: status(503)}
    with pytest.raises(sluice.RemoteError, match="503"):
        sluice.load_state_dict("hf://org/net/model.safetensors.index.json")


def test_a_shard_that_is_not_cached_is_named(monkeypatch: pytest.MonkeyPatch, hub: RangeServer, tmp_path: Path) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    cached(tmp_path, [next(iter(SHARDS)), "model.safetensors.index.json"])
    with pytest.raises(sluice.SluiceError, match=r"00002-of-00002.*HF_HUB_OFFLINE is set"):
        sluice.load_state_dict("hf://org/net")


@pytest.mark.parametrize("code", [429, 500, 503])
def test_a_hub_that_fails_once_is_asked_again(hub: RangeServer, tmp_path: Path, code: int) -> None:
    """An older commit in the cache does not answer the question."""
    cached(tmp_path, [*SHARDS, "model.safetensors.index.json"], OLDER)
    hub.faults = {0: status(code, Retry_After="1"), 1: cut(5, "reset")}
    began = time.monotonic()
    with sluice.open("hf://org/net") as checkpoint:
        assert checkpoint.files == tuple(f"hf://org/net/{name}" for name in SHARDS)
    assert time.monotonic() - began >= 1
    assert sum("/api/" in request.path for request in hub.requests) == 3


def test_settings_reach_the_api(monkeypatch: pytest.MonkeyPatch, hub: RangeServer) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    sluice.open(sluice.Remote("hf://org/net", headers={"X-Team": "a"})).close()
    assert {request.headers["X-Team"] for request in hub.requests} == {"a"}
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_IMPLICIT_TOKEN", True)
    hub.requests.clear()
    sluice.open("hf://org/net").close()
    assert {request.headers["Authorization"] for request in hub.requests} == {None}


def test_a_token_is_sent_to_the_hub_and_not_to_where_it_redirects(
    monkeypatch: pytest.MonkeyPatch, hub: RangeServer
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    with RangeServer({"/blob": contents()["old/net.pth"]}) as network:
        hub.faults = {1: moved(network.url("/blob"))}
        assert sluice.load_state_dict("hf://org/net/old/net.pth")["w"].tolist() == [1, 1, 1]
        assert all(request.headers["Authorization"] == "Bearer hf_secret" for request in hub.requests)
        assert network.requests
        assert not any(request.headers["Authorization"] for request in network.requests)


@pytest.mark.parametrize(
    ("code", "named", "kind", "message"),
    [
        (404, "RepoNotFound", sluice.MissingFileError, "no such model, or it is private"),
        (404, "RevisionNotFound", sluice.MissingFileError, "no revision 'main'"),
        (403, "GatedRepo", sluice.RemoteError, "permission of its owner"),
        (403, "", sluice.RemoteError, "refuses the request with status 403"),
        (401, "", sluice.MissingFileError, "no such model, or it is private"),
        (418, "", sluice.RemoteError, "the server answered 418"),
    ],
)
def test_refusals(hub: RangeServer, code: int, named: str, kind: type[Exception], message: str) -> None:
    hub.always = status(code, **({"X_Error_Code": named} if named else {}))
    with pytest.raises(kind, match=message) as caught:
        sluice.open("hf://org/net")
    assert "hf://org/net" in str(caught.value)


@pytest.mark.parametrize("siblings", [[1], 5, "x", [{"path": "x"}]])
def test_an_answer_of_another_form_is_refused(hub: RangeServer, siblings: object) -> None:
    hub.files["/api/models/org/net/revision/main"] = json.dumps({"siblings": siblings}).encode()
    with pytest.raises(sluice.RemoteError, match="is not JSON of a model"):
        sluice.open("hf://org/net")


def test_a_missing_file_names_the_closest(hub: RangeServer) -> None:
    with pytest.raises(sluice.MissingFileError, match=r"Did you mean 'old/net\.pth'"):
        sluice.open("hf://org/net/old/nett.pth")


def test_files_of_the_hub_are_cached_by_their_version(hub: RangeServer, tmp_path: Path) -> None:
    for expected in (2, 2):
        hub.requests.clear()
        loaded = sluice.load_state_dict(sluice.Remote("hf://org/net", cache=tmp_path / "sluice"))
        assert torch.equal(loaded["a"], SHARDS["model-00001-of-00002.safetensors"]["a"])
        assert len([name for name in data_requests(hub) if name in SHARDS]) == expected
    with sluice.open(sluice.Remote("hf://org/net", cache=tmp_path / "sluice")) as checkpoint:
        assert checkpoint.files == tuple(f"hf://org/net/{name}" for name in SHARDS)
        assert all(isinstance(source, CompleteFile) for source in checkpoint.sources)


@pytest.mark.parametrize("listed", [True, False])
def test_all_files_of_a_list_and_all_parts_are_of_one_commit(hub: RangeServer, listed: bool) -> None:
    """Also if someone pushes in between: the second answer would be another commit."""
    names = [f"a-{number:05}-of-00003.gguf" for number in (1, 2, 3)]
    for number, name in enumerate(names):
        hub.files[f"/org/net/resolve/{COMMIT}/{name}"] = saved({f"w{number}": torch.full((4,), float(number))})
    hub.files["/api/models/org/net/revision/main"] = information(names)
    urls = [f"hf://org/net/{name}" for name in names]
    assert len(sluice.load_state_dict(urls if listed else urls[0])) == 3
    assert sum("/api/" in request.path for request in hub.requests) == 1
