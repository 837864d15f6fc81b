"""Reconstruction of the nested object of a distributed checkpoint from the names and paths of its items.

torch flattens the object on saving: ``{"optim": {"state": {0: {"step": t}}}}`` becomes the item ``optim.state.0.step``
with the path ``("optim", "state", "0", "step")``. In a path, dict keys are text and list positions are integers. An
item without a path is at the top level under its name. Empty containers are lost, and missing list positions are None,
as in torch.

Limits: the length of a path (``Limits.depth``), and the total length of all lists (``Limits.entries``).
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import Any

from sluice._errors import FormatError
from sluice._messages import check_limit
from sluice._options import Limits

__all__ = ["unflatten"]


class _Dict(dict[Any, Any]):
    """A dict on the path of an item, as opposed to a dict that is the value of an item."""


class _List(dict[Any, Any]):
    """A list on the path of an item, by position."""


def unflatten(
    values: Mapping[str, object], paths: Mapping[str, object], limits: Limits, file: str
) -> dict[str, object]:
    """Return the nested object.

    Args:
        values: Value of each item, by flat name.
        paths: Path of each item, by flat name; items may be missing.
        limits: Bounds on depth and length.
        file: Path of the file that holds the paths, for error messages.

    Raises:
        FormatError: A path has invalid components, or two paths conflict.
        LimitError: The object is deeper or longer than the limits allow.
    """
    root: dict[str, Any] = _Dict()
    containers: list[tuple[Any, object, Any]] = []
    for name, value in values.items():
        path = _checked_path(name, paths.get(name, (name,)), limits, file)
        container = root
        for key, following in pairwise(path):
            kind = _List if type(following) is int else _Dict
            if key not in container:
                container[key] = kind()
                containers.append((container, key, container[key]))
            container = container[key]
            if type(container) is not kind:
                raise FormatError("the paths of two items conflict", file=file, tensor=name, found=path)
        if path[-1] in container:
            raise FormatError("the paths of two items conflict", file=file, tensor=name, found=path)
        container[path[-1]] = value
    total = sum(max(container) + 1 for _, _, container in containers if type(container) is _List)
    check_limit(limits, "entries", total, "the length of all lists of the checkpoint", file=file)
    for parent, key, container in reversed(containers):  # inner containers follow outer ones in the list
        parent[key] = dict(container) if type(container) is _Dict else _as_list(container)
    return dict(root)


def _checked_path(name: str, path: object, limits: Limits, file: str) -> tuple[Any, ...]:
    if type(path) not in (tuple, list) or not path:
        raise FormatError("the path of an item is not a tuple", file=file, tensor=name)
    assert isinstance(path, (tuple, list))
    if len(path) > limits.depth:
        check_limit(limits, "depth", len(path), "the nesting of an item", file=file, tensor=name)
    for key in path:
        if type(key) is not str and (type(key) is not int or key < 0):
            problem = "the path of an item has a component that is neither text nor a list position"
            raise FormatError(problem, file=file, tensor=name)
    if type(path[0]) is not str:
        raise FormatError("the path of an item starts with a list position", file=file, tensor=name)
    if ".".join(map(str, path)) != name:
        raise FormatError("the path of an item does not match its name", file=file, tensor=name, found=path)
    return tuple(path)


def _as_list(container: _List) -> list[object]:
    return [container.get(position) for position in range(max(container) + 1)]
