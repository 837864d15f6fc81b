"""Files and directories that nginx serves."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
import torch

import sluice
from sluice.sources.opening import find_place
from support.leaks import open_files
from support.object_stores import nginx
from support.source_conformance import check_source
from support.waiting import wait_until

pytest.importorskip("urllib3", reason="urllib3 is not installed: pip install 'sluice[remote]'")

STATE = {f"layer.{number}.weight": torch.randn(300, 1_000) for number in range(12)}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("root")
    torch.save(STATE, root / "model.pth")
    sluice.save(STATE, root / "sharded", format="huggingface", max_shard_size="5MB")
    return root


@pytest.fixture(autouse=True)
def connections_closed() -> Iterator[None]:
    before = open_files()
    yield
    wait_until(lambda: not open_files() - before, "connections were closed")


def test_a_file_keeps_the_protocol_of_sources(tmp_path: Path) -> None:
    content = bytes(range(251)) * 4_000
    (tmp_path / "a.bin").write_bytes(content)
    (tmp_path / "new").write_bytes(content[1:])
    change = partial((tmp_path / "new").replace, tmp_path / "a.bin")
    with nginx(tmp_path / "nginx", tmp_path) as host:
        check_source(lambda: find_place(f"http://{host}/a.bin").open_file(), content, change=change, pinned=True)


def test_files_and_directories_are_loaded(tmp_path: Path, root: Path) -> None:
    with nginx(tmp_path, root) as host:
        for name in ("model.pth", "sharded/", "sharded/model.safetensors.index.json"):
            loaded = sluice.load_state_dict(f"http://{host}/{name}")
            assert all(torch.equal(loaded[each], tensor) for each, tensor in STATE.items())
