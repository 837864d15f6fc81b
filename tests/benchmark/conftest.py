"""Benchmark tests share the checkpoints of the tiny model."""

from __future__ import annotations

from support.tiny_checkpoints import checkpoints

__all__ = ["checkpoints"]
