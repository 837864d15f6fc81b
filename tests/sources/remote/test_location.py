"""``sluice.Remote``: arguments are checked, and no text shows credentials."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import fsspec
import pytest

import sluice
from sluice.sources.remote.location import remote_location


def test_the_repr_shows_no_credentials() -> None:
    remote = sluice.Remote(
        "https://me:secret@host/model.pth?signature=secret",
        headers={"Authorization": "secret"},
        options={"key": "secret"},
        connections=3,
    )
    assert repr(remote) == "Remote('https://host/model.pth', headers=..., connections=3, options=...)"


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"url": 3}, TypeError, "url is an int"),
        ({"url": "model.pth"}, ValueError, "is not a URL"),
        ({"store": 3}, TypeError, "store is an int"),
        ({"headers": "x"}, TypeError, "headers is a str"),
        ({"headers": {"Authorization": None}}, TypeError, "headers has None; write a dict of texts"),
        ({"headers": {b"Authorization": "secret"}}, TypeError, "headers has bytes"),
        ({"verify": None}, TypeError, "verify is None"),
        ({"verify": Path("secret")}, TypeError, r"verify is a \w+Path"),
        ({"cert": ["a", "b"]}, TypeError, "cert is a list"),
        ({"cert": ("a", None)}, TypeError, "cert has None"),
        ({"connections": "4"}, TypeError, "connections is a str"),
        ({"timeout": "4"}, TypeError, "timeout is a str"),
        ({"timeout": math.inf}, ValueError, "timeout=inf"),
        ({"on_request": 3}, TypeError, "on_request is an int"),
        ({"connections": 0}, ValueError, "connections=0"),
        ({"timeout": 0}, ValueError, "timeout=0"),
        ({"cache": 3}, TypeError, "cache is an int"),
        ({"cache": b"c"}, TypeError, "cache is bytes"),
        ({"cache": ""}, ValueError, "the path of a directory"),
        ({"cache": "c", "cache_bytes": "much"}, ValueError, "much"),
        ({"cache_bytes": 3}, ValueError, "no effect without cache="),
    ],
)
def test_wrong_arguments_are_refused(arguments: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message) as caught:
        sluice.Remote(**({"url": "s3://bucket/key"} | arguments))
    assert "secret" not in str(caught.value)


def test_a_store_has_its_own_settings(filesystem: Any) -> None:
    with pytest.raises(ValueError, match="timeout= has no effect with store="):
        sluice.Remote("/f", store=filesystem, timeout=3)


def test_objects_of_fsspec_are_addresses(filesystem: Any) -> None:
    filesystem.pipe_file("/f", b"x")
    found = remote_location(fsspec.open("memory://f"))
    assert found is not None
    assert (found.url, found.store) == ("/f", filesystem)
    assert remote_location(SimpleNamespace(fs=3, path="/f")) is None
    assert remote_location(object()) is None
    with pytest.raises(sluice.UnsupportedError, match="decompresses what it reads"):
        remote_location(fsspec.open("memory://f", compression="gzip"))
