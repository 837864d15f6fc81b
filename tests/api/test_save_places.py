"""Destinations of saves: limits, special files, missing permissions and concurrent writers."""

from __future__ import annotations

import errno
import os
import resource
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

import sluice
from sluice.writing.durable import replacement
from support import fresh_process
from support.directories import forms
from support.oracles import same
from support.trained_net import empty

MIB = 1 << 20

FORMS = forms(MIB)
EVERY_FORM = pytest.mark.parametrize("name", FORMS)


def state(value: float, rows: int = 1) -> dict[str, torch.Tensor]:
    return {name: torch.full((rows, 1 << 18), float(value)) for name in "abc"}  # 1 MiB per row


def value_of(path: Path) -> float:
    loaded = sluice.load_state_dict(path)
    assert len(loaded) == 3
    (value,) = {float(tensor.unique().item()) for tensor in loaded.values()}
    return value


def names(directory: Path) -> set[str]:
    return {str(path.relative_to(directory)) for path in directory.rglob("*")}


@contextmanager
def file_limit(nbytes: int) -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("reserving", [True, False])
@EVERY_FORM
def test_a_limit_on_the_size_of_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, reserving: bool
) -> None:
    if not reserving:  # the write itself reaches the limit: it is cut short, then it fails
        monkeypatch.setattr(replacement, "fallocate", lambda *_: None)
    path = tmp_path / name
    sluice.save(state(1), path, **FORMS[name])
    before = names(tmp_path)
    with file_limit(MIB // 2 + 17), pytest.raises(sluice.SaveError, match="File too large"):
        sluice.save(state(2), path, **FORMS[name], overwrite=True)
    assert value_of(path) == 1
    assert names(tmp_path) == before


@EVERY_FORM
def test_destinations_that_are_not_checkpoints_are_refused_and_kept(tmp_path: Path, name: str) -> None:
    is_file = "." in name
    path = tmp_path / name
    os.mkfifo(path)
    with pytest.raises(sluice.SaveError, match="found a FIFO"):
        sluice.save(state(1), path, **FORMS[name], overwrite=True)
    assert stat.S_ISFIFO(path.stat().st_mode)
    path.unlink()
    if is_file:
        path.mkdir()
    else:
        path.write_bytes(b"mine")
    with pytest.raises(sluice.SaveError, match="found a directory" if is_file else "found a file"):
        sluice.save(state(1), path, **FORMS[name], overwrite=True)
    assert path.is_dir() if is_file else path.read_bytes() == b"mine"
    with pytest.raises(sluice.SaveError, match="found a character device"):
        sluice.save(state(1), "/dev/null", **{"format": "torch" if is_file else "huggingface", **FORMS[name]})
    with pytest.raises(sluice.SaveError, match="File name too long"):
        sluice.save(state(1), tmp_path / ("x" * 256 + path.suffix), **FORMS[name])
    assert names(tmp_path) == {name}


@EVERY_FORM
def test_a_link_to_nothing_is_followed(tmp_path: Path, name: str) -> None:
    (tmp_path / name).symlink_to(f"elsewhere-{name}")
    sluice.save(state(1), tmp_path / name, **FORMS[name])
    assert (tmp_path / name).is_symlink()
    assert not (tmp_path / f"elsewhere-{name}").is_symlink()
    assert value_of(tmp_path / f"elsewhere-{name}") == 1


UNPRIVILEGED = """
import os, sys, torch, sluice
from pathlib import Path
os.chdir("/")
place = Path(sys.argv[1])
sluice.save({"a": torch.ones(1)}, sys.argv[1] + "/warm.pth")
os.setgid(65534)
os.setuid(65534)
for name, arguments in [
    ("model.pth", {}), ("model.safetensors", {}), ("whole", {}), ("sharded", {"max_shard_size": 1}),
]:
    for directory in ("closed", "open"):
        try:
            sluice.save({"a": torch.ones(2), "b": torch.ones(3)}, place / directory / name, **arguments, overwrite=True)
            print(directory, name, "saved")
        except sluice.SaveError as error:
            print(directory, name, error.problem)
"""


@pytest.mark.usefixtures("fresh_processes")
@pytest.mark.skipif(not hasattr(os, "getuid") or os.getuid() != 0, reason="only root can change its user")
def test_what_may_not_be_written_is_refused(tmp_path: Path) -> None:
    with tempfile.TemporaryDirectory(dir="/tmp") as path:  # other users have no access to the directories of pytest
        place = Path(path)
        place.chmod(0o777)
        for name, mode in (("closed", 0o555), ("open", 0o777)):
            (place / name).mkdir()
            (place / name).chmod(mode)
        for name in ("model.pth", "model.safetensors"):
            (place / "open" / name).write_bytes(b"old")
            (place / "open" / name).chmod(0o444)
        done = fresh_process.run(UNPRIVILEGED, path)
        assert done.returncode == 0, done.stderr
        assert done.stdout.splitlines() == [
            "closed model.pth the operating system refused: Permission denied",
            "open model.pth the file is read-only",
            "closed model.safetensors the operating system refused: Permission denied",
            "open model.safetensors the file is read-only",
            "closed whole the operating system refused: Permission denied",
            "open whole saved",
            "closed sharded the operating system refused: Permission denied",
            "open sharded saved",
        ]
        assert names(place / "closed") == set()
        assert (place / "open" / "model.pth").read_bytes() == b"old"


@EVERY_FORM
def test_modes_are_those_that_a_user_expects(tmp_path: Path, name: str) -> None:
    def modes() -> set[int]:
        return {stat.S_IMODE(path.stat().st_mode) for path in [path, *path.rglob("*")] if path.is_file()}

    path = tmp_path / name
    before = os.umask(0o026)
    try:
        sluice.save(state(1), path, **FORMS[name])
        assert modes() == {0o640}
        if path.is_dir():
            assert stat.S_IMODE(path.stat().st_mode) == 0o751
            path.chmod(0o700)
        else:
            path.chmod(0o604)
        sluice.save(state(2), path, **FORMS[name], overwrite=True)
        assert modes() == ({0o640} if path.is_dir() else {0o604})
        assert stat.S_IMODE(path.stat().st_mode) == (0o700 if path.is_dir() else 0o604)
    finally:
        os.umask(before)


@pytest.mark.skipif(not hasattr(os, "getuid") or os.getuid() != 0, reason="only root may give files away")
def test_the_owner_of_a_replaced_file_stays(tmp_path: Path) -> None:
    path = tmp_path / "model.pth"
    sluice.save(state(1), path)
    os.chown(path, 65534, 65533)
    sluice.save(state(2), path, overwrite=True)
    assert (path.stat().st_uid, path.stat().st_gid) == (65534, 65533)


@pytest.mark.skipif(not hasattr(os, "getuid") or os.getuid() != 0, reason="only root may give files away")
@pytest.mark.parametrize(("member", "group", "mode"), [(True, 65533, 0o664), (False, 0, 0o644)])
def test_a_group_that_cannot_be_kept_leaves_no_permissions_to_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, member: bool, group: int, mode: int
) -> None:
    path, real = tmp_path / "model.pth", os.fchown
    path.touch()
    os.chown(path, 65534, 65533)
    path.chmod(0o664)

    def fchown(descriptor: int, user: int, group: int) -> None:
        if user != -1 or not member:
            raise PermissionError(errno.EPERM, "not permitted")
        real(descriptor, user, group)

    monkeypatch.setattr(os, "fchown", fchown)
    sluice.save(state(2), path, overwrite=True)
    assert (path.stat().st_gid, stat.S_IMODE(path.stat().st_mode)) == (group, mode)


