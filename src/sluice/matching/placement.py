"""Placement: the device of each tensor, by prefixes of names. Pure; no torch."""

from __future__ import annotations

from collections.abc import Mapping

__all__ = ["Placement", "device_of"]

#: Device by prefix of names, as torch writes it with its index; ``""`` is for all names. The longest prefix wins.
Placement = Mapping[str, str]


def device_of(name: str, placement: Placement) -> str | None:
    """Return the device of a tensor; None if no prefix fits and the tensor stays on its device.

    Example:
        >>> device_of("blocks.10.weight", {"blocks.1": "cuda:1", "blocks": "cuda:0"})
        'cuda:0'
    """
    if not placement:
        return None
    prefix = name
    while prefix and prefix not in placement:
        prefix = prefix.rpartition(".")[0]
    return placement.get(prefix)
