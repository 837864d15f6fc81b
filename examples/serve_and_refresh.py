"""A server whose weights change: it answers requests, watches a file, and takes what a trainer writes.

::

    python examples/serve_and_refresh.py weights.pth --port 8000
    curl http://127.0.0.1:8000/

``weights.pth`` is a path or an address, for example ``s3://bucket/weights.safetensors``; a trainer replaces it as a
whole, with ``sluice.save(model, "weights.pth", overwrite=True)``. An answer has the version of its weights.
"""

from __future__ import annotations

import argparse
import json
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import torch
from torch import nn

import sluice


def build() -> nn.Module:
    """Return the model, without memory for its weights."""
    with sluice.empty_init():
        return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 4)).eval()


class Served:
    """A model, the version of its weights, and the lock under which both change."""

    def __init__(self, source: str) -> None:
        """Load the model."""
        self.source, self.model, self.lock = source, build(), threading.Lock()
        state = sluice.load_into(self.model, source).state
        assert state is not None  # a load into a module has one
        self.state = state

    def answer(self) -> dict[str, object]:
        """Compute an answer, all of it with one version of the weights."""
        with self.lock, torch.inference_mode():
            return {"version": self.state.version, "output": self.model(torch.ones(64)).tolist()}

    def publish(self) -> None:
        """Take the weights that are there now; requests wait only while they are copied."""
        with ExitStack() as held:

            @contextmanager
            def change() -> Iterator[None]:
                held.enter_context(self.lock)  # until the version is the new one, too
                yield

            new = sluice.refresh(self.model, self.source, since=self.state, lock=change())
            self.state = new
        if new.changed:
            print(f"{new.version}: {len(new.changed)} of {len(new.contents)} tensors changed", flush=True)


def watch(served: Served, seconds: float) -> None:
    """Look for new weights again and again; after a failure the old ones stay."""
    while True:
        time.sleep(seconds)
        try:
            served.publish()
        except (sluice.SluiceError, OSError) as error:
            print(f"refresh failed: {error}", flush=True)


def handler(served: Served) -> type[BaseHTTPRequestHandler]:
    """Return the handler of requests."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            try:
                status, answer = 200, served.answer()
            except sluice.StreamError as error:  # a refresh ended while weights changed; the next one repairs it
                status, answer = 503, {"error": str(error)}
            body = json.dumps(answer).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *arguments: object) -> None:
            """Log nothing."""

    return Handler


def main() -> None:
    """Serve until interrupted."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("weights", help="path or address of the weights")
    parser.add_argument("--port", type=int, default=8000, help="0 takes a free one")
    parser.add_argument("--every", type=float, default=1.0, help="seconds between two looks")
    options = parser.parse_args()
    served = Served(options.weights)
    threading.Thread(target=watch, args=(served, options.every), daemon=True).start()
    with ThreadingHTTPServer(("127.0.0.1", options.port), handler(served)) as server:
        print(f"serving http://127.0.0.1:{server.server_address[1]}/", flush=True)
        server.serve_forever()


if __name__ == "__main__":
    main()
