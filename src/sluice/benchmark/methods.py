"""The registry of methods by name."""

from __future__ import annotations

from importlib.util import find_spec

from sluice.benchmark.peers import PEERS, REFERENCE
from sluice.benchmark.records import Method
from sluice.benchmark.strategies import STRATEGIES

__all__ = ["LOADERS", "METHODS", "absence"]

#: Methods that load a model, by name.
LOADERS: dict[str, Method] = {method.name: method for method in (*STRATEGIES, *PEERS)}

#: All methods that a benchmark process can run, by name. A module that adds methods is among their ``imports``.
METHODS: dict[str, Method] = {**LOADERS, REFERENCE.name: REFERENCE}


def absence(method: str) -> str:
    """Return the missing package of a method and how to install it, without imports; empty if all are installed."""
    packages = (name.partition(":")[0].partition(".")[0] for name in METHODS[method].imports)
    missing = next((package for package in packages if find_spec(package) is None), "")
    return f"{missing} is not installed: pip install {missing}" if missing else ""
