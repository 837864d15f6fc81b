"""Checkpoints inside tar archives are read where they lie, with every verb."""

from __future__ import annotations

import tarfile
import time
from contextlib import suppress
from importlib import import_module
from pathlib import Path

import pytest
import torch

import sluice
from sluice import (
    CheckpointError,
    FormatError,
    LimitError,
    MissingFileError,
    PathEscapeError,
    TruncatedError,
    UnsupportedError,
)
from sluice.formats.archives.tar import TarDirectory, is_tar
from support.hostile_archives import tar_header as header
from support.oracles import same
from support.sources import MemorySource

STATE = {"a": torch.arange(300_000.0), "b": torch.ones(3, dtype=torch.bfloat16)}
FORMS = {"ustar": tarfile.USTAR_FORMAT, "gnu": tarfile.GNU_FORMAT, "pax": tarfile.PAX_FORMAT}


def nemo(tmp_path: Path, form: int = tarfile.PAX_FORMAT, prefix: str = "./") -> Path:
    torch.save(STATE, tmp_path / "model_weights.ckpt")
    (tmp_path / "model_config.yaml").write_text("x: 1\n", encoding="utf-8")
    with tarfile.open(tmp_path / "m.nemo", "w", format=form) as archive:
        for name in ("model_config.yaml", "model_weights.ckpt"):
            archive.add(tmp_path / name, prefix + name)
    return tmp_path / "m.nemo"


@pytest.mark.parametrize("prefix", ["", "./", "one/directory/", "long" * 40 + "/"], ids=["", "dot", "below", "long"])
@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_nemo_archives(tmp_path: Path, form: int, prefix: str) -> None:
    if form == tarfile.USTAR_FORMAT and len(prefix) > 100:
        pytest.skip("its names are short")
    path = nemo(tmp_path, form, prefix)
    assert same(dict(sluice.load_state_dict(path)), STATE)
    with sluice.open(path) as checkpoint:
        assert checkpoint.format == "tar-torch-zip"
        assert checkpoint.files == (str(path),)
        assert checkpoint["a"][7:9].read().tolist() == [7.0, 8.0]


def test_weights_are_converted_and_mapped_and_damage_is_found(tmp_path: Path) -> None:
    path = nemo(tmp_path)
    sluice.convert(path, tmp_path / "m.safetensors")
    assert sluice.diff(path, tmp_path / "m.safetensors").same
    model = torch.nn.ParameterDict(STATE).to("meta")
    sluice.load_into(model, path, place="map")
    assert same({name: tensor.detach() for name, tensor in model.items()}, STATE)
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    assert [problem.kind for problem in sluice.verify(path).problems] == ["checksum"]


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_nemo_archives_of_distributed_checkpoints(tmp_path: Path) -> None:
    import_module("torch.distributed.checkpoint").save(
        {**STATE, "step": 3}, checkpoint_id=str(tmp_path / "model_weights"), no_dist=True
    )
    with tarfile.open(tmp_path / "m.nemo", "w") as archive:
        archive.add(tmp_path / "model_weights", "./model_weights")
    found = dict(sluice.load_state_dict(tmp_path / "m.nemo"))
    assert found.pop("step") == 3
    assert same(found, STATE)
    assert sluice.verify(tmp_path / "m.nemo").ok


def attributes(record: bytes, kind: bytes = tarfile.XHDTYPE) -> bytes:
    return header("x", len(record), kind) + record.ljust(512, b"\0")


END = bytes(1024)


@pytest.mark.parametrize(
    ("content", "kind", "problem"),
    [
        (header("a\\b") + END, PathEscapeError, "outside the target directory"),
        (attributes(b"16 path=../../x\n") + header("x") + END, PathEscapeError, "outside the target directory"),
        (attributes(b"/x\0", tarfile.GNUTYPE_LONGNAME) + header("x") + END, PathEscapeError, "outside the target"),
        (attributes(b"23 size=9999999999999\n") + header("x") + END, FormatError, "attributes .* are damaged"),
        (attributes(b"22 size=9999999999999\n") + header("x") + END, FormatError, "extends past the end"),
        (attributes(b"99999999 path=x\n") + header("x") + END, FormatError, "attributes .* are damaged"),
        (attributes(b"0 path=x\n") + header("x") + END, FormatError, "attributes .* are damaged"),
        (attributes(b"9" * 5000) + header("x") + END, FormatError, "attributes .* are damaged"),
        (header("x", -5) + END, FormatError, "a damaged header"),
        (header("x") + header("y") + header("z")[:500], TruncatedError, "ends without its end block"),
        (header("x"), TruncatedError, "ends without its end block"),
        (
            header("x", 2**21, tarfile.GNUTYPE_LONGNAME) + bytes(2**21) + END,
            LimitError,
            "a name in the tar archive exceeds",
        ),
        (header("a", kind=tarfile.DIRTYPE) * 12, LimitError, "exceeds the limit 'files'"),
        (header("pickle") + header("storages") + END, UnsupportedError, "torch.save before 0.2"),
        (header("pickle") + header("storages", kind=tarfile.SYMTYPE) + END, FormatError, "a link, a device or sparse"),
    ],
)
def test_hostile_archives(content: bytes, kind: type[CheckpointError], problem: str) -> None:
    assert is_tar(content)
    with pytest.raises(kind, match=problem):
        TarDirectory(MemorySource(content), sluice.Limits(files=10))


@pytest.mark.parametrize(
    "content",
    [
        header("x", 1_000_002, tarfile.GNUTYPE_LONGNAME)
        + (b"a/" * 500_000 + b"bc").ljust(1_000_448, b"\0")
        + header("x")
        + END,
        header("x", 1_000_000, tarfile.XHDTYPE) + (b"5 a=\n" * 200_000).ljust(1_000_448, b"\0") + header("x") + END,
    ],
    ids=["deep", "attributes"],
)
def test_long_names_and_attributes_take_no_time(content: bytes) -> None:
    started = time.process_time()
    with suppress(CheckpointError):
        TarDirectory(MemorySource(content), sluice.Limits())
    assert time.process_time() - started < 2


@pytest.mark.parametrize("kind", [tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.CHRTYPE, tarfile.DIRTYPE])
def test_members_that_are_not_files_are_not_opened(tmp_path: Path, kind: bytes) -> None:
    (tmp_path / "m.nemo").write_bytes(header("model_weights.ckpt", kind=kind) + END)
    with pytest.raises(FormatError, match="holds no recognized checkpoint"):
        sluice.open(tmp_path / "m.nemo")
    directory = TarDirectory(MemorySource((tmp_path / "m.nemo").read_bytes()), sluice.Limits())
    with pytest.raises(FormatError, match="a link, a device"):
        directory.open("model_weights.ckpt")
    with pytest.raises(MissingFileError):
        directory.open("x")
