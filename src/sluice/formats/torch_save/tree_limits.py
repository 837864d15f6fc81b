"""Checks of the object that a pickle gave, before anything walks it without bounds."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, NamedTuple

from sluice._errors import FormatError, LimitError, UnsupportedError
from sluice._options import Limits
from sluice.formats.pickles.machine import Refusal
from sluice.formats.torch_save.allowlist import StorageReference
from sluice.records import Entry, Opaque, TorchSize, TorchText, UnsupportedValue

__all__ = ["check_tree"]

_CONTAINERS = frozenset({dict, OrderedDict, Counter, list, tuple})

#: Sets hold nothing but plain values: they are leaves here.
_LEAVES = frozenset(
    {type(None), bool, int, float, complex, str, bytes, bytearray, set, frozenset, Entry, TorchSize, TorchText}
)


_BARE_STORAGE = "a storage that no tensor views"

#: Characters of a dotted name for which a value counts once more against ``Limits.repeats``.
_NAME_CHARACTERS = 64

#: What a position in a list takes in it.
_POSITION_CHARACTERS = 8


class _Below(NamedTuple):
    """What lies below a container."""

    #: Levels of containers.
    height: int = 0
    #: Containers and leaves, each counted for every place where it appears.
    places: int = 0
    #: Characters of their dotted names from the container on, together.
    characters: int = 0


@dataclass(slots=True)
class _Visit:
    """A container on the way from the root to the place that is being looked at."""

    container: object
    children: Iterator[tuple[object, object]]
    #: What was found below it so far.
    below: _Below
    #: Characters of its own dotted name.
    prefix: int = 0
    #: Key of the child that is being looked at.
    key: object = ""
    #: What replaces elements of a tuple, by position.
    replacements: dict[object, object] = field(default_factory=dict)


def check_tree(tree: object, limits: Limits, file: str) -> object:
    """Check that walking ``tree`` ends, at a bounded depth and after a bounded number of steps.

    A pickle of a kilobyte can describe 2**40 leaves, by lists that hold the next one twice, or a list inside itself.
    Here each container is visited once, whatever the number of places where it appears.

    Returns:
        The same tree, in which storages that no tensor views are leaves that say so.

    Raises:
        FormatError: A value could not be built; names its place.
        UnsupportedError: A container holds itself, or the tree is a storage and nothing else.
        LimitError: It is deeper than ``limits.depth``, or shared containers make it larger than ``limits.repeats``.
    """
    return _TreeCheck(limits, file).run(tree)


class _TreeCheck:
    def __init__(self, limits: Limits, file: str) -> None:
        self._limits = limits
        self._file = file
        self._path: list[_Visit] = []
        #: Containers on the path, by identity.
        self._open: set[int] = set()
        #: What lies below the containers that were visited, by identity; ``_kept`` and the tree keep them alive.
        self._finished: dict[int, _Below] = {}
        #: Tuples that were made anew, by the identity of the old ones, and those.
        self._remade: dict[int, object] = {}
        self._kept: list[object] = []
        self._repeats = 0

    def run(self, tree: object) -> object:
        path = self._path
        root = [tree]
        path.append(_Visit(container=root, children=iter([(0, tree)]), below=_Below()))
        while path:
            visit = path[-1]
            for key, child in visit.children:
                visit.key = key
                kind = type(child)
                if kind in _CONTAINERS or (kind is Entry and child.attributes is not None):  # type: ignore[attr-defined]
                    if id(child) not in self._finished:
                        self._enter(child)
                        break
                    self._repeat(visit, child)
                elif not (kind in _LEAVES or issubclass(kind, Opaque)):
                    self._replace(visit, self._stand_in(child))
            else:
                self._leave()
        return root[0]

    def _enter(self, container: object) -> None:
        if id(container) in self._open:
            raise UnsupportedError("a container holds itself", file=self._file, tensor=self._name())
        parent = self._path[-1]
        prefix = parent.prefix + _characters(parent.key) if len(self._path) > 1 else 0
        below = _Below(0, *_own_size(container))
        self._path.append(_Visit(container=container, children=_children(container), prefix=prefix, below=below))
        self._open.add(id(container))
        self._check_depth(0)

    def _leave(self) -> None:
        visit = self._path.pop()
        old = visit.container
        self._open.discard(id(old))
        if not self._path:
            return
        self._finished[id(old)] = visit.below
        if visit.replacements:
            assert isinstance(old, tuple)
            self._kept.append(old)
            self._remade[id(old)] = tuple(visit.replacements.get(at, value) for at, value in enumerate(old))
        self._add(self._path[-1], old)

    def _repeat(self, visit: _Visit, container: object) -> None:
        below = self._finished[id(container)]
        name = visit.prefix + _characters(visit.key)
        self._repeats += 1 + below.places + (below.places * name + below.characters) // _NAME_CHARACTERS
        if self._repeats > self._limits.repeats:
            problem = (
                f"the checkpoint has more than {self._limits.repeats} values that stand at several places (repeats)"
            )
            raise LimitError(problem, file=self._file, tensor=self._name() or None)
        self._add(visit, container)

    def _add(self, visit: _Visit, container: object) -> None:
        """Add what lies below a container that was visited to that which holds it."""
        height, places, characters = self._finished[id(container)]
        own = visit.below
        characters += own.characters + places * _characters(visit.key)
        visit.below = _Below(max(own.height, height + 1), own.places + places, characters)
        self._check_depth(visit.below.height)
        if id(container) in self._remade:
            self._replace(visit, self._remade[id(container)])

    def _check_depth(self, height: int) -> None:
        if len(self._path) - 1 + height > self._limits.depth:  # the root of the path is no container of the tree
            raise LimitError(f"the checkpoint nests deeper than {self._limits.depth} levels", file=self._file)

    def _replace(self, visit: _Visit, value: object) -> None:
        """Put ``value`` in the place of the child that is being looked at."""
        container: Any = visit.container
        if type(container) is tuple:
            visit.replacements[visit.key] = value
        elif type(container) is Entry:
            container.attributes[visit.key] = value  # type: ignore[index]  # it has some, or would not be visited
        elif visit.key is _METADATA:
            container._metadata = value  # noqa: SLF001 - torch's own name
        else:
            container[visit.key] = value

    def _stand_in(self, leaf: object) -> UnsupportedValue:
        if isinstance(leaf, Refusal):
            leaf.error.tensor = self._name() or None
            raise leaf.error
        if not isinstance(leaf, StorageReference):
            raise FormatError("an object without its state", file=self._file, tensor=self._name() or None)
        if len(self._path) == 1:  # there is nothing else to open the file for
            raise UnsupportedError(_BARE_STORAGE, file=self._file)
        return UnsupportedValue(qualified_name=f"torch.storage of {leaf.dtype}", reason=_BARE_STORAGE, file=self._file)

    def _name(self) -> str:
        return ".".join(str(visit.key) for visit in self._path[1:])


class _Metadata(str):
    """The key under which the versions of modules are visited: an attribute of a state dict, not an item."""

    __slots__ = ()


_METADATA = _Metadata("_metadata")


def _characters(key: object) -> int:
    """Return how much a key adds to a dotted name, about; ``component`` bounds those of odd types."""
    if isinstance(key, str):
        return 1 + len(key)
    return _POSITION_CHARACTERS if type(key) is int else _NAME_CHARACTERS


def _own_size(container: Any) -> tuple[int, int]:
    """Return the number of children of a container, and the characters of their keys."""
    if isinstance(container, Entry):
        container = container.attributes
    names = sum(map(len, filter(_is_text, container))) if isinstance(container, dict) else 0
    return len(container), names


def _is_text(key: object) -> bool:
    return type(key) is str


def _children(container: object) -> Iterator[tuple[object, object]]:
    if isinstance(container, OrderedDict) and hasattr(container, "_metadata"):
        return chain(container.items(), [(_METADATA, container._metadata)])  # noqa: SLF001 - torch's own name
    if isinstance(container, dict):
        return iter(container.items())
    if isinstance(container, Entry):
        return iter([("", None), *(container.attributes or {}).items()])  # the tensor itself, and its attributes
    assert isinstance(container, (list, tuple))
    return iter(enumerate(container))
