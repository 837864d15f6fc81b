"""Checks of the unpickled object of a ``torch.save`` file, shared by the zip and legacy formats."""

from __future__ import annotations

from sluice._errors import UnsafeContentError
from sluice._options import Limits
from sluice.formats.pickles.unpickler import Unpickler
from sluice.formats.torch_save.allowlist import TorchAllowlist
from sluice.formats.torch_save.tree_limits import check_tree
from sluice.records import Opaque, UnsupportedValue

__all__ = ["check_object"]

#: Maximum number of names in a note.
_MAX_NAMES = 5


def check_object(
    tree: object,
    unpickler: Unpickler,
    allowlist: TorchAllowlist,
    limits: Limits,
    file: str,
    *,
    whole_objects: bool = False,
) -> tuple[object, tuple[str, ...]]:
    """Check the object of a file; return it, and notes on the parts that are dropped.

    Args:
        tree: The object.
        unpickler: The unpickler that built it.
        allowlist: The allowlist of that unpickler.
        limits: Bounds on depth and size.
        file: Path of the file, for error messages.
        whole_objects: Whether to accept a pickled object of an arbitrary class, as an inert leaf.

    Raises:
        CheckpointError: A value could not be built, whether or not it is part of the tree.
        UnsafeContentError: The file holds a pickled object of an arbitrary class instead of plain data.
    """
    tree = check_tree(tree, limits, file)
    if unpickler.refusal is not None:  # a refused value that is not part of the tree
        raise unpickler.refusal.error
    if isinstance(tree, Opaque) and not (whole_objects or isinstance(tree, UnsupportedValue)):
        raise UnsafeContentError(f"the file holds a pickled {tree.qualified_name} object, not a state dict", file=file)
    return tree, _notes([leaf.qualified_name for leaf in unpickler.opaque.values()], allowlist)


def _notes(opaque: list[str], allowlist: TorchAllowlist) -> tuple[str, ...]:
    notes = []
    if opaque:
        names = ", ".join(opaque[:_MAX_NAMES]) + (", ..." if len(opaque) > _MAX_NAMES else "")
        notes.append(f"The file names {names}: sluice neither imports nor builds them.")
    if allowlist.attributes_dropped:
        notes.append(f"{allowlist.attributes_dropped} Python attributes of tensors are not kept.")
    return tuple(notes)
