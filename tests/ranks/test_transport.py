"""Transfers that the process group fails, because a rank was lost or for a different reason."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch.distributed as dist

from sluice import ReadError
from sluice import _defaults as defaults
from sluice.ranks.agreement import OtherRankError
from sluice.ranks.transport import GroupTransport


class Looks:
    """The ranks of a load, one of which is seen to be lost at a certain look."""

    rank = 0
    ranks = (0, 1)

    def __init__(self, answers: Iterator[bool]) -> None:
        self._answers = answers

    def look(self, **_: bool) -> bool:
        return next(self._answers)


def transport(answers: Iterator[bool], monkeypatch: pytest.MonkeyPatch) -> GroupTransport:
    def closed(*_: Any, **__: Any) -> None:
        raise RuntimeError("Connection closed by peer")

    monkeypatch.setattr(dist, "get_backend_config", lambda _: "gloo")
    monkeypatch.setattr(dist, "all_reduce", closed)
    return GroupTransport(Looks(answers), {(0, 1): object()}, [])  # type: ignore[arg-type]


def test_a_connection_that_closes_before_its_process_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel closes the sockets of a killed process first: the other rank has not failed by itself."""
    with pytest.raises(OtherRankError):
        transport(iter([False, False, True]), monkeypatch).all_well(well=True)


def test_a_network_that_fails_with_all_ranks_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(defaults, "RANK_FAREWELL_SECONDS", 0.0)
    with pytest.raises(ReadError, match="failed to transfer data: Connection closed by peer"):
        transport(iter([False, False]), monkeypatch).all_well(well=True)
