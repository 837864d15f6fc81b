"""Reads that fail, are interrupted, refused or short, at every position of a load."""

from __future__ import annotations

import errno
import os
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from unittest.mock import MagicMock

import pytest
import torch

import sluice
from sluice import _defaults, _options
from support.directories import write_legacy, write_parameters, write_safetensors, write_zip
from support.system_calls import Injection, failing, short

pytestmark = pytest.mark.skipif(not hasattr(os, "preadv"), reason="this platform has no preadv")

MIB = 1 << 20


def tensors() -> dict[str, torch.Tensor]:
    """Tensors that are read in every way: in place, staged one by one, and staged together."""
    generator = torch.Generator().manual_seed(5)
    return {
        "large": torch.randn(300_000, generator=generator),
        "permuted": torch.randn(40, 30, generator=generator).t(),
        "whole": torch.arange(7),
        "odd": torch.randn(999, generator=generator).half(),
        "other": torch.randn(280_000, generator=generator),
    }


WRITERS = [write_zip, write_legacy, write_safetensors, write_parameters]


@pytest.fixture(scope="module", params=WRITERS, ids=lambda write: write.__name__.removeprefix("write_"))
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoint")
    state = tensors()
    if request.param is write_safetensors:  # it takes no other layouts
        state = {name: tensor.contiguous() for name, tensor in state.items()}
    path: Path = request.param(folder, state)
    return path


@pytest.fixture
def _direct(monkeypatch: pytest.MonkeyPatch) -> None:
    """Read small files directly, as if every file system supported it."""
    monkeypatch.setattr(_defaults, "DIRECT_FILE_BYTES", 0)


def assert_loaded(state_dict: dict[str, torch.Tensor], dtype: torch.dtype | None = None) -> None:
    for name, tensor in tensors().items():
        expected = tensor.to(dtype) if dtype and tensor.is_floating_point() else tensor
        assert torch.equal(state_dict[name], expected), name


@pytest.mark.usefixtures("_direct")
@pytest.mark.parametrize("page_cache", ["keep", "bypass"])
def test_a_failure_of_any_read_is_a_read_error(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, page_cache: _options.PageCache
) -> None:
    outcomes: list[Exception | None] = []
    injection = None
    while injection is None or injection.hits:  # until a load has fewer reads
        with monkeypatch.context() as faults:
            injection = Injection(faults, failing(errno.EIO), len(outcomes) + 1)
            try:
                sluice.load_state_dict(checkpoint, page_cache=page_cache)
                outcomes.append(None)
            except Exception as error:  # noqa: BLE001 - judged below
                outcomes.append(error)
    assert len(outcomes) >= 4
    for each in outcomes:
        if each is None:  # a probe of the page cache: it only advises
            continue
        assert type(each) is sluice.ReadError
        assert str(each.file).startswith(str(checkpoint))
        assert each.offset is not None
        assert "Input/output error" in str(each)
        assert isinstance(each.__cause__, OSError)
    assert any(outcomes)
    assert_loaded(sluice.load_state_dict(checkpoint))


@pytest.mark.parametrize("number", [errno.EINTR, errno.EAGAIN], ids=["EINTR", "EAGAIN"])
def test_an_interrupted_or_refused_read_is_tried_again(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    tries: Counter[int] = Counter()

    def fail_twice(read: Callable[[memoryview], int], buffer: memoryview, offset: int) -> int:
        tries[offset] += 1
        return failing(number)(read, buffer, offset) if tries[offset] <= 2 else read(buffer)

    Injection(monkeypatch, fail_twice)
    assert_loaded(sluice.load_state_dict(checkpoint, dtype=torch.bfloat16), torch.bfloat16)
    assert len(tries) >= 2


@pytest.mark.usefixtures("_direct")
def test_a_direct_read_that_is_refused_becomes_a_buffered_one(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only the flag is accepted, as on some FUSE and network file systems; direct reads fail."""
    monkeypatch.setattr(os, "O_DIRECT", 0)
    everything = MagicMock()
    everything.__contains__.return_value = True
    monkeypatch.setattr("sluice.machine.facts._DIRECT_FILESYSTEMS", everything)
    model = torch.nn.ParameterDict(
        {name: torch.nn.Parameter(tensor, requires_grad=False) for name, tensor in tensors().items()}
    ).to("meta")
    injection = Injection(monkeypatch, _refuse_aligned)
    report = sluice.load_into(model, checkpoint, page_cache="bypass")
    assert injection.hits
    assert report.stepped_down > 0
    assert_loaded({name: parameter.detach() for name, parameter in model.items()})


def _refuse_aligned(read: Callable[[memoryview], int], buffer: memoryview, offset: int) -> int:
    if offset % 4096 == 0 and len(buffer) % 4096 == 0 and len(buffer) >= MIB:  # headers are read in smaller pieces
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
    return read(buffer)


@pytest.mark.parametrize("most", [1, 2, 3, 5, 8, 64, 511, 4095, 4097])
def test_short_reads_are_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, most: int) -> None:
    value = {"a": torch.arange(600.0), "b": torch.arange(70, dtype=torch.int16)}
    for legacy in (False, True):
        torch.save(value, tmp_path / "f", _use_new_zipfile_serialization=not legacy)
        with monkeypatch.context() as patch:
            injection = Injection(patch, short(most))
            found = sluice.load_state_dict(tmp_path / "f")
        assert injection.hits > 2400 // most
        assert all(torch.equal(found[name], tensor) for name, tensor in value.items())
