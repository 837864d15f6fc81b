"""Advice for names of checkpoints that are not here."""

from __future__ import annotations

from pathlib import Path
from unittest.mock import Mock

import pytest

import sluice
from sluice.sources.remote_names import download_advice, missing_advice, without_credentials


@pytest.mark.parametrize(
    ("url", "advice"),
    [
        ("https://huggingface.co/org/name", "huggingface_hub.snapshot_download('org/name')"),
        ("https://huggingface.co/org/name/tree/main", "huggingface_hub.snapshot_download('org/name')"),
        ("https://huggingface.co/gpt2", "huggingface_hub.snapshot_download('gpt2')"),
        ("https://huggingface.co/gpt2/tree/main", "huggingface_hub.snapshot_download('gpt2')"),
        (
            "https://huggingface.co/gpt2/resolve/main/model.safetensors",
            "huggingface_hub.hf_hub_download('gpt2', 'model.safetensors')",
        ),
        ("hf://gpt2", "huggingface_hub.snapshot_download('gpt2')"),
        ("hf://org/name", "huggingface_hub.snapshot_download('org/name')"),
        (
            "https://huggingface.co/org/name/resolve/main/sub/m.bin?download=true",
            "huggingface_hub.hf_hub_download('org/name', 'sub/m.bin')",
        ),
        ("hf://org/name/m.safetensors", "huggingface_hub.hf_hub_download('org/name', 'm.safetensors')"),
        ("file:///tmp/a%20b.pth", "'/tmp/a b.pth'"),
        ("odd://host/m.pt", "Download the checkpoint first and pass its local path."),
    ],
)
def test_how_to_download(url: str, advice: str) -> None:
    assert advice in download_advice(url)


def test_what_to_check_about_a_missing_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model-1.pth").touch()
    (tmp_path / "model-2.pth").touch()
    hub = "huggingface_hub.snapshot_download({!r})"
    assert hub.format("openai-community/gpt2") in missing_advice("openai-community/gpt2")
    assert hub.format("Qwen/Qwen2.5-0.5B") in missing_advice("Qwen/Qwen2.5-0.5B")
    assert hub.format("gpt2") in missing_advice("gpt2")
    assert missing_advice("runs/manifest", checkpoint=False) == "There is no directory 'runs'."
    assert missing_advice("manifest", checkpoint=False).startswith("Check the path;")
    assert missing_advice("runs/model.pt") == "There is no directory 'runs'."
    assert missing_advice("model-1.pht") == "Did you mean 'model-1.pth'?"
    assert missing_advice("model-*.pth").startswith("It is a pattern, which 2 names match: pass a list, sorted(glob")
    assert missing_advice("weights.bin") == f"Check the path; the current directory is {str(tmp_path)!r}."
    assert missing_advice(str(tmp_path / "weights.bin")) == "Check the path."
    monkeypatch.setattr("os.getcwd", Mock(side_effect=FileNotFoundError))
    assert missing_advice("weights.bin") == "Check the path; the current directory was removed."


def test_an_empty_path() -> None:
    with pytest.raises(sluice.MissingFileError, match=r"^the path is empty\. Pass"):
        sluice.open("")


@pytest.mark.parametrize(
    ("url", "plain"),
    [
        ("http://user:PW/SECRET@host/a", "http://host/a"),
        ("http://user:PW?SECRET@host/a", "http://host/a"),
        ("s3://AK:wJalr/SECRET@bucket/k", "s3://bucket/k"),
        ("http://user:SECRET@host:80/a", "http://host:80/a"),
        ("http://user:PW@SECRET/SECRET@host/a?SECRET@", "http://host/a"),
        ("http://host:8080/a@1/b?SECRET", "http://host:8080/a@1/b"),
        ("http://[::1]:80/a@1", "http://[::1]:80/a@1"),
        ("hf://org/net@v1/file", "hf://org/net@v1/file"),
        ("hf://net@v1/file", "hf://net@v1/file"),
        ("az://box@account/file?sig=x", "az://box@account/file"),
    ],
)
def test_credentials_are_removed_also_if_they_are_not_escaped(url: str, plain: str) -> None:
    assert without_credentials(url) == plain
