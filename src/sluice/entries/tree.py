"""Pure functions on ``Index.tree``: the nested object of a checkpoint with ``Entry`` and ``Opaque`` leaves.

A tree consists of dicts (also ordered ones), lists and tuples. A container may occur at several places, but never
inside itself: formats ensure that. Nothing here recurses, so depth costs no stack.

The dotted name of a leaf is the path of keys from the root, joined by dots; positions in lists and tuples are numbers:
the tensor in ``{"models": [{"w": tensor}]}`` is ``models.0.w``. The name of a tree that is a single tensor is ``""``.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from reprlib import repr as short_repr
from typing import Any, TypeAlias, cast

from sluice._errors import CheckpointError, FormatError, LimitError, UnsafeContentError, UnsupportedError
from sluice._options import Limits
from sluice.records import Entry, Opaque, UnsupportedValue

__all__ = [
    "CONTAINERS",
    "children",
    "component",
    "containers",
    "every_entry",
    "flatten",
    "leaves",
    "map_leaves",
    "metadata",
    "odd_keys",
    "opaques",
    "refusal",
    "refuse_opaques",
    "sizes",
    "unsupported",
    "walk",
]

Container: TypeAlias = "dict[object, object] | list[object] | tuple[object, ...]"

#: The types of containers.
CONTAINERS = (dict, list, tuple)


def walk(tree: object) -> Iterator[tuple[str, Entry]]:
    """Yield the dotted name and the entry of every tensor, in the order of the tree; names may repeat."""
    return ((name, leaf) for name, leaf, _ in _leaves(tree) if isinstance(leaf, Entry))


def leaves(tree: object) -> Iterator[tuple[str, object]]:
    """Yield the dotted name and the value of every leaf: tensors, plain values and ``Opaque``."""
    return ((name, leaf) for name, leaf, _ in _leaves(tree))


def opaques(tree: object) -> dict[str, Opaque]:
    """Return the objects that sluice does not build, by dotted name."""
    return {name: leaf for name, leaf, _ in _leaves(tree) if isinstance(leaf, Opaque)}


def refusal(leaf: Opaque, name: str, file: str) -> CheckpointError:
    """Return the error for a requested object that sluice does not build.

    Args:
        leaf: The placeholder of the object.
        name: Its dotted name.
        file: The checkpoint, for messages.
    """
    if isinstance(leaf, UnsupportedValue):
        return UnsupportedError(leaf.reason, file=leaf.file, tensor=name, found=leaf.qualified_name, advice=leaf.advice)
    problem = "an object that only running code could build"
    return UnsafeContentError(problem, file=file, tensor=name, found=leaf.qualified_name)


def refuse_opaques(tree: object, file: str) -> None:
    """Refuse a part of a checkpoint that is to be loaded completely but holds an object which sluice does not build.

    Raises:
        UnsafeContentError: Only running code could build the object.
        UnsupportedError: The object is of a kind that sluice does not read.
    """
    for name, leaf in opaques(tree).items():
        raise refusal(leaf, name, file)
    keys = (key for each in containers(tree) if isinstance(each, dict) for key in each if type(key) is Opaque)
    for key in keys:
        raise refusal(key, component(key), file)


def unsupported(tree: object) -> dict[str, UnsupportedValue]:
    """Return the tensors and values of unsupported kinds, by dotted name."""
    return {name: leaf for name, leaf, _ in _leaves(tree) if isinstance(leaf, UnsupportedValue)}


def flatten(tree: object, limits: Limits) -> dict[str, Entry]:
    """Return every tensor by its dotted name, in the order of the tree.

    Raises:
        FormatError: Two tensors have the same dotted name, as in ``{"a.b": t, "a": {"b": t}}`` or ``{0: t, "0": t}``.
        LimitError: The tree is deeper than ``limits.depth`` or has more than ``limits.entries`` tensors.
    """
    entries: dict[str, Entry] = {}
    kinds = ({*map(type, tree)}, {*map(type, tree.values())}) if isinstance(tree, dict) else None
    if kinds == ({str}, {Entry}) and len(flat := cast("dict[str, Entry]", tree)) <= limits.entries and limits.depth:
        return dict(flat)  # as most checkpoints are
    for name, leaf, keys in _leaves(tree):
        if len(keys) > limits.depth:
            raise LimitError("the checkpoint is nested too deeply", expected=f"at most {limits.depth} levels (depth)")
        if not isinstance(leaf, Entry):
            continue
        if name in entries:
            raise _same_name(tree, name, entries[name], keys)
        if len(entries) == limits.entries:
            raise LimitError("the checkpoint has too many tensors", expected=f"at most {limits.entries} (entries)")
        entries[name] = leaf
    return entries


def odd_keys(tree: object) -> Iterator[object]:
    """Yield the keys that are neither strings nor integers, of dicts with tensors below them."""
    below = sizes(tree)
    for container in containers(tree):
        if isinstance(container, dict) and below[id(container)][0]:
            yield from (key for key in container if type(key) not in (str, int))


def every_entry(tree: object) -> Iterator[Entry]:
    """Yield each entry once, including those in ``_metadata`` and attributes, which have no dotted name."""
    seen: set[int] = set()
    pending = [tree]
    while pending:
        for entry in _entries(pending.pop()):
            if id(entry) not in seen:
                seen.add(id(entry))
                yield entry
                if entry.attributes is not None:
                    pending.append(entry.attributes)


def _entries(tree: object) -> Iterator[Entry]:
    if isinstance(tree, Entry):
        yield tree
    for container in containers(tree):
        for child in (*(child for _, child in children(container)), metadata(container)):
            if isinstance(child, Entry):
                yield child


def map_leaves(
    tree: object, function: Callable[[Entry], object], *, plain: Callable[[Any], object] = lambda value: value
) -> Any:
    """Return a copy of the tree with ``function(entry)`` for each entry and ``plain(value)`` for other values.

    ``function`` is called once per entry, and a container that occurs at several places is copied once. Dicts keep
    their type, and ordered dicts their ``_metadata``.
    """
    finished: dict[int, object] = {}

    def finish(value: object) -> object:
        if isinstance(value, Entry) and id(value) not in finished:
            finished[id(value)] = function(value)
        return plain(finished[id(value)] if isinstance(value, (Entry, *CONTAINERS)) else value)

    for container in containers(tree):
        copy: Any
        if isinstance(container, dict):
            copy = type(container)()
            for key, value in container.items():
                copy[plain(key)] = finish(value)
            if metadata(container) is not None:
                copy._metadata = finish(metadata(container))  # noqa: SLF001 - torch's own name for it
        else:
            copy = type(container)(map(finish, container))
        finished[id(container)] = copy
    return finish(tree)


def sizes(tree: object) -> dict[int, tuple[int, int]]:
    """Return the number and the bytes of the tensors below each container, by its ``id``; every name counts in full."""
    totals: dict[int, tuple[int, int]] = {}
    for container in containers(tree):
        count = nbytes = 0
        for _, child in children(container):
            more = (1, child.nbytes) if isinstance(child, Entry) else totals.get(id(child), (0, 0))
            count, nbytes = count + more[0], nbytes + more[1]
        totals[id(container)] = count, nbytes
    return totals


def _same_name(tree: object, name: str, first: Entry, keys: list[object]) -> FormatError:
    other = next(_spell(path) for seen, leaf, path in _leaves(tree) if seen == name and leaf is first)
    return FormatError(
        "two tensors have the same dotted name",
        tensor=name,
        found=f"{other} and {_spell(keys)}",
        advice="Choose the part that holds one of them with key= (--key), or take the tensors from "
        "sluice.open(...).tree.",
    )


def _leaves(tree: object) -> Iterator[tuple[str, object, list[object]]]:
    """Yield the dotted name, the leaf and its path of keys; the list of keys is reused."""
    if not isinstance(tree, CONTAINERS):
        yield "", tree, []
        return
    keys: list[object] = [None]
    stack = [("", children(tree))]
    while stack:
        prefix, inside = stack[-1]
        for key, child in inside:
            keys[-1] = key
            name = prefix + (key if type(key) is str else component(key))
            if isinstance(child, CONTAINERS):
                stack.append((f"{name}.", children(child)))
                keys.append(None)
                break
            yield name, child, keys
        else:
            stack.pop()
            keys.pop()


def containers(tree: object) -> Iterator[Container]:
    """Yield each container once, after the containers inside it."""
    finished: set[int] = set()
    stack = [tree] if isinstance(tree, CONTAINERS) else []
    while stack:
        container = stack[-1]
        inside = [child for _, child in children(container)]
        inside.append(metadata(container))
        pending = [child for child in inside if isinstance(child, CONTAINERS) and id(child) not in finished]
        if pending:
            stack += reversed(pending)
            continue
        stack.pop()
        if id(container) not in finished:
            finished.add(id(container))
            yield container


def children(container: object) -> Iterator[tuple[object, object]]:
    """Return the keys and values of a container."""
    if isinstance(container, dict):
        return iter(container.items())
    assert isinstance(container, (list, tuple))
    return enumerate(container)


def metadata(container: object) -> object:
    """Return the module versions that torch keeps as an attribute of ordered state dicts, or None."""
    return getattr(container, "_metadata", None) if isinstance(container, OrderedDict) else None


def component(key: object) -> str:
    """Return a key as a component of a dotted name; keys of other types than text, bytes and integers are shortened."""
    if isinstance(key, Opaque):  # two classes may have names that end alike
        return key.qualified_name
    return str(key) if isinstance(key, (str, bytes, int)) else short_repr(key)


def _spell(keys: list[object]) -> str:
    return "".join(f"[{short_repr(key)}]" for key in keys)
