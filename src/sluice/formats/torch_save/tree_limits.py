"""Checks of the unpickled object of a ``torch.save`` file that make it safe to walk.

Its depth and size are bounded, and it has neither cycles nor placeholders.

A pickle of a kilobyte can describe 2**40 leaves: lists that hold the next list twice, or a list that holds itself. Each
container is therefore visited once, regardless of the number of places where it appears, and later places only add the
size recorded on the first visit.

Limits: ``Limits.depth`` levels of containers; ``Limits.header_bytes`` characters in all dotted names together, because
every name repeats the keys above it; and ``Limits.repeats`` values in containers that appear again. Long dotted names
count as several values, because every repeated value repeats its name.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterator
from itertools import chain
from typing import Any

from msgspec import Struct

from sluice._dtypes import ITEM_BYTES
from sluice._errors import FormatError, UnsafeContentError, UnsupportedError
from sluice._messages import check_limit, first_names
from sluice._options import Limits
from sluice.formats.pickles.machine import Refusal
from sluice.formats.pickles.unpickler import Unpickler
from sluice.formats.torch_save.storages import StorageReference
from sluice.records import Entry, Opaque, TorchSize, TorchText, UnsupportedValue, elements_of

__all__ = ["check_object"]

_CONTAINERS = frozenset({dict, OrderedDict, Counter, list, tuple})

#: Types of leaves. Sets are leaves, because they hold only plain values.
_LEAVES = frozenset(
    {type(None), bool, int, float, complex, str, bytes, bytearray, set, frozenset, Entry, TorchSize, TorchText}
)

_BARE_STORAGE = "a quantized storage that is not viewed by a tensor"

#: Length of a dotted name, in characters, that counts as one more value against ``Limits.repeats``.
_NAME_CHARACTERS = 64

#: Assumed length of a list position in a dotted name, in characters.
_POSITION_CHARACTERS = 8


class _Visit:
    """A container: on the path from the root to the current value, or visited."""

    __slots__ = ("characters", "children", "container", "height", "key", "places", "result", "unbuilt")

    def __init__(self, container: Any) -> None:
        self.container = container
        #: The container, or the values of a tuple in which elements were replaced.
        self.result = container
        #: Keys and values of the children not visited yet.
        self.children = _children(container)
        #: Key of the current child.
        self.key: Any = ""
        #: Levels of containers below it.
        self.height = 0
        content: Any = container.attributes if isinstance(container, Entry) else container
        #: Number of containers and leaves below it, each counted once for every place where it appears.
        self.places = len(content)
        #: Number of keys and values that are, or hold, objects that are not built.
        self.unbuilt = 0
        #: Total length of their dotted names relative to the container, in characters.
        self.characters = 0
        for key in content if isinstance(content, dict) else ():
            if type(key) in {str, bytes}:
                self.characters += len(key)
            elif isinstance(key, Opaque):
                self.unbuilt += 1

    def add(self, child: _Visit) -> None:
        """Add the extent of a visited container, which is the current child."""
        self.height = max(self.height, child.height + 1)
        self.places += child.places
        self.characters += child.characters + child.places * _characters(self.key)
        if child.result is not child.container:
            self.replace(child.result)
        if child.unbuilt and type(child.container) is not Entry:
            self.mark()

    def mark(self) -> None:
        """Count the current child, which is or holds an object that is not built; a tensor loses such attributes."""
        self.unbuilt += 1
        if type(self.container) is Entry:
            del self.container.attributes[self.key]  # type: ignore[union-attr]

    def replace(self, value: object) -> None:
        """Replace the current child."""
        if type(self.container) is tuple:
            if self.result is self.container:
                self.result = list(self.container)
            self.result[self.key] = value
        elif type(self.container) is Entry:
            self.container.attributes[self.key] = value  # type: ignore[index]  # only entries with attributes are visited
        elif self.key is _METADATA:
            self.container._metadata = value  # noqa: SLF001 - torch's own name
        else:
            self.container[self.key] = value
        if isinstance(value, Opaque):
            self.mark()


def check_object(
    tree: object,
    unpickler: Unpickler,
    limits: Limits,
    file: str,
    *,
    whole_objects: bool = False,
) -> tuple[object, tuple[str, ...]]:
    """Check that a walk of the object of a file ends after a bounded number of steps at a bounded depth.

    Args:
        tree: The object.
        unpickler: The unpickler that built it.
        limits: Bounds on depth and size.
        file: Path of the file, for error messages.
        whole_objects: Whether to accept a pickled object of an arbitrary class, as an inert leaf.

    Returns:
        The object, in which bare storages are replaced by entries or ``UnsupportedValue`` leaves, and notes on the
        parts that are dropped.

    Raises:
        CheckpointError: A value could not be built, whether or not it is part of the tree, whose name the error has.
        UnsupportedError: A container contains itself, or the tree is a storage that sluice does not read.
        LimitError: The tree is deeper than ``limits.depth``, or shared containers repeat more than ``limits.repeats``
            values.
        UnsafeContentError: The file holds a pickled object of an arbitrary class instead of plain data.
    """
    check = _TreeCheck(limits, file)
    tree = check.run(tree)
    if unpickler.refusal is not None:  # a refused value that is not part of the tree
        raise unpickler.refusal.error
    if isinstance(tree, Opaque) and not (whole_objects or isinstance(tree, UnsupportedValue)):
        raise UnsafeContentError(f"the file holds a pickled {tree.qualified_name} object, not a state dict", file=file)
    notes = []
    if unpickler.opaque:
        names = first_names([leaf.qualified_name for leaf in unpickler.opaque.values()])
        notes.append(f"The file names {names}: sluice neither imports nor builds them.")
    if check.dropped:
        notes.append(f"{check.dropped} Python attributes of tensors are not kept.")
    return tree, tuple(notes)


class _TreeCheck(Struct):
    limits: Limits
    file: str
    path: list[_Visit] = []
    #: The visited containers by their ids; None for one on the path.
    visited: dict[int, _Visit | None] = {}
    #: Entries of bare storages, by position.
    storages: dict[StorageReference, Entry] = {}
    #: Number of repeated values so far.
    repeats: int = 0
    #: Number of attributes of tensors that are dropped, because they are or hold objects that are not built.
    dropped: int = 0

    def run(self, tree: object) -> object:
        root, path = [tree], self.path
        path.append(_Visit(root))
        while path:
            visit = path[-1]
            for key, child in visit.children:
                visit.key = key
                kind = type(child)
                if kind in _CONTAINERS or (kind is Entry and child.attributes is not None):  # type: ignore[attr-defined]
                    if id(child) not in self.visited:
                        self.visited[id(child)] = None
                        path.append(_Visit(child))
                        self._check_depth()
                        break
                    self._repeat(visit, child)
                elif issubclass(kind, Opaque):
                    visit.mark()
                elif kind not in _LEAVES:
                    visit.replace(self._replacement(child))
            else:
                self._leave()
        return root[0]

    def _leave(self) -> None:
        visit = self.path.pop()
        if not self.path:
            what = "the length of all dotted names of the checkpoint"
            check_limit(self.limits, "header_bytes", visit.characters, what, file=self.file)
            return
        if type(visit.result) is list and type(visit.container) is tuple:
            visit.result = tuple(visit.result)
        self.visited[id(visit.container)] = visit
        if type(visit.container) is Entry:
            self.dropped += visit.unbuilt
        self.path[-1].add(visit)
        self._check_depth()

    def _repeat(self, visit: _Visit, container: object) -> None:
        known = self.visited[id(container)]
        if known is None:
            raise UnsupportedError("a container contains itself", file=self.file, tensor=self._name())
        self.repeats += 1 + known.places + known.characters // _NAME_CHARACTERS
        if self.repeats > self.limits.repeats:
            what = "the number of repeated values in shared containers"
            check_limit(self.limits, "repeats", self.repeats, what, file=self.file, tensor=self._name() or None)
        visit.add(known)
        self._check_depth()

    def _check_depth(self) -> None:
        depth = len(self.path) - 1 + self.path[-1].height  # the path starts with a list around the tree
        if depth > self.limits.depth:
            check_limit(self.limits, "depth", depth, "the nesting of the checkpoint", file=self.file)

    def _replacement(self, leaf: object) -> Entry | UnsupportedValue:
        """Return the leaf that replaces a bare storage; raise the error of any other placeholder."""
        if isinstance(leaf, Refusal):
            leaf.error.tensor = self._name() or None
            raise leaf.error
        if not isinstance(leaf, StorageReference):
            raise FormatError("an object has no state", file=self.file, tensor=self._name() or None)
        if leaf.dtype in ITEM_BYTES:
            entry = Entry(
                elements=elements_of(leaf.dtype), shape=(leaf.numel,), stride=(1,), storage=leaf.position, bare=True
            )
            return self.storages.setdefault(leaf, entry)
        if len(self.path) == 1:  # the file holds nothing else
            raise UnsupportedError(_BARE_STORAGE, file=self.file)
        return UnsupportedValue(qualified_name=f"torch.storage of {leaf.dtype}", reason=_BARE_STORAGE, file=self.file)

    def _name(self) -> str:
        return ".".join(str(visit.key) for visit in self.path[1:])


class _Metadata(str):
    """Key of the ``_metadata`` attribute of a state dict (module versions), as opposed to an item of that name."""

    __slots__ = ()


_METADATA = _Metadata("_metadata")


def _characters(key: object) -> int:
    """Return the approximate length that a key adds to a dotted name; ``component`` bounds keys of other types."""
    if isinstance(key, (str, bytes)):
        return 1 + len(key)
    return _POSITION_CHARACTERS if type(key) is int else _NAME_CHARACTERS


def _children(container: object) -> Iterator[tuple[object, object]]:
    if isinstance(container, OrderedDict) and hasattr(container, "_metadata"):
        return chain(container.items(), [(_METADATA, container._metadata)])  # noqa: SLF001 - torch's own name
    if isinstance(container, dict):
        return iter(container.items())
    if isinstance(container, Entry):
        return iter([("", None), *(container.attributes or {}).items()])  # the tensor itself, and its attributes
    assert isinstance(container, (list, tuple))
    return iter(enumerate(container))
