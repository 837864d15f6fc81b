"""Servers of object stores on the loopback address: moto and s3rver for S3, azurite for Azure; and fsspec's memory.

They are found on the path, or where ``make servers`` installs them.
"""

from __future__ import annotations

import base64
import gc
import hashlib
import hmac
import importlib.util
import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from email.utils import formatdate
from pathlib import Path
from typing import Any

import pytest

from sluice.sources.remote.location import Remote
from sluice.sources.remote.store_clients import make_store, parse_address
from support.leaks import open_files
from support.waiting import wait_until

#: Key of the account that every azurite server has; it is in its documentation.
_AZURITE_ACCOUNT = "devstoreaccount1"
_AZURITE_KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="

_START_SECONDS = 60.0

#: Where ``make servers`` installs programs of npm and packages of Python.
_INSTALLED = Path(__file__).parents[2] / ".servers"


class Bucket:
    """A bucket of a server, its address and how to reach it."""

    def __init__(self, url: str, options: Mapping[str, object]) -> None:
        self.url = url
        self.options = dict(options)

    def remote(self, key: str) -> Remote:
        """Return the address of a key with the settings of the server."""
        return Remote(self.url + key, options=self.options)

    @property
    def store(self) -> Any:
        """A new client, so that no connection outlives its use."""
        return make_store(parse_address(self.url), self.remote(""))

    def put(self, key: str, content: bytes) -> None:
        """Write an object."""
        import obstore

        obstore.put(self.store, key, content)

    def put_files(self, prefix: str, directory: Path) -> None:
        """Write the files of a directory."""
        for file in sorted(directory.iterdir()):
            self.put(f"{prefix}/{file.name}", file.read_bytes())


@contextmanager
def connections_closed() -> Iterator[None]:
    """Wait after the block until the connections of its clients are closed, shortly after they are collected."""
    before = open_files()
    yield
    gc.collect()
    wait_until(lambda: not open_files() - before, "connections were closed")


@contextmanager
def moto_bucket() -> Iterator[Bucket]:
    """Lend a bucket of a new S3 server; skip the test if the packages are not installed."""
    pytest.importorskip("obstore", reason="obstore is not installed: pip install 'sluice[remote]'")
    if not (_INSTALLED / "python" / "moto").exists() and importlib.util.find_spec("moto") is None:
        pytest.skip("moto is not installed: make servers")
    port = free_port()
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    with running(command, port, path=_INSTALLED / "python"):
        endpoint = f"http://127.0.0.1:{port}"
        with urllib.request.urlopen(urllib.request.Request(f"{endpoint}/models", method="PUT"), timeout=30):
            pass
        options = {"endpoint": endpoint, "access_key_id": "testing", "secret_access_key": "hidden-secret"}
        yield _warm(Bucket("s3://models/", {**options, "region": "us-east-1"}))


@contextmanager
def azurite_container(directory: Path) -> Iterator[Bucket]:
    """Lend a container of a new Azure server, run in a directory; skip the test if npm has not installed it."""
    pytest.importorskip("obstore", reason="obstore is not installed: pip install 'sluice[remote]'")
    program = _program("azurite-blob")
    port = free_port()
    command = [program, "--inMemoryPersistence", "--blobHost", "127.0.0.1", "--blobPort", str(port)]
    with running([*command, "--skipApiVersionCheck", "--silent", "--disableTelemetry"], port, directory):
        endpoint = f"http://127.0.0.1:{port}/{_AZURITE_ACCOUNT}"
        _make_container(endpoint, "models")
        options = {"endpoint": endpoint, "account_name": _AZURITE_ACCOUNT, "account_key": _AZURITE_KEY}
        yield _warm(Bucket("az://models/", options))


@contextmanager
def s3rver_bucket(directory: Path) -> Iterator[Bucket]:
    """Lend a bucket of a new s3rver, an S3 server that keeps files; skip the test if npm has not installed it."""
    pytest.importorskip("obstore", reason="obstore is not installed: pip install 'sluice[remote]'")
    program = _program("s3rver")
    port = free_port()
    command = [program, "-d", str(directory), "-a", "127.0.0.1", "-p", str(port), "-s", "--configure-bucket", "models"]
    with running(command, port, directory):
        options = {"access_key_id": "S3RVER", "secret_access_key": "S3RVER", "region": "us-east-1"}
        yield _warm(Bucket("s3://models/", {**options, "endpoint": f"http://127.0.0.1:{port}"}))


