"""What zip and legacy files of ``torch.save`` have in common: the object that their pickle holds."""

from __future__ import annotations

from sluice._errors import UnsafeContentError
from sluice._options import Limits
from sluice.formats.pickles.unpickler import Unpickler
from sluice.formats.torch_save.allowlist import TorchAllowlist
from sluice.formats.torch_save.tree_limits import check_tree
from sluice.records import Opaque, UnsupportedValue

__all__ = ["check_object"]

#: Names of objects that a note lists.
_NAMES_IN_NOTE = 5


def check_object(
    tree: object,
    unpickler: Unpickler,
    objects: TorchAllowlist,
    limits: Limits,
    file: str,
    *,
    whole_objects: bool = False,
) -> tuple[object, tuple[str, ...]]:
    """Check the object of a file; return it, and notes on what of it is not kept.

    Args:
        tree: The object.
        unpickler: What made it.
        objects: What it was allowed to name.
        limits: Bounds on its depth and size.
        file: The file, for messages.
        whole_objects: Whether it may be an object of some class itself: one of many values, not a file by itself.

    Raises:
        CheckpointError: A value in it could not be built, or was dropped by the pickle after it could not be built.
        UnsafeContentError: It is a whole object of some class, so that there is nothing to open the file for.
    """
    tree = check_tree(tree, limits, file)
    if unpickler.refusal is not None:  # of a value that did not reach the tree
        raise unpickler.refusal.error
    if isinstance(tree, Opaque) and not (whole_objects or isinstance(tree, UnsupportedValue)):
        raise UnsafeContentError(f"the file holds a whole {tree.qualified_name} object, not a state dict", file=file)
    return tree, _notes([leaf.qualified_name for leaf in unpickler.opaque.values()], objects)


def _notes(opaque: list[str], objects: TorchAllowlist) -> tuple[str, ...]:
    notes = []
    if opaque:
        names = ", ".join(opaque[:_NAMES_IN_NOTE]) + (", ..." if len(opaque) > _NAMES_IN_NOTE else "")
        notes.append(f"The file names {names}: sluice neither imports nor builds them.")
    if objects.attributes_dropped:
        notes.append(f"{objects.attributes_dropped} Python attributes of tensors are not kept.")
    return tuple(notes)
