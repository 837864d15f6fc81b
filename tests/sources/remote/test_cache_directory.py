"""Cache directories: their bound, what is removed, what is in use, complete entries, and who may read them."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path

import pytest

from sluice import _defaults as defaults
from sluice.sources.protocol import Source
from sluice.sources.remote import cache_directory, cache_files
from sluice.sources.remote.cache_directory import CacheDirectory
from sluice.sources.remote.caching import CompleteFile
from sluice.sources.remote.file import RemoteFile
from support.cached_objects import BLOCK, VersionedObject, cached_bytes, content, entries, opened, read

CONTENT = content()

#: Room for two objects of ``CONTENT``'s size and what entries take besides, and not for three.
BOUND = 2 * len(CONTENT) + (256 << 10)


def named(number: int) -> VersionedObject:
    return VersionedObject(content(seed=number), path=f"https://host/{number}.bin")


def load(number: int, cache: Path, bound: int | str | None = None) -> Source:
    """Return a closed source of which all bytes were read."""
    remote = named(number)
    source = opened(remote, cache, bound)
    assert read(source, 0, len(remote.content)) == remote.content
    source.close()
    return source


def names(cache: Path) -> set[str]:
    return {json.loads((entry / "about.json").read_text())["address"][-5:] for entry in entries(cache)}


def is_complete(remote: VersionedObject, cache: Path) -> bool:
    source = opened(remote, cache)
    source.close()
    return isinstance(source, CompleteFile)


def note(source: Source) -> str:
    return (source.note or "") if isinstance(source, RemoteFile) else ""


def test_a_complete_object_is_a_local_file(tmp_path: Path) -> None:
    load(1, tmp_path)
    remote = named(1)
    source = opened(remote, tmp_path)
    assert isinstance(source, CompleteFile)
    assert source.path == remote.path
    assert Path(source.local_path).name == "1.bin"
    assert read(source, 0, len(CONTENT)) == remote.content
    source.map(0, 10)[0].close()
    assert not remote.requests
    source.close()


def test_files_are_private_and_the_directory_is_tagged(tmp_path: Path) -> None:
    cache = tmp_path / "new" / "cache"
    load(1, cache)
    assert (cache / "CACHEDIR.TAG").read_text().startswith("Signature: 8a477f597d28d172789f06886806bc55")
    for path in cache.rglob("*"):
        if path.name != "CACHEDIR.TAG":
            assert stat.S_IMODE(path.stat().st_mode) == (0o700 if path.is_dir() else 0o600), path


def test_a_directory_that_has_other_files_is_not_tagged_and_they_stay(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("mine")
    load(1, tmp_path, BOUND)
    load(2, tmp_path, BOUND)
    load(3, tmp_path, BOUND)
    assert not (tmp_path / "CACHEDIR.TAG").exists()
    assert (tmp_path / "thesis.txt").read_text() == "mine"


def test_the_objects_that_were_not_used_for_longest_are_removed(tmp_path: Path) -> None:
    for number in (1, 2):
        load(number, tmp_path, BOUND)
    load(1, tmp_path, BOUND)
    load(3, tmp_path, BOUND)
    assert names(tmp_path) == {"1.bin", "3.bin"}
    assert cached_bytes(tmp_path) <= BOUND
    assert not list((tmp_path / "trash").iterdir())


def test_objects_in_use_are_not_removed(tmp_path: Path) -> None:
    load(1, tmp_path, BOUND)
    complete, partial = opened(named(1), tmp_path, BOUND), opened(named(2), tmp_path, BOUND)
    read(partial, 0, 6 * BLOCK)
    assert "leaves no room" in note(load(3, tmp_path, BOUND))
    assert names(tmp_path) == {"1.bin", "2.bin", "3.bin"}
    assert cached_bytes(tmp_path) <= BOUND
    assert read(complete, 5, 10) == named(1).content[5:15]
    complete.close()
    assert not note(load(4, tmp_path, BOUND))
    assert names(tmp_path) == {"2.bin", "3.bin", "4.bin"}
    partial.close()


def test_an_object_that_is_larger_than_the_bound_is_cached_in_part(tmp_path: Path) -> None:
    bound = 5 * BLOCK
    for _ in range(2):
        remote = named(1)
        source = opened(remote, tmp_path, bound)
        for index in range(10):
            assert read(source, index * BLOCK, BLOCK) == remote.content[index * BLOCK :][:BLOCK]
        source.close()
        assert "leaves no room" in note(source)
        assert 3 * BLOCK <= cached_bytes(tmp_path) <= bound
    assert min(offset for offset, _ in remote.requests) >= 4 * BLOCK


def test_the_file_system_keeps_free_space(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    load(1, tmp_path)
    monkeypatch.setattr(defaults, "CACHE_FREE_BYTES", 1 << 60)
    assert "leaves no room" in note(load(2, tmp_path))
    assert names(tmp_path) == {"1.bin"}  # to remove it would not be enough


def test_a_source_without_room_for_more_reads_what_is_present(tmp_path: Path) -> None:
    load(1, tmp_path, BOUND)
    used = opened(named(1), tmp_path, BOUND)
    remote = named(2)
    source = opened(remote, tmp_path, BOUND)
    read(source, 0, 5 * BLOCK)
    last = opened(named(3), tmp_path, BOUND)
    read(last, 0, 4 * BLOCK)
    read(source, 5 * BLOCK, 5 * BLOCK)
    assert "leaves no room" in note(source)
    remote.requests.clear()
    assert read(source, BLOCK, 5 * BLOCK) == remote.content[BLOCK : 6 * BLOCK]
    assert remote.requests == [(5 * BLOCK, BLOCK)]
    for each in (used, source, last):
        each.close()


def test_a_recorded_sum_that_is_too_large_or_missing_is_counted_anew(tmp_path: Path) -> None:
    load(1, tmp_path, BOUND)
    with CacheDirectory.at(str(tmp_path)).locks.state() as state:
        right = state.total
        state.total = 1 << 50
    load(2, tmp_path, BOUND)
    assert names(tmp_path) == {"1.bin", "2.bin"}
    (tmp_path / "lock").write_bytes(b"")
    load(3, tmp_path, BOUND)
    assert names(tmp_path) == {"2.bin", "3.bin"}
    with CacheDirectory.at(str(tmp_path)).locks.state() as state:
        assert right is not None
        assert state.total == 2 * right


def test_slices_are_charged_what_they_take(tmp_path: Path) -> None:
    for number in range(8):
        source = opened(named(number), tmp_path, BOUND)
        read(source, 3 * BLOCK, 10)
        source.close()
    assert len(entries(tmp_path)) == 8
    assert cached_bytes(tmp_path) < 8 * 4 * BLOCK


def test_a_new_version_gets_an_entry_of_its_own(tmp_path: Path) -> None:
    load(1, tmp_path, BOUND)
    changed = VersionedObject(content(seed=99), path=named(1).path)
    source = opened(changed, tmp_path, BOUND)
    assert read(source, 0, len(CONTENT)) == changed.content
    source.close()
    assert len(entries(tmp_path)) == 2
    load(2, tmp_path, BOUND)
    versions = {json.loads((entry / "about.json").read_text())["version"] for entry in entries(tmp_path)}
    assert versions == {changed.facts.version, named(2).facts.version}  # the old version was used last before these


def test_complete_data_that_was_changed_is_compared_block_by_block(tmp_path: Path) -> None:
    load(1, tmp_path)
    with (entries(tmp_path)[0] / "1.bin").open("r+b") as file:
        file.seek(3 * BLOCK)
        file.write(b"wrong")
    remote = named(1)
    source = opened(remote, tmp_path)
    assert read(source, 0, len(CONTENT)) == remote.content
    assert remote.requests == [(3 * BLOCK, BLOCK)]
    source.close()
    assert is_complete(remote, tmp_path)


@pytest.mark.parametrize("damage", ["short", "no header", "no data", "link"])
def test_an_entry_that_is_not_whole_is_made_anew(tmp_path: Path, damage: str) -> None:
    load(1, tmp_path)
    [entry] = entries(tmp_path)
    match damage:
        case "short":
            os.truncate(entry / "1.bin", 100)
        case "no header":
            os.truncate(entry / "blocks", 10)
        case "no data":
            (entry / "1.bin").unlink()
        case "link":
            (entry / "1.bin").rename(tmp_path / "elsewhere")
            (entry / "1.bin").symlink_to(tmp_path / "elsewhere")
    load(1, tmp_path)
    assert is_complete(named(1), tmp_path)


def test_blocks_that_a_power_failure_lost_do_not_become_part_of_a_complete_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = opened(named(1), tmp_path)
    read(first, 0, 6 * BLOCK)
    first.close()
    with (entries(tmp_path)[0] / "1.bin").open("r+b") as file:  # the record was written to the disk, the block was not
        file.seek(4 * BLOCK)
        file.write(bytes(BLOCK))
    monkeypatch.setattr(cache_files, "boot_id", lambda: b"another boot now")
    monkeypatch.setattr(cache_directory, "boot_id", lambda: b"another boot now")
    second = opened(named(1), tmp_path)
    read(second, 6 * BLOCK, len(CONTENT) - 6 * BLOCK)  # all blocks count now
    second.close()
    remote = named(1)
    third = opened(remote, tmp_path)
    assert read(third, 0, len(CONTENT)) == remote.content
    assert remote.requests == [(4 * BLOCK, BLOCK)]
    third.close()
    assert is_complete(remote, tmp_path)


def test_an_entry_is_complete_only_when_its_last_user_closes_it(tmp_path: Path) -> None:
    first, second = opened(named(1), tmp_path), opened(named(1), tmp_path)
    read(first, 0, len(CONTENT))
    first.close()
    assert not is_complete(named(1), tmp_path)
    second.close()
    assert is_complete(named(1), tmp_path)


@pytest.mark.parametrize("kind", ["a file", "writable by others"])
def test_a_directory_that_cannot_be_used_is_noted(tmp_path: Path, kind: str) -> None:
    cache = tmp_path / "cache"
    if kind == "a file":
        cache.write_bytes(b"")
    else:
        load(1, cache)
        (cache / "objects").chmod(0o777)
    assert note(load(2, cache)).startswith("not cached: ")


def test_an_abandoned_source_releases_its_entry(tmp_path: Path) -> None:
    source = opened(named(1), tmp_path, BOUND)
    read(source, 0, 5 * BLOCK)
    del source
    for number in (2, 3):
        load(number, tmp_path, BOUND)
    assert names(tmp_path) == {"2.bin", "3.bin"}
