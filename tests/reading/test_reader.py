"""Reads of one checkpoint that share a session: a failure of one of them spoils no other."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from sluice._errors import ReadError
from sluice.checkpoint.open_checkpoint import OpenCheckpoint
from sluice.engine.running_plan import RunningPlan, SessionEndedError
from sluice.reading.reader import CheckpointReader
from sluice.sources.local import LocalFile


def test_a_read_is_repeated_if_its_session_ended_before_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = {"a": torch.randn(500_000), "b": torch.randn(500_000)}
    torch.save(tensors, tmp_path / "f.pt")
    with OpenCheckpoint.open(tmp_path / "f.pt") as checkpoint, CheckpointReader(checkpoint) as reader:
        pending = reader.start([checkpoint.entries["b"]])

        def ended(_: RunningPlan) -> None:
            monkeypatch.undo()
            raise SessionEndedError("another plan failed")

        monkeypatch.setattr(RunningPlan, "wait", ended)
        assert torch.equal(pending.result()[0], tensors["b"])


def test_a_reader_goes_on_after_a_failed_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tensor = torch.randn(500_000)
    torch.save({"a": tensor}, tmp_path / "f.pt")
    with OpenCheckpoint.open(tmp_path / "f.pt") as checkpoint, CheckpointReader(checkpoint) as reader:
        entry = checkpoint.entries["a"]
        checkpoint.locate(entry.storages)
        with monkeypatch.context() as patch:

            def fails(*_: object, **__: object) -> int:
                raise ReadError("broken", file="f", offset=0)

            patch.setattr(LocalFile, "read_into", fails)
            with pytest.raises(ReadError, match="broken"):
                reader.read([entry])
        assert torch.equal(reader.read([entry])[0], tensor)
