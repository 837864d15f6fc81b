"""Files that nginx serves: ranges, TLS, passwords, redirects, compression, and its limits."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import sluice
from sluice.sources.opening import open_source
from support.leaks import open_files
from support.nginx import nginx
from support.range_server import make_certificate
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


def assert_loads(where: str | sluice.Remote) -> sluice.LoadReport:
    model = torch.nn.Module()
    for name, tensor in STATE.items():
        _, number, _ = name.split(".")
        model.register_parameter(f"w{number}", torch.nn.Parameter(torch.zeros_like(tensor)))
    report = sluice.load_into(model, where, rename=lambda name: "w" + name.split(".")[1])
    for name, tensor in STATE.items():
        assert torch.equal(getattr(model, "w" + name.split(".")[1]), tensor)
    return report


def test_a_file_keeps_the_protocol_of_sources(tmp_path: Path, root: Path) -> None:
    content = bytes(range(251)) * 4_000
    (tmp_path / "a.bin").write_bytes(content)
    with nginx(tmp_path / "nginx", tmp_path) as host:
        check_source(lambda: open_source(f"http://{host}/a.bin"), content)


def test_files_and_directories_are_loaded(tmp_path: Path, root: Path) -> None:
    with nginx(tmp_path, root) as host:
        for name in ("model.pth", "sharded/", "sharded/model.safetensors.index.json"):
            assert_loads(f"http://{host}/{name}")


def test_a_replaced_file_has_changed(tmp_path: Path) -> None:
    file = tmp_path / "model.pth"
    torch.save(STATE, file)
    with nginx(tmp_path / "nginx", tmp_path) as host, sluice.open(f"http://{host}/model.pth") as checkpoint:
        torch.save({name: tensor + 1 for name, tensor in STATE.items()}, tmp_path / "new")
        (tmp_path / "new").replace(file)
        with pytest.raises(sluice.SourceChangedError):
            checkpoint["layer.7.weight"].read()


def test_tls(tmp_path: Path, root: Path) -> None:
    made = make_certificate(tmp_path)
    if made is None:
        pytest.skip("openssl is not installed")
    keys = f"ssl_certificate {made}; ssl_certificate_key {made};"
    with nginx(tmp_path / "nginx", root, keys, listen="ssl") as host:
        where = f"https://{host}/model.pth"
        assert_loads(sluice.Remote(where, verify=str(made)))
        with pytest.raises(sluice.RemoteError, match="certificate"):
            sluice.open(where)


def test_compression_is_not_requested(tmp_path: Path, root: Path) -> None:
    with nginx(tmp_path, root, "gzip on; gzip_types *; gzip_min_length 1; gzip_vary on;") as host:
        assert_loads(f"http://{host}/model.pth")


def test_a_server_without_ranges_is_refused(tmp_path: Path, root: Path) -> None:
    with nginx(tmp_path, root, "max_ranges 0;") as host, pytest.raises(sluice.UnsupportedError, match="range"):
        sluice.open(f"http://{host}/model.pth")


def test_requests_that_are_refused_for_now_are_repeated(tmp_path: Path, root: Path) -> None:
    zone = "limit_req_zone $binary_remote_addr zone=requests:1m rate=30r/s; limit_req_status 503;"
    with nginx(tmp_path, root, "limit_req zone=requests burst=2 nodelay;", http=zone) as host:
        report = assert_loads(sluice.Remote(f"http://{host}/model.pth", request_bytes="1MiB", connections=3))
    assert report.remote is not None
    assert report.remote.requests is not None
    assert report.remote.requests > report.remote.planned_requests


def test_a_password_is_sent_and_not_to_the_host_of_a_redirect(tmp_path: Path, root: Path) -> None:
    (tmp_path / "passwords").write_text("user:{PLAIN}secret\n")
    guarded = f'auth_basic "files"; auth_basic_user_file {tmp_path}/passwords;'
    header = {"Authorization": "Basic dXNlcjpzZWNyZXQ="}
    with (
        nginx(tmp_path / "files", root, guarded) as files,
        nginx(tmp_path / "redirects", root, f"return 307 http://{files}$request_uri;") as redirects,
    ):
        assert_loads(sluice.Remote(f"http://{files}/model.pth", headers=header))
        with pytest.raises(sluice.RemoteError, match="401") as caught:
            sluice.open(sluice.Remote(f"http://{redirects}/model.pth", headers=header))
    assert "secret" not in str(caught.value)
    assert "dXNl" not in str(caught.value)
