"""Which device a tensor goes to, by the module that holds it. Pure; no torch."""

from __future__ import annotations

from collections.abc import Mapping

__all__ = ["Placement", "device_of"]

#: Device, as torch writes it with its index, for each prefix of names; ``""`` stands for all. The longest prefix wins.
Placement = Mapping[str, str]


def device_of(name: str, placement: Placement) -> str | None:
    """Return the device of a tensor, or None when the placement does not say: it stays where it is.

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