@pytest.mark.parametrize("name", [*FORMS, "dcp"])
def test_a_relative_path_and_a_change_of_the_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.chdir(tmp_path)
    form = FORMS.get(name, {"format": "dcp"})
    report = sluice.save(state(1), name, **form, progress=lambda _: os.chdir("/"))
    assert value_of(tmp_path / name) == 1
    assert all(file.partition("/")[0] in {name, f"{name}.safetensors"} for file in report.files), report.files
    assert not [each for each in names(tmp_path) if "sluice" in each]


def test_a_path_that_is_not_utf_8(tmp_path: Path) -> None:
    for name, form in {**FORMS, "dcp": {"format": "dcp"}}.items():
        path = tmp_path / os.fsdecode(b"\xff" + name.encode())
        sluice.save(state(1), path, **form)
        report = sluice.save(state(2), path, **form, overwrite=True)
        assert value_of(path) == 2
        assert report.replaced


def test_space_is_reserved_without_writing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "posix_fallocate", lambda *_: pytest.fail("writes to every block where it is emulated"))
    with replacement.Replacement(tmp_path / "f", overwrite=False) as file:
        file.reserve(MIB)
        assert Path(file.hidden).stat().st_size == MIB


@pytest.mark.parametrize("place", ["copy", "map"])
@EVERY_FORM
def test_saving_over_what_a_live_model_was_loaded_from(tmp_path: Path, name: str, place: Any) -> None:
    def model() -> torch.nn.Sequential:
        return torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(3)))

    path = tmp_path / name
    sluice.save(model(), path, **{**FORMS[name], **({"max_shard_size": 20_000} if name == "sharded" else {})})
    loaded = empty(model)
    sluice.load_into(loaded, path, place=place)
    with torch.no_grad():
        next(loaded.parameters()).mul_(2)
    expected = {key: tensor.clone() for key, tensor in loaded.state_dict().items()}
    for _ in range(2):
        sluice.save(loaded, path, **FORMS[name], overwrite=True)
        assert all(same(tensor, expected[key]) for key, tensor in loaded.state_dict().items())
        assert all(same(tensor, expected[key]) for key, tensor in sluice.load_state_dict(path).items())


