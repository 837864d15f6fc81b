"""The nested object of a distributed checkpoint, from the flat names of its items and the paths that they had.

torch flattens what it saves: ``{"optim": {"state": {0: {"step": t}}}}`` becomes the item ``optim.state.0.step`` with
the path ``("optim", "state", "0", "step")``, which spells its name. Keys of dicts are text in a path, positions in
lists are integers. An item without a path stands at the top under its name. Empty containers leave no trace; a position
in a list that no item has is None, as torch rebuilds it.

Bounds: the length of a path (``Limits.depth``) and the lengths of all lists together (``Limits.entries``).
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import Any

from sluice._errors import FormatError, LimitError
from sluice._options import Limits

__all__ = ["unflatten"]


class _Dict(dict[Any, Any]):
    """A dict that a path leads through, not one that an item holds."""


class _List(dict[Any, Any]):
    """A list that a path leads through, by position."""


def unflatten(
    values: Mapping[str, object], paths: Mapping[str, object], limits: Limits, file: str
) -> dict[str, object]:
    """Return the nested object.

    Args:
        values: The value of each item, by its flat name.
        paths: The path of each item, by its flat name; items may be missing.
        limits: Bounds on depth and length.
        file: The file that holds the paths, for messages.

    Raises:
        FormatError: A path is not made of text and positions, or two of them contradict each other.
        LimitError: The object is deeper or longer than the limits allow.
    """
    root: dict[str, Any] = _Dict()
    made: list[tuple[Any, object, Any]] = []
    for name, value in values.items():
        path = _checked(name, paths.get(name, (name,)), limits, file)
        container = root
        for key, following in pairwise(path):
            kind = _List if type(following) is int else _Dict
            if key not in container:
                container[key] = kind()
                made.append((container, key, container[key]))
            container = container[key]
            if type(container) is not kind:
                raise FormatError("the paths of two items contradict each other", file=file, tensor=name, found=path)
        if path[-1] in container:
            raise FormatError("the paths of two items contradict each other", file=file, tensor=name, found=path)
        container[path[-1]] = value
    _check_lengths(made, limits, file)
    for parent, key, container in reversed(made):  # those inside come later than those around them
        parent[key] = dict(container) if type(container) is _Dict else _as_list(container)
    return dict(root)


def _checked(name: str, path: object, limits: Limits, file: str) -> tuple[Any, ...]:
    if type(path) not in (tuple, list) or not path:
        raise FormatError("the path of an item is no tuple", file=file, tensor=name)
    assert isinstance(path, (tuple, list))
    if len(path) > limits.depth:
        expected = f"at most {limits.depth} levels (depth)"
        raise LimitError("an item nests too deep", file=file, tensor=name, expected=expected, found=len(path))
    for key in path:
        if type(key) is not str and (type(key) is not int or key < 0):
            problem = "the path of an item is made of something other than text and positions"
            raise FormatError(problem, file=file, tensor=name)
    if type(path[0]) is not str:
        raise FormatError("the path of an item starts with a position", file=file, tensor=name)
    if ".".join(map(str, path)) != name:
        raise FormatError("the path of an item does not spell its name", file=file, tensor=name, found=path)
    return tuple(path)


def _check_lengths(made: list[tuple[Any, object, Any]], limits: Limits, file: str) -> None:
    total = sum(max(container) + 1 for _, _, container in made if type(container) is _List)
    if total > limits.entries:
        expected = f"at most {limits.entries} (entries)"
        raise LimitError("the lists of the checkpoint are too long", file=file, expected=expected, found=total)


def _as_list(container: _List) -> list[object]:
    return [container.get(position) for position in range(max(container) + 1)]
