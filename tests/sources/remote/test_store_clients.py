"""Addresses and clients of object stores."""

from __future__ import annotations

from datetime import timedelta

import pytest

from sluice import Remote
from sluice._errors import UnsupportedError
from sluice.sources.remote.store_clients import StoreAddress, _client_options, parse_address


@pytest.mark.parametrize(
    ("url", "parts"),
    [
        ("s3://bucket/a/b.bin", ("s3", "bucket", None, "a/b.bin", "s3://bucket/")),
        ("s3://bucket", ("s3", "bucket", None, "", "s3://bucket/")),
        ("S3a://key:secret@bucket/a?b", ("s3", "bucket", None, "a?b", "S3a://bucket/")),
        ("gs://bucket/a%20b", ("gs", "bucket", None, "a%20b", "gs://bucket/")),
        ("az://container/a", ("az", "container", None, "a", "az://container/")),
        (
            "abfss://container@account.dfs.core.windows.net/a",
            ("az", "container", "account", "a", "abfss://container@account/"),
        ),
    ],
)
def test_parts_of_an_address(url: str, parts: tuple[str, str, str | None, str, str]) -> None:
    kind, bucket, account, key, root = parts
    assert parse_address(url) == StoreAddress(kind=kind, bucket=bucket, account=account, key=key, root=root)


def test_an_address_without_a_bucket_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="names no bucket"):
        parse_address("s3:///a.bin")


def test_what_the_user_gives_reaches_the_client() -> None:
    options = _client_options("s3", {}, Remote("s3://b/a", timeout=3.0, headers={"X-A": "1"}, verify=False))
    assert options["connect_timeout"] == options["read_timeout"] == timedelta(seconds=3)
    assert (options["default_headers"], options["allow_invalid_certificates"]) == ({"X-A": "1"}, True)
    assert _client_options("s3", {}, Remote("s3://b/a", verify=__file__))["root_certificate"].startswith(b'"""')