def test_a_failed_save_removes_the_directories_that_it_made(tmp_path: Path) -> None:
    for name in ("whole", "sharded"):
        with file_limit(1000), pytest.raises(sluice.SaveError):
            sluice.save(state(1), tmp_path / "a" / "b" / name, **FORMS[name])
    assert names(tmp_path) == set()


WRITER = """
import sys, torch, sluice
from pathlib import Path
place, number = Path(sys.argv[1]), int(sys.argv[2])
state = {name: torch.full((1 << 14,), float(number)) for name in "abc"}
sluice.save(state, place / f"warm{number}.pth")
for name, arguments in eval(sys.argv[3]):
    print("ready", flush=True)
    sys.stdin.readline()
    saved = 0
    for _ in range(25):
        try:
            sluice.save(state, place / name, **arguments, overwrite=True)
            saved += 1
        except sluice.SaveError as error:
            assert "another save is writing" in str(error), error
    print(saved, flush=True)
"""


@pytest.mark.usefixtures("fresh_processes")
def test_two_writers_of_one_checkpoint(tmp_path: Path) -> None:
    forms = [*list(FORMS.items())[:3], ("sharded", {"max_shard_size": 70_000})]
    writers = [
        fresh_process.SUBPROCESS.Popen(
            [sys.executable, "-c", WRITER, str(tmp_path), str(number), repr(forms)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for number in (1, 2)
    ]
    for name, _ in forms:
        for writer in writers:
            assert writer.stdout.readline() == "ready\n"
        for writer in writers:
            writer.stdin.write("\n")
            writer.stdin.flush()
        counts = [int(writer.stdout.readline()) for writer in writers]
        assert min(counts) >= (0 if name in {"whole", "sharded"} else 25)  # writers of a directory exclude each other
        assert max(counts) > 0
        assert value_of(tmp_path / name) in {1, 2}
    for writer in writers:
        with writer:
            pass
    assert [writer.returncode for writer in writers] == [0, 0]
    assert not [each for each in names(tmp_path) if "sluice" in each]
