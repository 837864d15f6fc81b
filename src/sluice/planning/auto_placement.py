"""Placement of ``device="auto"``: fill accelerators in order and put the rest on the CPU.

A module goes to the first accelerator with room for all of it. A module that does not fit is split into its children,
except for modules that must stay whole: those that the model declares indivisible, and those without children. If a
whole module does not fit, its accelerator is closed. Devices therefore follow the order of the model, and activations
move once from each device to the next. Modules that share a tensor stay together.

Pure functions: no I/O, no torch.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Collection, Iterator, Mapping, Sequence

from msgspec import Struct, field

from sluice.planning.cuda_allocator import plan_reservation

__all__ = ["Member", "auto_placement"]

_HOST = "cpu"


class Member(Struct, frozen=True, kw_only=True):
    """One tensor of a module to place."""

    #: Names in the module; tied tensors have several.
    names: tuple[str, ...]
    #: Bytes of the finished tensor.
    nbytes: int
    #: Device that already holds the tensor in its final dtype, where placing it takes no memory; None if it is on meta
    #: or changes its dtype.
    at: str | None = None

    def cost_on(self, device: str) -> int:
        """Return the bytes by which the memory of ``device`` grows if the tensor is placed there."""
        return 0 if self.at == device else self.nbytes


class _Node(Struct, eq=False):
    """A module, or a tensor that belongs directly to a module with children."""

    path: str
    children: dict[str, _Node] = field(default_factory=dict)
    #: Full name and position of each tensor that belongs directly to it.
    own: list[tuple[str, int]] = field(default_factory=list)
    #: Positions of all tensors in it, in order, as keys.
    members: dict[int, None] = field(default_factory=dict)


def auto_placement(
    members: Sequence[Member], rooms: Mapping[str, int], *, whole: Collection[str] = (), one_block: bool = True
) -> dict[str, str]:
    """Return a device for every tensor, as a mapping from name prefixes to devices; the longest prefix applies.

    No accelerator reserves more than its room, counted as torch's allocator does. Tensors without room there go to the
    CPU; its limits are checked with the rest of the plan.

    Args:
        members: All tensors of the module, in the order of its modules.
        rooms: Most bytes that the allocator of each accelerator may reserve, in the order in which they are filled.
        whole: Paths of modules that must not be split.
        one_block: Whether the memory of an accelerator is reserved as one block; see ``plan_reservation``.
    """
    root = _tree(members)
    limits = dict(rooms)
    while True:
        devices = _assign(root, members, limits, frozenset(whole))
        for room, nbytes in rooms.items():
            sizes = [m.cost_on(room) for m, device in zip(members, devices, strict=True) if device == room]
            excess = plan_reservation(sizes, one_block=one_block).reserved_bytes - nbytes
            if excess > 0:
                # Rounding exceeds the room by this much. Later accelerators depend on the limit, so start again.
                limits[room] = min(limits[room], sum(sizes)) - excess
                break
        else:
            return dict(_prefixes(root, devices))


def _tree(members: Sequence[Member]) -> _Node:
    """Return the root of the tree of modules that the names describe."""
    root = _Node("")
    named = [(member.names[0], position) for position, member in enumerate(members)]
    # Further names of tied tensors come last, so that they do not change the order of modules.
    named += [(name, position) for position, member in enumerate(members) for name in member.names[1:]]
    for name, position in named:
        node = root
        node.members[position] = None
        for part in name.split(".")[:-1]:
            path = f"{node.path}.{part}" if node.path else part
            node = node.children.setdefault(part, _Node(path))
            node.members[position] = None
        node.own.append((name, position))
    return root


def _assign(root: _Node, members: Sequence[Member], limits: Mapping[str, int], whole: frozenset[str]) -> list[str]:
    """Return the device of each member."""
    partners = _units(root, members, whole)
    devices: list[str] = [""] * len(members)
    queue = deque([root])
    order = [*limits, _HOST]
    used = 0
    while queue:
        node = queue.popleft()
        unit = _together(node, partners, devices)
        device = order[0]
        nbytes = sum(members[position].cost_on(device) for position in unit)
        if device == _HOST or used + nbytes <= limits[device]:
            for position in unit:
                devices[position] = device
            used += nbytes
        elif node.children and node.path not in whole:
            queue.extendleft(reversed(list(_split(node))))
        else:
            queue.appendleft(node)
            del order[0]
            used = 0
    return devices


def _units(root: _Node, members: Sequence[Member], whole: frozenset[str]) -> dict[int, list[_Node]]:
    """Return for each tied member the smallest indivisible parts of the module that contain it."""
    units: defaultdict[int, list[_Node]] = defaultdict(list)
    for position, member in enumerate(members):
        for name in member.names if len(member.names) > 1 else ():
            node = root
            for part in name.split(".")[:-1]:
                if node.path in whole:
                    break
                node = node.children[part]
            if node.children and node.path not in whole:
                node = _Node(name, members={position: None})
            units[position].append(node)
    return dict(units)


def _together(node: _Node, partners: Mapping[int, list[_Node]], devices: Sequence[str]) -> dict[int, None]:
    """Return the unplaced members that must go to the same device as ``node``."""
    unit: dict[int, None] = {}
    pending = [node]
    while pending:
        for position in pending.pop().members:
            if position not in unit and not devices[position]:
                unit[position] = None
                pending.extend(partners.get(position, ()))
    return unit


def _split(node: _Node) -> Iterator[_Node]:
    """Yield the tensors that belong directly to a module, then its children."""
    for name, position in node.own:
        yield _Node(name, members={position: None})
    yield from node.children.values()


def _prefixes(node: _Node, devices: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield the shortest prefixes under which all tensors have the same device, with this device."""
    distinct = {devices[position] for position in node.members}
    if len(distinct) == 1:
        yield node.path, distinct.pop()
        return
    for part in _split(node):
        yield from _prefixes(part, devices)
