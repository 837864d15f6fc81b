"""Divide a module into blocks: the parts whose weights are needed at the same time.

A block is found by the structure of the module, not by its class: the members of lists of modules are blocks, as the
layers of transformers are, and so is every other module that holds parameters of its own. A list of modules inside a
block has blocks of its own, such as experts, of which a call may use only some; a ``Sequential`` inside a block has
not.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase

from msgspec import Struct
from torch import nn
from torch.nn.utils.parametrize import ParametrizationList, is_parametrized

__all__ = ["ModuleBlock", "find_blocks", "smallest_blocks"]

#: Modules that use the weights of their parts without calling them.
_WHOLE = (nn.MultiheadAttention, nn.TransformerEncoderLayer, nn.RNNBase)


class ModuleBlock(Struct, frozen=True, kw_only=True, eq=False):
    """A part of a module."""

    #: Its path in the module; empty for the module itself.
    path: str
    #: The part.
    module: nn.Module
    #: Position of the block around it; None for an outermost block.
    parent: int | None = None
    #: Path of the list that it is a member of; empty for other blocks.
    group: str = ""
    #: Whether it is inside a block of a list, which may skip it.
    optional: bool = False


def find_blocks(module: nn.Module, patterns: Sequence[str] | None = None) -> tuple[ModuleBlock, ...]:
    """Return the blocks of a module, in the order in which it defines them.

    Args:
        module: The module.
        patterns: Paths of the blocks, with ``*`` for a name; None finds them by the structure.

    Raises:
        ValueError: A pattern names no part of the module.
    """
    if patterns is not None:
        paths = [path for path, _ in module.named_modules()]
        unknown = [pattern for pattern in patterns if not any(_fits(path, pattern) for path in paths)]
        if unknown:
            raise ValueError(f"blocks={list(patterns)}: the model has no module {unknown[0]!r}")
        chosen = {path for path in paths if any(_fits(path, pattern) for pattern in patterns)}
    else:
        chosen = {path for path, _ in _members(module, "", inside=False)}
    return _with_owners(module, chosen)


def smallest_blocks(module: nn.Module) -> tuple[ModuleBlock, ...]:
    """Return one block for each module that holds parameters of its own."""
    return _with_owners(module, set())


def _fits(path: str, pattern: str) -> bool:
    parts, wanted = path.split("."), pattern.split(".")
    return len(parts) == len(wanted) and all(map(fnmatchcase, parts, wanted))


def _with_owners(module: nn.Module, chosen: set[str]) -> tuple[ModuleBlock, ...]:
    """Return the chosen blocks, and one for each module outside of them that holds parameters; each module once."""
    found: list[ModuleBlock] = []
    seen = set[int]()

    def collect(part: nn.Module, path: str, parent: int | None, group: str, *, inside: bool) -> None:
        if id(part) in seen:
            return
        seen.add(id(part))
        is_block = path in chosen
        if is_block or (not inside and any(True for _ in part.parameters(recurse=_is_whole(part)))):
            found.append(ModuleBlock(path=path, module=part, parent=parent, group=group, optional=inside))
            parent = len(found) - 1
        for name, child in part.named_children() if is_block or not _is_whole(part) else ():
            below = f"{path}.{name}" if path else name
            collect(child, below, parent, path if _is_list(part) else "", inside=inside or is_block)

    collect(module, "", None, "", inside=False)
    return tuple(found)


def _members(module: nn.Module, path: str, *, inside: bool) -> Iterator[tuple[str, nn.Module]]:
    """Yield the members of lists, outermost first; below a member not those of a ``Sequential``."""
    is_list = _is_list(module) and not (inside and isinstance(module, nn.Sequential))
    if _is_whole(module):
        return
    for name, child in module.named_children():
        below = f"{path}.{name}" if path else name
        member = is_list and not _is_part_of_list(child, module) and any(True for _ in child.parameters())
        if member:
            yield below, child
        yield from _members(child, below, inside=inside or member)


def _is_list(module: nn.Module) -> bool:
    return isinstance(module, (nn.ModuleList, nn.ModuleDict, nn.Sequential))


def _is_part_of_list(module: nn.Module, around: nn.Module) -> bool:
    """Return whether the members of a member of a list count as members: lists of lists are one list."""
    return _is_list(module) and (isinstance(around, nn.Sequential) or not isinstance(module, nn.Sequential))


def _is_whole(module: nn.Module) -> bool:
    return isinstance(module, (*_WHOLE, ParametrizationList)) or is_parametrized(module)
