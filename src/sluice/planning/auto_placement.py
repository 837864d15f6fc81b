"""``device="auto"``: accelerators are filled in order, the rest goes to the CPU. Pure; no torch.

A module goes to the first accelerator that has room for all of it. One that does not fit is split into its children,
down to what must stay whole: modules that the model says so of, and modules without children. What stays whole and
does not fit closes the accelerator, so that the order of the model is the order of the devices and activations move
once from each to the next. Modules that share a tensor stay together.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from sluice.planning.cuda_allocator import plan_reservation

__all__ = ["Member", "Room", "auto_placement"]

_HOST = "cpu"


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """One tensor of a module that needs a place."""

    #: Its names in the module; tied tensors have several.
    names: tuple[str, ...]
    #: Bytes of the finished tensor.
    nbytes: int
    #: Device that holds it already, as it will be: there it costs nothing. None: it is on meta, or changes its dtype.
    at: str | None = None

    def cost_on(self, device: str) -> int:
        """Bytes by which the memory of a device grows when it goes there."""
        return 0 if self.at == device else self.nbytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Room:
    """What one accelerator may be filled with."""

    #: Name as torch writes it: ``"cuda:0"``.
    device: str
    #: Bytes that its allocator may reserve for the tensors.
    nbytes: int


@dataclass(slots=True, eq=False)
class _Node:
    """A module, or a tensor that its module holds directly beside children."""

    path: str
    children: dict[str, _Node] = field(default_factory=dict)
    #: Full name and position of each tensor that it holds itself.
    own: list[tuple[str, int]] = field(default_factory=list)
    #: Positions of all tensors in it, in order.
    members: dict[int, None] = field(default_factory=dict)


def auto_placement(
    members: Sequence[Member], rooms: Sequence[Room], *, whole: Collection[str] = (), one_block: bool = True
) -> dict[str, str]:
    """Return a device for every tensor, as a mapping from prefixes of names; the longest prefix wins.

    No accelerator is asked to reserve more than its room, as torch's allocator counts. What has no room there is the
    CPU's; whether it has room itself is checked with the rest of the plan.

    Args:
        members: Every tensor of the module, in the order of its modules.
        rooms: The accelerators in the order in which they are filled.
        whole: Paths of modules that must not be split.
        one_block: Whether the memory of an accelerator is reserved as one block; see ``plan_reservation``.
    """
    root = _tree(members)
    limits = {room.device: room.nbytes for room in rooms}
    while True:
        devices = _assign(root, members, limits, frozenset(whole))
        for room in rooms:
            sizes = [
                m.cost_on(room.device) for m, device in zip(members, devices, strict=True) if device == room.device
            ]
            excess = plan_reservation(sizes, one_block=one_block).reserved_bytes - room.nbytes
            if excess > 0:
                # Rounding took it over the edge: this much less fits. Later accelerators depend on it, so start again.
                limits[room.device] = min(limits[room.device], sum(sizes)) - excess
                break
        else:
            return dict(_prefixes(root, devices))


def _tree(members: Sequence[Member]) -> _Node:
    root = _Node("")
    named = [(member.names[0], position) for position, member in enumerate(members)]
    # Further names of tied tensors come last: they must not bring their modules forward.
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
        wanted = _together(node, partners, devices)
        device = order[0]
        nbytes = sum(members[position].cost_on(device) for position in wanted)
        if device == _HOST or used + nbytes <= limits[device]:
            for position in wanted:
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
    """Return for each tied member the smallest parts of the module that hold it and stay whole."""
    found: defaultdict[int, list[_Node]] = defaultdict(list)
    for position, member in enumerate(members):
        for name in member.names if len(member.names) > 1 else ():
            node = root
            for part in name.split(".")[:-1]:
                if node.path in whole:
                    break
                node = node.children[part]
            if node.children and node.path not in whole:
                node = _Node(name, members={position: None})
            found[position].append(node)
    return dict(found)


def _together(node: _Node, partners: Mapping[int, list[_Node]], devices: Sequence[str]) -> dict[int, None]:
    """Return the members that have to go where ``node`` goes and have no place yet."""
    wanted: dict[int, None] = {}
    pending = [node]
    while pending:
        for position in pending.pop().members:
            if position not in wanted and not devices[position]:
                wanted[position] = None
                pending.extend(partners.get(position, ()))
    return wanted


def _split(node: _Node) -> Iterator[_Node]:
    for name, position in node.own:
        yield _Node(name, members={position: None})
    yield from node.children.values()


def _prefixes(node: _Node, devices: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield the shortest prefixes under which all tensors have one device."""
    found = {devices[position] for position in node.members}
    if len(found) == 1:
        yield node.path, found.pop()
        return
    for part in _split(node):
        yield from _prefixes(part, devices)
