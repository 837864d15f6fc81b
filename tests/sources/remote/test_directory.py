"""Files next to a remote file: same server, same query, and no name that leads elsewhere."""

from __future__ import annotations

import io

import pytest

from sluice import MissingFileError, PathEscapeError, Remote, UnsupportedError
from sluice.sources.protocol import Source
from sluice.sources.ranges import MemoryFile
from sluice.sources.remote.directory import SiblingFiles, below


def _siblings(url: str, has: str = "") -> tuple[SiblingFiles, list[str]]:
    opened: list[str] = []

    def record(remote: Remote) -> Source:
        opened.append(remote.url)
        if has and not remote.address.endswith(f"/{has}"):
            raise MissingFileError("there is no such file", file=remote.address)
        return MemoryFile(io.BytesIO(b"x"))

    return SiblingFiles(Remote(url, headers={"a": "b"}), record), opened


@pytest.mark.parametrize(
    ("url", "name", "expected"),
    [
        ("https://host/dir/index.json", "x.safetensors", "https://host/dir/x.safetensors"),
        ("https://host/dir/index.json?token=1", "sub/x", "https://host/dir/sub/x?token=1"),
        ("https://host/index.json", "a?b#c%2e", "https://host/a%3Fb%23c%252e"),
        ("s3://bucket/odd?key/index.json", "a b", "s3://bucket/odd?key/a b"),
    ],
)
def test_siblings_are_opened_by_name(url: str, name: str, expected: str) -> None:
    directory, opened = _siblings(url)
    directory.open(name)
    assert opened == [expected]


@pytest.mark.parametrize(
    "name", ["../x", "/x", "//other/x", "https://other/x", "a/../../x", "a\\..\\x", "", ".", "a//b"]
)
def test_names_that_lead_elsewhere_are_refused(name: str) -> None:
    directory, opened = _siblings("https://host/dir/index.json")
    for check in (directory.open, directory.check_inside):
        with pytest.raises(PathEscapeError, match="leads out of the remote directory"):
            check(name)
    assert not opened


def test_the_usual_names_are_tried_instead_of_a_listing() -> None:
    directory, opened = _siblings("https://me:secret@host/dir/?token=secret", has="pytorch_model.bin")
    assert [(entry.name, entry.kind) for entry in directory.entries()] == [("pytorch_model.bin", "file")]
    assert len(opened) == 4
    directory, _ = _siblings("https://me:secret@host/dir/index.json?token=secret", has="other")
    assert directory.name == "index.json"
    with pytest.raises(UnsupportedError, match=r"^https://host/dir/: the server has no listing of files"):
        list(directory.entries())


def test_files_below_a_directory() -> None:
    assert below("https://host/dir?x=1", "f g").url == "https://host/dir/f%20g?x=1"
    assert below("s3://bucket/dir/", "f").url == "s3://bucket/dir/f"
