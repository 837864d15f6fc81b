"""nginx on the loopback address, with the configuration of a test; Debian has it as ``nginx-light``."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from support.object_stores import free_port, running

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
  {http}
  server {{
    listen 127.0.0.1:{port} {listen};
    root {root};
    {directives}
  }}
}}
"""


@contextmanager
def nginx(folder: Path, root: Path, directives: str = "", *, http: str = "", listen: str = "") -> Iterator[str]:
    """Lend the authority of a new server; skip the test if nginx is not installed.

    Args:
        folder: For its own files.
        root: The files that it serves.
        directives: Directives of its ``server`` block.
        http: Directives of its ``http`` block.
        listen: Words after the address that it listens to, such as ``ssl``.
    """
    program = shutil.which("nginx", path=f"{os.environ['PATH']}:/usr/sbin")
    if program is None:
        pytest.skip("nginx is not installed: apt install nginx-light")
    folder.mkdir(exist_ok=True)
    port = free_port()
    configuration = folder / "nginx.conf"
    text = _SERVER.format(folder=folder, root=root, port=port, listen=listen, directives=directives, http=http)
    configuration.write_text(text, encoding="utf-8")
    alone = "daemon off; master_process off;"  # one process, which the test ends
    with running([program, "-p", str(folder), "-e", "error.log", "-c", str(configuration), "-g", alone], port, folder):
        yield f"127.0.0.1:{port}"
