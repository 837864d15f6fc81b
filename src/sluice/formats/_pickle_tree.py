"""Checks of the object that a pickle gave, before anything walks it without bounds."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from typing import Any

from sluice._errors import CheckpointError, FormatError, LimitError, UnsupportedError
from sluice._options import Limits
from sluice._records import Entry, Opaque, UnsupportedValue
from sluice.formats._pickle_machine import Pending, Refusal
from sluice.formats._torch_objects import StorageReference

__all__ = ["check_tree"]

_CONTAINERS = frozenset({dict, OrderedDict, Counter, list, tuple})

#: Sets hold nothing but plain values: they are leaves here.
_LEAVES = frozenset({type(None), bool, int, float, complex, str, bytes, bytearray, set, frozenset, Entry})


_BARE_STORAGE = "a storage that no tensor views"


@dataclass(slots=True)
class _Visit:
    """A container on the way from the root to the place that is being looked at."""

    container: object
    children: Iterator[tuple[object, object]]
    #: Key of the child that is being looked at.
    key: object = ""
    #: Levels of containers below this one.
    height: int = 0
    #: Leaves below this one, each counted for every place where it appears.
    leaves: int = 0


def check_tree(tree: object, limits: Limits, file: str) -> None:
    """Check that walking ``tree`` ends, at a bounded depth and after a bounded number of steps; replace storages in it.

    A pickle of a kilobyte can describe 2**40 leaves, by lists that hold the next one twice, or a list inside itself.
    Here each container is visited once, whatever the number of places where it appears.

    Raises:
        FormatError: A value could not be built; names its place.
        UnsupportedError: A container holds itself, or a storage stands in a tuple or is the whole tree.
        LimitError: It is deeper than ``limits.depth``, or has more than ``limits.nodes`` leaves.
    """
    _TreeCheck(limits, file).run(tree)


class _TreeCheck:
    def __init__(self, limits: Limits, file: str) -> None:
        self._limits = limits
        self._file = file
        self._path: list[_Visit] = []
        #: Containers on the path, by identity.
        self._open: set[int] = set()
        #: Height and leaves of the containers that were visited, by identity: the tree keeps them alive.
        self._finished: dict[int, tuple[int, int]] = {}

    def run(self, tree: object) -> None:
        path = self._path
        path.append(_Visit(container=None, children=iter([("", tree)])))
        while path:
            visit = path[-1]
            for key, child in visit.children:
                visit.key = key
                kind = type(child)
                if kind in _CONTAINERS or (kind is Entry and child.attributes is not None):  # type: ignore[attr-defined]
                    if id(child) not in self._finished:
                        self._enter(child)
                        break
                    self._add(visit, *self._finished[id(child)])
                elif kind in _LEAVES or issubclass(kind, Opaque):
                    visit.leaves += 1
                else:
                    self._check_leaf(visit, child)
            else:
                self._leave()

    def _enter(self, container: object) -> None:
        if id(container) in self._open:
            raise UnsupportedError("a container holds itself", file=self._file, tensor=self._name())
        self._path.append(_Visit(container=container, children=_children(container)))
        self._open.add(id(container))
        self._check_depth(0)

    def _leave(self) -> None:
        visit = self._path.pop()
        self._open.discard(id(visit.container))
        if self._path:
            self._finished[id(visit.container)] = visit.height, visit.leaves
            self._add(self._path[-1], visit.height, visit.leaves)

    def _add(self, visit: _Visit, height: int, leaves: int) -> None:
        visit.height = max(visit.height, height + 1)
        visit.leaves += leaves
        self._check_depth(visit.height)
        if visit.leaves > self._limits.nodes:
            raise LimitError(f"the checkpoint has more than {self._limits.nodes} values", file=self._file)

    def _check_depth(self, height: int) -> None:
        if len(self._path) - 1 + height > self._limits.depth:  # the root of the path is no container
            raise LimitError(f"the checkpoint nests deeper than {self._limits.depth} levels", file=self._file)

    def _check_leaf(self, visit: _Visit, leaf: object) -> None:
        """Replace a storage in a dict or a list by what says that it is not read; refuse what is no value."""
        container: Any = visit.container
        replaceable = type(container) is list or (isinstance(container, dict) and container.get(visit.key) is leaf)
        if not isinstance(leaf, StorageReference) or not replaceable:
            raise self._leaf_error(leaf)
        container[visit.key] = UnsupportedValue(
            qualified_name=f"torch.storage of {leaf.dtype}", reason=_BARE_STORAGE, file=self._file
        )
        visit.leaves += 1

    def _leaf_error(self, leaf: object) -> CheckpointError:
        if isinstance(leaf, Refusal):
            leaf.error.tensor = self._name() or None
            return leaf.error
        if isinstance(leaf, Pending):
            return FormatError("an object without its state", file=self._file, tensor=self._name() or None)
        return UnsupportedError(_BARE_STORAGE, file=self._file, tensor=self._name() or None)

    def _name(self) -> str:
        return ".".join(str(visit.key) for visit in self._path[1:])


def _children(container: object) -> Iterator[tuple[object, object]]:
    if isinstance(container, OrderedDict) and hasattr(container, "_metadata"):
        return chain(container.items(), [("_metadata", container._metadata)])  # noqa: SLF001 - torch's own name
    if isinstance(container, dict):
        return iter(container.items())
    if isinstance(container, Entry):
        return iter([("", None), *(container.attributes or {}).items()])  # the tensor itself, and its attributes
    assert isinstance(container, (list, tuple))
    return iter(enumerate(container))
