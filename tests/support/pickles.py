"""Helpers that run pickles through the inert unpickler."""

from __future__ import annotations

from typing import Any

from sluice._options import Limits
from sluice.formats.pickles.unpickler import Unpickler
from sluice.formats.torch_save.allowlist import TorchAllowlist
from sluice.formats.torch_save.tree_limits import check_object
from support.hostile_archives import Global, pickled

LIMITS = Limits()

#: A module that does not exist: importing it would raise.
MISSING = Global("sluice_no_such_module", "run")


def machine(data: bytes, limits: Limits = LIMITS, *, encoding: str = "utf-8") -> Unpickler:
    allowlist = TorchAllowlist(limits, len(data))
    return Unpickler(data, allowlist, limits=limits, file="file", offset=1000, encoding=encoding)


def load(value: object, limits: Limits = LIMITS) -> Any:
    """Run a pickle, or the pickle of a value, and return the checked tree."""
    run = machine(value if isinstance(value, bytes) else pickled(value), limits)
    tree = run.load()
    return check_object(tree, run, limits, "file", whole_objects=True)[0]


def body(opcodes: bytes) -> bytes:
    return b"\x80\x02" + opcodes + b"."
