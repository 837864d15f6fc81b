"""The index file of a sharded checkpoint: its content, and everything that is refused."""

from __future__ import annotations

import json
from contextlib import closing
from pathlib import Path, PurePosixPath, PureWindowsPath
from unittest import mock

import msgspec
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from sluice._errors import FormatError, LimitError, PathEscapeError, SluiceError, TruncatedError, UnsupportedError
from sluice._options import Limits
from sluice.formats import strict_json
from sluice.formats.shard_index import ShardIndex, read_shard_index
from sluice.sources.opening import find_place
from support.work import at_most


def read(directory: Path, text: str | bytes, limits: Limits | None = None) -> ShardIndex:
    path = directory / "model.safetensors.index.json"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with closing(find_place(path).open_file()) as source:
        return read_shard_index(source, limits or Limits())


def refusal(directory: Path, text: str | bytes, kind: type[SluiceError], limits: Limits | None = None) -> SluiceError:
    with at_most(1_000_000), pytest.raises(kind) as caught:
        read(directory, text, limits)
    assert caught.value.file == str(directory / "model.safetensors.index.json")
    return caught.value


def test_what_it_says(tmp_path: Path) -> None:
    text = json.dumps({"metadata": {"total_size": 12, "by": [1.5, None]}, "weight_map": {"a.b": "x", "ü": "s/y"}})
    index = read(tmp_path, text)
    assert index.weight_map == {"a.b": "x", "ü": "s/y"}
    assert index.total_bytes == 12


@pytest.mark.parametrize("metadata", ["", "{}", "null", "[1]", '{"total_size": true}', '{"total_size": 8.0}'])
def test_a_total_size_may_be_absent_or_a_float(tmp_path: Path, metadata: str) -> None:
    member = f'"metadata": {metadata}, ' if metadata else ""
    total = read(tmp_path, "{" + member + '"weight_map": {"a": "x"}}').total_bytes
    assert total == (8 if "8.0" in metadata else None)


@pytest.mark.parametrize(
    "file",
    [
        *("../x", "a/../x", "a/../../x", "..", ".", "./x", "", "a//x", "a/", "/x", "//server/share/x", "C:x", "C:/x"),
        *("C:\\x", "\\x", "a\\x", "..\\x", "\\\\server\\share\\x", "x:stream", "http://x", ".. /x", "... /x", "a\0b"),
    ],
)
def test_names_that_lead_elsewhere(tmp_path: Path, file: str) -> None:
    error = refusal(tmp_path, json.dumps({"weight_map": {"fine": "x", "w": file}}), PathEscapeError)
    assert error.tensor == "w"
    assert error.found == repr(file)


@given(st.text(alphabet="./\\:a \0-C~", max_size=12))
@example("model-00001-of-00002.safetensors")
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_an_accepted_name_stays_inside_on_every_platform(tmp_path: Path, file: str) -> None:
    try:
        read(tmp_path, json.dumps({"weight_map": {"w": file}}))
    except PathEscapeError:
        return
    assert file
    for flavour in (PurePosixPath(file), PureWindowsPath(file)):
        assert not flavour.anchor
        assert flavour.as_posix() == file  # with one spelling
        assert all(part.rstrip(". ") for part in flavour.parts)


@pytest.mark.parametrize(
    "text",
    [
        '{"weight_map": []}',
        '{"weight_map": {}}',
        '{"weight_map": null}',
        '{"weight_map": {"a": 1}}',
        '{"weight_map": {"a": "x", "a": "y"}}',
        '{"weight_map": {"a": "x", "\\u0061": "y"}}',
        '{"weight_map": {"a": "x"}, "weight_map": {"b": "x"}}',
        '{"weight_map": {"a": "x"}',
        '{"metadata": NaN, "weight_map": {"a": "x"}}',
        '{"metadata": ' + "[" * 2_000_000 + ', "weight_map": {"a": "x"}}',
        '{"weight_map": {"\\ud800": "x"}}',
        b'{"metadata": "\xff", "weight_map": {"a": "x"}}',
        '["weight_map"]',
    ],
)
def test_values_that_are_not_an_index(tmp_path: Path, text: str | bytes) -> None:
    assert type(refusal(tmp_path, text, FormatError)) is FormatError


def test_files_of_a_different_kind(tmp_path: Path) -> None:
    for text in ('{"architectures": ["X"]}', '{"a": "1.bin"}', "{}"):
        refusal(tmp_path, text, UnsupportedError)
    refusal(tmp_path, b"", TruncatedError)


@pytest.mark.parametrize(
    ("text", "limits", "words"),
    [
        ('{"weight_map": {"a": "x", "b": "x", "c": "x"}}', Limits(entries=2), "entries"),
        ('{"weight_map": {"a": "x", "b": "y", "c": "z"}}', Limits(files=2), "files"),
        ('{"weight_map": {"' + "a" * 5000 + '": "x"}}', Limits(name_bytes=4096), "name_bytes"),
        ('{"weight_map": {"a": "' + "x" * 5000 + '"}}', Limits(name_bytes=4096), "name_bytes"),
        ('{"metadata": {' + '"":1,' * 1_500_000 + '"":1}, "weight_map": {"a": "x"}}', Limits(), "entries"),
    ],
    ids=["entries", "files", "long name", "long file name", "values"],
)
def test_limits(tmp_path: Path, text: str, limits: Limits, words: str) -> None:
    assert words in str(refusal(tmp_path, text, LimitError, limits))


def test_a_gigabyte_is_refused_before_it_is_read(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors.index.json"
    with path.open("wb") as file:
        file.truncate(1 << 30)
    with closing(find_place(path).open_file()) as source, pytest.raises(LimitError, match="header_bytes"):
        read_shard_index(source, Limits())


def test_brackets_and_commas_in_names_are_not_structure(tmp_path: Path) -> None:
    names = {f'layers[{number}], {{"w\\": ': "x" for number in range(2000)}
    assert read(tmp_path, json.dumps({"weight_map": names}), Limits(entries=2000)).weight_map == names


def test_msgspec_looks_at_the_fields_of_a_type_under_a_lock(monkeypatch: pytest.MonkeyPatch) -> None:
    decoder = mock.Mock(side_effect=lambda kind: msgspec.json.Decoder(kind) if strict_json._lock.locked() else None)
    monkeypatch.setattr(strict_json, "_decoder", decoder)
    assert strict_json.decode_json(b"1", int, "it", "file") == 1  # two threads at once would end the process
