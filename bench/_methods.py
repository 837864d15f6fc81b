"""The registry: every method by its name."""

from __future__ import annotations

from bench._records import Method
from bench.peers import PEERS, REFERENCE
from bench.tutorial.strategies import STRATEGIES

__all__ = ["METHODS"]

METHODS: dict[str, Method] = {method.name: method for method in (*STRATEGIES, *PEERS, REFERENCE)}