#: Bucket of a new server in a directory, by the name of the server.
SERVERS = {"moto": lambda _: moto_bucket(), "s3rver": s3rver_bucket, "azurite": azurite_container}


def _program(name: str) -> str:
    installed = _INSTALLED / "node_modules" / ".bin"
    program = shutil.which(name, path=f"{os.environ['PATH']}{os.pathsep}{installed}")
    if program is None:
        pytest.skip(f"{name} is not installed: make servers")
    return program


def _warm(bucket: Bucket) -> Bucket:
    """Make a request: the threads of obstore, and their descriptors, remain from then on."""
    bucket.put("warm", b"1")
    return bucket


def _make_container(endpoint: str, name: str) -> None:
    date = formatdate(usegmt=True)
    headers = {"x-ms-date": date, "x-ms-version": "2021-08-06"}
    lines = "".join(f"{key}:{value}\n" for key, value in headers.items())
    resource = f"/{_AZURITE_ACCOUNT}/{_AZURITE_ACCOUNT}/{name}\nrestype:container"
    signed = hmac.new(base64.b64decode(_AZURITE_KEY), ("PUT" + "\n" * 12 + lines + resource).encode(), hashlib.sha256)
    headers["Authorization"] = f"SharedKey {_AZURITE_ACCOUNT}:{base64.b64encode(signed.digest()).decode()}"
    url = f"{endpoint}/{name}?restype=container"
    with urllib.request.urlopen(urllib.request.Request(url, method="PUT", headers=headers), timeout=30):
        pass


def free_port() -> int:
    """Return a port of the loopback address that is free now."""
    with closing(socket.socket()) as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def running(
    command: Sequence[str], port: int, directory: Path | None = None, *, path: Path | None = None
) -> Iterator[None]:
    """Run a server that listens to a port until the end of the block.

    Args:
        command: How it is started.
        port: Its port of the loopback address.
        directory: Its working directory.
        path: Where Python finds its packages, after those of this process.
    """
    nothing = subprocess.DEVNULL
    environment = {**os.environ, "PYTHONPATH": str(path)} if path else None
    server = subprocess.Popen(command, stdin=nothing, stdout=nothing, stderr=nothing, cwd=directory, env=environment)
    try:
        _wait_for(server, port)
        yield
    finally:
        server.kill()  # everything is in its memory
        server.wait()


def _wait_for(server: subprocess.Popen[bytes], port: int) -> None:
    deadline = time.monotonic() + _START_SECONDS
    while server.poll() is None and time.monotonic() < deadline:
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
        except OSError:
            time.sleep(0.05)
        else:
            return
    pytest.fail(f"the server did not start: {server.args!r}, exit code {server.poll()}")


#: A server for a directory.
_SERVER = """
worker_processes 1;
error_log {folder}/error.log;
pid {folder}/nginx.pid;
events {{ worker_connections 128; }}
http {{
  access_log off;
  client_body_temp_path {folder}/temporary;
  proxy_temp_path {folder}/temporary;
  fastcgi_temp_path {folder}/temporary;
  uwsgi_temp_path {folder}/temporary;
  scgi_temp_path {folder}/temporary;
  server {{
    listen 127.0.0.1:{port};
    root {root};
  }}
}}
"""


@contextmanager
def nginx(folder: Path, root: Path) -> Iterator[str]:
    """Lend the authority of a new server of ``root``, with a folder for itself; skip the test without nginx."""
    program = shutil.which("nginx", path=f"{os.environ['PATH']}:/usr/sbin")
    if program is None:
        pytest.skip("nginx is not installed: apt install nginx-light")
    folder.mkdir(exist_ok=True)
    port = free_port()
    configuration = folder / "nginx.conf"
    configuration.write_text(_SERVER.format(folder=folder, root=root, port=port), encoding="utf-8")
    alone = "daemon off; master_process off;"  # one process, which the test ends
    with running([program, "-p", str(folder), "-e", "error.log", "-c", str(configuration), "-g", alone], port, folder):
        yield f"127.0.0.1:{port}"


def put(memory: Any, path: Path, where: str) -> str:
    """Copy a file or a directory into the file system in memory; return its URL."""
    for file in [path] if path.is_file() else [each for each in path.rglob("*") if each.is_file()]:
        inner = file.relative_to(path).as_posix()
        memory.pipe_file(where if path.is_file() else f"{where}/{inner}", file.read_bytes())
    return f"memory://{where.lstrip('/')}"
