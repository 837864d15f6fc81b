"""The registry: every method by its name."""

from __future__ import annotations

from sluice.benchmark._peers import GPU_PEERS, PEERS, REFERENCE
from sluice.benchmark._records import Method
from sluice.benchmark._resuming import RESUMING, RESUMING_REFERENCE
from sluice.benchmark._strategies import STRATEGIES

__all__ = ["METHODS"]

METHODS: dict[str, Method] = {
    method.name: method for method in (*STRATEGIES, *PEERS, *GPU_PEERS, REFERENCE, *RESUMING, RESUMING_REFERENCE)
}
