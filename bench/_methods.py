"""The registry: every method by its name."""

from __future__ import annotations

from bench._records import Method
from bench.peers import GPU_PEERS, PEERS, REFERENCE
from bench.tutorial.strategies import STRATEGIES

__all__ = ["METHODS"]

METHODS: dict[str, Method] = {method.name: method for method in (*STRATEGIES, *PEERS, *GPU_PEERS, REFERENCE)}
