"""Pure functions on ``Index.tree``: the nested object of a checkpoint with ``Entry`` and ``Opaque`` leaves.

A tree is made of dicts (also ordered ones), lists and tuples. A container may stand at several places, but none holds
itself: formats see to that. Nothing here recurses, so depth costs no stack.

The dotted name of a leaf is its keys from the top, joined by dots; positions in lists and tuples are numbers, so that
``{"models": [{"w": tensor}]}`` has the name ``models.0.w``. A tree that is a single tensor gives it the name ``""``.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Callable, Iterator
from difflib import get_close_matches
from itertools import islice
from reprlib import repr as short_repr
from typing import Any, TypeAlias

from sluice._errors import (
    CheckpointError,
    FormatError,
    LimitError,
    MismatchError,
    UnsafeContentError,
    UnsupportedError,
)
from sluice._options import Limits
from sluice._records import Entry, Opaque, UnsupportedValue

__all__ = [
    "component",
    "every_entry",
    "flatten",
    "leaves",
    "likely_state_dicts",
    "map_leaves",
    "odd_keys",
    "opaques",
    "refusal",
    "refuse_opaques",
    "sizes",
    "state_dict_candidates",
    "subtree",
    "unsupported",
    "walk",
]

Container: TypeAlias = "dict[object, object] | list[object] | tuple[object, ...]"

_CONTAINERS = (dict, list, tuple)

#: Keys that a message lists.
_SHOWN = 10

#: Names that are looked at for spellings close to a key that does not exist.
_COMPARED = 2000

_INTEGER = re.compile(r"0|-?[1-9][0-9]{0,18}", re.ASCII)


def walk(tree: object) -> Iterator[tuple[str, Entry]]:
    """Yield the dotted name and the entry of every tensor, in the order of the tree; names may repeat."""
    return ((name, leaf) for name, leaf, _ in _leaves(tree) if isinstance(leaf, Entry))


def leaves(tree: object) -> Iterator[tuple[str, object]]:
    """Yield the dotted name and the value of everything that is no container: tensors, plain values and ``Opaque``."""
    return ((name, leaf) for name, leaf, _ in _leaves(tree))


def opaques(tree: object) -> dict[str, Opaque]:
    """Return the objects that were not built, by dotted name."""
    return {name: leaf for name, leaf, _ in _leaves(tree) if isinstance(leaf, Opaque)}


def refusal(leaf: Opaque, name: str, file: str) -> CheckpointError:
    """Return the error for something that was not built, and that is asked for.

    Args:
        leaf: What stands in its place.
        name: Its dotted name.
        file: The checkpoint, for messages.
    """
    if isinstance(leaf, UnsupportedValue):
        return UnsupportedError(leaf.reason, file=leaf.file, tensor=name, found=leaf.qualified_name)
    problem = "an object that only running code could build"
    return UnsafeContentError(problem, file=file, tensor=name, found=leaf.qualified_name)


def refuse_opaques(tree: object, file: str, *, prefix: str = "") -> None:
    """Refuse a part of a checkpoint that is to be loaded whole and holds an object that was not built.

    Args:
        tree: The part.
        file: The checkpoint, for messages.
        prefix: Only names that start with it count.

    Raises:
        UnsafeContentError: There is one that only running code could build.
        UnsupportedError: There is one of a kind that sluice does not read.
    """
    for name, leaf in opaques(tree).items():
        if name.startswith(prefix):
            raise refusal(leaf, name, file)


def unsupported(tree: object) -> dict[str, UnsupportedValue]:
    """Return the tensors and values of kinds that are not read, by dotted name."""
    return {name: leaf for name, leaf, _ in _leaves(tree) if isinstance(leaf, UnsupportedValue)}


def flatten(tree: object, limits: Limits) -> dict[str, Entry]:
    """Return every tensor by its dotted name, in the order of the tree.

    Raises:
        FormatError: Two tensors have the same dotted name, as in ``{"a.b": t, "a": {"b": t}}`` or ``{0: t, "0": t}``.
        LimitError: The tree is deeper than ``limits.depth`` or has more than ``limits.entries`` tensors.
    """
    entries: dict[str, Entry] = {}
    for name, leaf, keys in _leaves(tree):
        if len(keys) > limits.depth:
            raise LimitError("the checkpoint nests too deep", expected=f"at most {limits.depth} levels (depth)")
        if not isinstance(leaf, Entry):
            continue
        if name in entries:
            raise _same_name(tree, name, entries[name], keys)
        if len(entries) == limits.entries:
            raise LimitError("the checkpoint has too many tensors", expected=f"at most {limits.entries} (entries)")
        entries[name] = leaf
    return entries


def odd_keys(tree: object) -> Iterator[object]:
    """Yield the keys of dicts with tensors below them that are neither text nor integers."""
    below = sizes(tree)
    for container in _bottom_up(tree):
        if isinstance(container, dict) and below[id(container)][0]:
            yield from (key for key in container if type(key) not in (str, int))


def every_entry(tree: object) -> Iterator[Entry]:
    """Yield each entry once, also those in ``_metadata`` and among attributes, where no dotted name leads."""
    seen: set[int] = set()
    waiting = [tree]
    while waiting:
        for entry in _entries(waiting.pop()):
            if id(entry) not in seen:
                seen.add(id(entry))
                yield entry
                if entry.attributes is not None:
                    waiting.append(entry.attributes)


def _entries(tree: object) -> Iterator[Entry]:
    if isinstance(tree, Entry):
        yield tree
    for container in _bottom_up(tree):
        for child in (*(child for _, child in _children(container)), _metadata(container)):
            if isinstance(child, Entry):
                yield child


def map_leaves(
    tree: object, function: Callable[[Entry], object], *, plain: Callable[[Any], object] = lambda value: value
) -> Any:
    """Return a copy of the tree with ``function(entry)`` in place of each entry, and ``plain(value)`` of other values.

    Every entry is given to ``function`` once, and a container that stands at several places is copied once.
    Dicts keep their type, and ordered ones their ``_metadata``.
    """
    finished: dict[int, object] = {}

    def finish(value: object) -> object:
        if isinstance(value, Entry) and id(value) not in finished:
            finished[id(value)] = function(value)
        return plain(finished[id(value)] if isinstance(value, (Entry, *_CONTAINERS)) else value)

    for container in _bottom_up(tree):
        copy: Any
        if isinstance(container, dict):
            copy = type(container)()
            for key, value in container.items():
                copy[plain(key)] = finish(value)
            if _metadata(container) is not None:
                copy._metadata = finish(_metadata(container))  # noqa: SLF001 - torch's own name for it
        else:
            copy = type(container)(map(finish, container))
        finished[id(container)] = copy
    return finish(tree)


def subtree(tree: object, key: str) -> Any:
    """Return the part of the tree that ``key`` names.

    ``key`` is a path into the tree (``"ema.model"``, ``"models.0"``), where keys that contain dots are tried first, or
    such a path and then a prefix of flat names: ``"model.blocks.0"`` takes the names in ``model`` that start with
    ``blocks.0.``, without that prefix. An empty key is the whole tree.

    Raises:
        MismatchError: There is nothing; it lists what is at the top and which names come close.
    """
    reached: dict[tuple[int, int], object] = {}
    states: list[tuple[object, int]] = [(tree, 0 if key else 1)]
    while states:
        value, start = states.pop()
        if start > len(key):
            return value
        if (id(value), start) in reached:
            continue
        reached[id(value), start] = value
        ends = [match.start() for match in re.finditer(r"\.|$", key) if match.start() >= start]
        states += [(child, end + 1) for end in ends for child in _lookup(value, key[start:end])]
    for (_, start), value in reached.items():
        part = _behind_prefix(value, f"{key[start:]}.")
        if part:
            return part
    raise _nothing_at(tree, key)


def state_dict_candidates(tree: object) -> tuple[str, ...]:
    """Return the keys of what could be state dicts of models, the largest first; ``""`` is the whole tree.

    These are the dicts that hold tensors by name, at least half of the bytes below them directly: a loss beside a
    model does not make the whole checkpoint a state dict, and extra state does not divide one. Optimizer states do
    not count.
    """
    return tuple(_candidates(tree))


def likely_state_dicts(tree: object) -> dict[str, list[Entry]]:
    """Return the tensors of each candidate by its key, the largest first, without metrics beside a model.

    Scores have names as well: a dict of scalars counts only where nothing larger does.
    """
    entries = {key: list(every_entry(part)) for key, part in _candidates(tree).items()}
    return {key: found for key, found in entries.items() if any(entry.shape for entry in found)} or entries


def sizes(tree: object) -> dict[int, tuple[int, int]]:
    """Return the number of tensors below each container and their bytes, by its ``id``; each name counts in full."""
    found: dict[int, tuple[int, int]] = {}
    for container in _bottom_up(tree):
        count = nbytes = 0
        for _, child in _children(container):
            more = (1, child.nbytes) if isinstance(child, Entry) else found.get(id(child), (0, 0))
            count, nbytes = count + more[0], nbytes + more[1]
        found[id(container)] = count, nbytes
    return found


def _candidates(tree: object) -> dict[str, object]:
    """Return what could be state dicts of models by key, the largest first; see ``state_dict_candidates``."""
    below = sizes(tree)
    found: dict[str, object] = {}
    seen: set[int] = set()
    states: list[tuple[str, object]] = [("", tree)]
    while states:
        path, value = states.pop()
        if id(value) in seen or not isinstance(value, _CONTAINERS) or _is_optimizer_state(value):
            continue
        seen.add(id(value))
        direct = _named_tensor_bytes(value)
        named = path or value is tree  # a dict under an empty key has no key of its own
        if named and direct is not None and 2 * direct >= below[id(value)][1]:
            found.setdefault(path, value)
            continue
        prefix = f"{path}." if value is not tree else ""
        states += [(prefix + component(name), child) for name, child in reversed(list(_children(value)))]
    return dict(sorted(found.items(), key=lambda item: -below[id(item[1])][1]))


def _same_name(tree: object, name: str, first: Entry, keys: list[object]) -> FormatError:
    other = next(_spell(path) for seen, leaf, path in _leaves(tree) if seen == name and leaf is first)
    return FormatError(
        "two tensors have the same dotted name; the tree still tells them apart",
        tensor=name,
        found=f"{other} and {_spell(keys)}",
    )


def _leaves(tree: object) -> Iterator[tuple[str, object, list[object]]]:
    """Yield the dotted name, the leaf and the keys that lead to it; the list of keys is reused."""
    if not isinstance(tree, _CONTAINERS):
        yield "", tree, []
        return
    keys: list[object] = [None]
    stack = [("", _children(tree))]
    while stack:
        prefix, children = stack[-1]
        for key, child in children:
            keys[-1] = key
            name = prefix + (key if type(key) is str else component(key))
            if isinstance(child, _CONTAINERS):
                stack.append((f"{name}.", _children(child)))
                keys.append(None)
                break
            yield name, child, keys
        else:
            stack.pop()
            keys.pop()


def _bottom_up(tree: object) -> Iterator[Container]:
    """Yield each container once, after those inside of it."""
    finished: set[int] = set()
    stack = [tree] if isinstance(tree, _CONTAINERS) else []
    while stack:
        container = stack[-1]
        inside = [child for _, child in _children(container)]
        inside.append(_metadata(container))
        waiting = [child for child in inside if isinstance(child, _CONTAINERS) and id(child) not in finished]
        if waiting:
            stack += reversed(waiting)
            continue
        stack.pop()
        if id(container) not in finished:
            finished.add(id(container))
            yield container


def _children(container: object) -> Iterator[tuple[object, object]]:
    if isinstance(container, dict):
        return iter(container.items())
    assert isinstance(container, (list, tuple))
    return enumerate(container)


def _metadata(container: object) -> object:
    """Return the versions of modules that torch keeps as an attribute of ordered state dicts, or None."""
    return getattr(container, "_metadata", None) if isinstance(container, OrderedDict) else None


def component(key: object) -> str:
    """Return a key as a part of a dotted name; keys of odd types can be long or deep."""
    return str(key) if isinstance(key, (str, int)) else short_repr(key)


def _spell(keys: list[object]) -> str:
    return "".join(f"[{short_repr(key)}]" for key in keys)


def _lookup(value: object, component: str) -> Iterator[object]:
    """Yield what a part of a dotted name can mean in a container."""
    number = int(component) if _INTEGER.fullmatch(component) else None
    if isinstance(value, dict):
        if number in value:
            yield value[number]
        if component in value:
            yield value[component]
    elif isinstance(value, (list, tuple)) and number is not None and 0 <= number < len(value):
        yield value[number]


def _behind_prefix(value: object, prefix: str) -> Any:
    """Return the items whose names start with ``prefix``, without it; torch's versions of modules likewise."""
    if not isinstance(value, dict):
        return None
    part: Any = type(value)()
    for name, child in value.items():
        if isinstance(name, str) and name.startswith(prefix):
            part[name[len(prefix) :]] = child
    versions = _metadata(value)
    if isinstance(versions, dict):
        part._metadata = OrderedDict(  # noqa: SLF001 - torch's own name for it
            (name[len(prefix) :], version)
            for name, version in versions.items()
            if isinstance(name, str) and f"{name}.".startswith(prefix)
        )
    return part


def _is_optimizer_state(value: object) -> bool:
    return isinstance(value, dict) and "state" in value and "param_groups" in value


def _named_tensor_bytes(value: object) -> int | None:
    """Return the bytes of the tensors that a dict holds by name, or None when it holds none."""
    if not isinstance(value, dict):
        return None
    sizes = [child.nbytes for name, child in value.items() if isinstance(child, Entry) and isinstance(name, str)]
    return sum(sizes) if sizes else None


def _nothing_at(tree: object, key: str) -> MismatchError:
    top = [component(name) for name, _ in islice(_children(tree), _SHOWN)] if isinstance(tree, _CONTAINERS) else []
    parts = dict.fromkeys(
        name[:end]
        for name, _ in islice(walk(tree), _COMPARED)
        for end in (match.start() for match in re.finditer(r"\.|$", name))
    )
    close = get_close_matches(key, parts, n=3)
    return MismatchError(
        f"the checkpoint has nothing at key {key!r}",
        expected="one of " + ", ".join(map(repr, top)) + (", ..." if len(top) == _SHOWN else "") if top else None,
        found="close to it: " + ", ".join(map(repr, close)) if close else None,
    )
