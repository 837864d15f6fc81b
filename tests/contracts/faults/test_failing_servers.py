"""HTTP servers that fail at every request of a load: the load is right or refused, and the model is whole."""

from __future__ import annotations

import functools
import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import safetensors.torch
import torch

pytest.importorskip("urllib3", reason="the extra 'remote' is not installed")

import sluice
from sluice import _defaults as defaults
from support.range_server import Fault, RangeServer, chunked, compressed, cut, headers, moved, shifted, status, whole
from support.torch_files import saved

#: Faults after which a load succeeds, wherever they occur.
PASSING: dict[str, Fault] = {
    "503": status(503, Retry_After="0"),
    "429": status(429),
    "reset before the body": cut(0, "reset"),
    "reset in the body": cut(10_000, "reset"),
    "truncated": cut(10_000, "close"),
    "stalled": cut(10_000, "stall"),
    "chunked": chunked,
    "redirected": moved("/m?again"),
}

#: Faults after which a load succeeds or is refused: it depends on the request.
OTHER: dict[str, Fault] = {
    "404": status(404),
    "403": status(403),
    "412": status(412),
    "416": status(416),
    "shifted": shifted,
    "no range": headers(Content_Range=""),
    "long": headers(Content_Length="99999999"),
    "other ETag": headers(ETag='"other"'),
    "no ETag": headers(ETag=""),
    "whole": whole,
    "compressed": compressed,
    "redirected away": moved("ftp://127.0.0.1/"),
}

#: Makers of random faults.
RANDOM: dict[str, Callable[[random.Random], Fault]] = {
    "status": lambda numbers: status(numbers.choice([400, 403, 404, 408, 412, 416, 429, 500, 503, 599])),
    "later": lambda numbers: status(numbers.choice([429, 503]), Retry_After=numbers.choice(["0", "1", "soon", "9999"])),
    "cut": lambda numbers: cut(numbers.randrange(200_000), numbers.choice(["close", "reset", "stall", "drip"])),
    "shifted": lambda _: shifted,
    "whole": lambda _: whole,
    "header": lambda numbers: headers(
        **{
            numbers.choice(["ETag", "Content_Range", "Content_Length", "Last_Modified", "Content_Encoding"]): (
                numbers.choice(["", '"other"', "0", "bytes 0-9/10", "bytes 0-4095/*", "gzip", "\u00e9"])
            )
        }
    ),
    "moved": lambda numbers: moved(
        numbers.choice(["/m?again", "/none", "/m", "ftp://127.0.0.1/", "http://169.254.169.254/m", "//", ""]),
        numbers.choice([301, 302, 303, 307, 308]),
    ),
}


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.small = torch.nn.Linear(10, 10)
        self.large = torch.nn.ModuleList(torch.nn.Linear(500, 300) for _ in range(2))


@functools.cache
def state() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return Model().state_dict()


@pytest.fixture(params=["pth", "safetensors"])
def server(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[RangeServer]:
    """Return a server whose file takes several requests; failed ones are repeated at once."""
    monkeypatch.setattr(defaults, "REMOTE_FIRST_PAUSE", 0.01)
    monkeypatch.setattr(defaults, "REMOTE_PATIENCE_SECONDS", 1.0)
    monkeypatch.setattr(defaults, "REMOTE_TIMEOUT_SECONDS", 0.1)
    monkeypatch.setattr(defaults, "REMOTE_FIRST_BYTES", 4096)
    monkeypatch.setattr(defaults, "REMOTE_READ_BYTES", 1 << 20)
    monkeypatch.setattr(defaults, "REMOTE_LINE_BYTES", 0)  # the same size for any latency
    monkeypatch.setattr(defaults, "REMOTE_GAP_BYTES", 0)
    content = saved(state()) if request.param == "pth" else safetensors.torch.save(state())
    with RangeServer({"/m": content}) as running:
        yield running


def requests_of_a_load(server: RangeServer) -> int:
    sluice.load_state_dict(server.url("/m"))
    count = len(server.requests)
    assert count >= 3
    return count


def load_with(server: RangeServer, fault: Fault, at: int) -> dict[str, torch.Tensor] | sluice.SluiceError:
    """Return what was loaded, or the error, of a load with a fault at one request."""
    server.requests.clear()
    server.faults = {at: fault}
    try:
        return sluice.load_state_dict(server.url("/m"))
    except sluice.SluiceError as error:
        return error


def is_right(loaded: dict[str, torch.Tensor]) -> bool:
    return loaded.keys() == state().keys() and all(torch.equal(loaded[name], state()[name]) for name in loaded)


@pytest.mark.parametrize("name", PASSING)
def test_a_load_survives_one_fault_at_any_request(server: RangeServer, name: str) -> None:
    for at in range(requests_of_a_load(server)):
        loaded = load_with(server, PASSING[name], at)
        assert isinstance(loaded, dict), f"request {at}: {loaded!r}"
        assert is_right(loaded), f"request {at}"


@pytest.mark.parametrize("name", OTHER)
def test_a_load_is_right_or_refused_with_any_fault_at_any_request(server: RangeServer, name: str) -> None:
    refused = 0
    for at in range(requests_of_a_load(server)):
        loaded = load_with(server, OTHER[name], at)
        if isinstance(loaded, dict):
            assert is_right(loaded), f"request {at}"
        else:
            refused += 1
            assert loaded.file == server.url("/m"), f"request {at}: {loaded!r}"
    if name in {"403", "412", "other ETag", "compressed", "redirected away"}:
        assert refused


@pytest.mark.parametrize("name", [*PASSING, *OTHER])
def test_a_fault_that_stays_ends_a_load_and_leaves_a_model_on_meta_alone(server: RangeServer, name: str) -> None:
    with sluice.empty_init():
        model = Model()
    fault = (PASSING | OTHER)[name]
    server.requests.clear()
    server.faults = dict.fromkeys(range(3, 1000), fault)
    try:
        sluice.load_into(model, server.url("/m"), device="cpu")
    except sluice.SluiceError:
        assert all(parameter.is_meta for parameter in model.parameters())
    else:
        assert is_right(model.state_dict())


@pytest.mark.parametrize("seed", [*range(12), *(pytest.param(seed, marks=pytest.mark.long) for seed in range(12, 200))])
def test_a_server_that_lies_at_random_gives_the_right_values_or_an_error_in_time(
    server: RangeServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    monkeypatch.setattr(defaults, "REMOTE_SLOW_SECONDS", 0.3)
    monkeypatch.setattr(defaults, "REMOTE_HEADERS_SECONDS", 0.3)
    numbers = random.Random(seed)
    server.validators = numbers.choice(["strong", "weak", "modified", "none"])
    server.ignores_conditions = numbers.random() < 0.3
    share = numbers.choice([0.05, 0.2, 0.5, 1.0])
    kinds = [numbers.choice(list(RANDOM)) for _ in range(300)]
    server.faults = {at: RANDOM[kind](numbers) for at, kind in enumerate(kinds) if numbers.random() < share}
    for cache in (None, tmp_path / "cache"):
        model, began = Model(), time.monotonic()
        server.requests.clear()
        try:
            sluice.load_into(model, sluice.Remote(server.url("/m"), cache=cache))
        except sluice.SluiceError:
            pass
        else:
            assert is_right(model.state_dict())
        assert time.monotonic() - began < 30
