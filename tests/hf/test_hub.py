"""Names of models of the hub: the real huggingface_hub against a server that answers as the hub does."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("huggingface_hub", reason="the extra 'hub' is not installed")
pytest.importorskip("urllib3", reason="the extra 'remote' is not installed")

import huggingface_hub
from huggingface_hub import constants

import sluice
from support.hf_comparing import assert_same, edit_config
from support.range_server import RangeServer

COMMIT = "5f0e1b2c" * 5


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[RangeServer]:
    """Start a hub without models, with an empty cache."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "token"))
    monkeypatch.chdir(tmp_path)
    with RangeServer({}) as server:
        monkeypatch.setenv("HF_ENDPOINT", server.url(""))
        yield server
    huggingface_hub.close_session()


def _saved(transformers: Any, folder: Path) -> Any:
    config = transformers.GPT2Config(
        vocab_size=64, n_positions=8, n_embd=64, n_layer=4, n_head=2, bos_token_id=1, eos_token_id=1
    )
    model = transformers.GPT2LMHeadModel(config).eval()
    model.generation_config.max_new_tokens = 7
    model.save_pretrained(folder, max_shard_size="200KB")
    return model


def _publish(hub: RangeServer, folder: Path, revision: str = "main", commit: str = COMMIT) -> None:
    files = {path.name: path.read_bytes() for path in folder.iterdir()}
    info = json.dumps({"id": "org/net", "sha": commit, "siblings": [{"rfilename": name} for name in files]}).encode()
    hub.files |= {f"/api/models/org/net/revision/{each}": info for each in (revision, commit)}
    hub.files |= {f"/org/net/resolve/{commit}/{name}": content for name, content in files.items()}


def test_a_model_is_that_of_its_directory(transformers: Any, hub: RangeServer, tmp_path: Path) -> None:
    model = _saved(transformers, tmp_path / "saved")
    _publish(hub, tmp_path / "saved")
    loaded = sluice.hf.from_pretrained("org/net")
    assert loaded.name_or_path == "org/net"
    loaded.config.name_or_path = str(tmp_path / "saved")
    assert_same(loaded, type(model).from_pretrained(tmp_path / "saved"))
    assert loaded.generation_config.max_new_tokens == 7
    paths = [request.path for request in hub.requests]
    assert sum(path.endswith("/revision/main") for path in paths) == 1  # a push in between mixes no commits
    assert all(COMMIT in path or path.endswith("/revision/main") for path in paths)
    _publish(hub, tmp_path / "saved", "refs%2Fpr%2F1")
    assert sluice.hf.from_pretrained("org/net", revision="refs/pr/1").num_parameters()


def test_a_local_directory_wins_and_has_no_revision(transformers: Any, hub: RangeServer, tmp_path: Path) -> None:
    _saved(transformers, tmp_path / "org" / "net")
    sluice.hf.from_pretrained("org/net")
    assert not hub.requests
    with pytest.raises(ValueError, match="revision='v1' has no effect"):
        sluice.hf.from_pretrained("org/net", revision="v1")


def test_without_a_connection_the_cache_is_used(
    transformers: Any, hub: RangeServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(sluice.RemoteError, match="the cache of huggingface_hub does not have the model"):
        sluice.hf.from_pretrained("org/net")
    cached = tmp_path / "cache" / "models--org--net"
    model = _saved(transformers, cached / "snapshots" / COMMIT)
    (cached / "refs").mkdir()
    (cached / "refs" / "main").write_text(COMMIT)
    reports: list[sluice.LoadReport] = []
    loaded = sluice.hf.from_pretrained("org/net", report=reports.append)
    assert torch.equal(loaded.lm_head.weight, model.lm_head.weight)
    assert "HF_HUB_OFFLINE is set" in str(reports[0].notes)
    assert not hub.requests


def test_errors_name_the_file_of_the_hub(transformers: Any, hub: RangeServer, tmp_path: Path) -> None:
    _saved(transformers, tmp_path / "saved")
    (tmp_path / "saved" / "config.json").write_text("{")
    _publish(hub, tmp_path / "saved")
    with pytest.raises(sluice.FormatError) as caught:
        sluice.hf.from_pretrained("org/net")
    assert caught.value.file == f"hf://org/net@{COMMIT}"
    (tmp_path / "saved" / "config.json").unlink()
    (tmp_path / "saved" / "generation_config.json").unlink()
    hub.files.clear()
    _publish(hub, tmp_path / "saved")
    with pytest.raises(sluice.MissingFileError, match=r"the model has no config\.json"):
        sluice.hf.from_pretrained("org/net")


@pytest.mark.parametrize("local", [True, False])
def test_a_streamed_model_computes_the_same(
    transformers: Any, hub: RangeServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, local: bool
) -> None:
    monkeypatch.setattr("sluice._defaults.STREAMED_BYTES", 1)
    monkeypatch.setattr("sluice._defaults.RECYCLED_STEP_BYTES", 4096)
    model, tokens = _saved(transformers, tmp_path / "saved"), torch.tensor([[1, 2, 3]])
    _publish(hub, tmp_path / "saved")
    name = str(tmp_path / "saved") if local else "org/net"
    with torch.inference_mode(), sluice.hf.stream(name, memory="512KiB") as stream:
        assert torch.equal(stream.model(tokens).logits, model(tokens).logits)
        assert stream.report.read_bytes
        assert not stream.model.training


def test_models_that_are_not_streamed(transformers: Any, tmp_path: Path) -> None:
    _saved(transformers, tmp_path)
    edit_config(tmp_path, quantization_config={"quant_method": "torchao"})
    with pytest.raises(sluice.UnsupportedError, match="loaded, not streamed"):
        sluice.hf.stream(tmp_path)
