"""The dry run of a load on many ranks: what each of them holds and reads, and what they read together. No torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from sluice._public import public
from sluice._units import counted, format_bytes
from sluice.reports.document import Report, Section

__all__ = ["RankLoad", "RanksPlan"]


@public()
@dataclass(frozen=True, slots=True, kw_only=True)
class RankLoad:
    """The load of one rank."""

    #: Number of the rank.
    rank: int
    #: Its position in the mesh.
    coordinate: tuple[int, ...]
    #: Number of its host.
    host: int
    #: Bytes of the finished tensors that it holds.
    final_bytes: int
    #: Bytes that it reads, if every rank reads for itself.
    read_bytes: int
    #: Number of these reads; requests, if the files are objects in a store.
    reads: int
    #: Predicted growth of its memory.
    peak_bytes: int


@public()
@dataclass(frozen=True, slots=True, kw_only=True)
class RanksPlan(Report):
    """A load on the ranks of a mesh, planned in one process: ``sluice.plan(..., mesh=...).ranks``.

    Example:
        >>> plan = sluice.plan(model, "model.pth", mesh={"dp": 4}, ranks_per_host=2)
        >>> print(plan.ranks.needed_bytes <= plan.ranks.read_bytes)
        True
    """

    _properties = ("read_bytes",)

    #: Ranks along each dimension of the mesh.
    mesh: Mapping[str, int]
    #: One for each rank, in the order of ranks.
    ranks: tuple[RankLoad, ...]
    #: Bytes of the files that at least one rank needs.
    needed_bytes: int

    @property
    def read_bytes(self) -> int:
        """Bytes that all ranks read, if each reads for itself."""
        return sum(rank.read_bytes for rank in self.ranks)

    @property
    def fullest(self) -> RankLoad:
        """The rank whose memory grows most."""
        return max(self.ranks, key=lambda rank: rank.peak_bytes)

    def sections(self) -> Iterator[Section]:
        """Yield what ranks hold and read."""
        held = [rank.final_bytes for rank in self.ranks]
        shape = ", ".join(f"{name}={size}" for name, size in self.mesh.items())
        yield (
            f"{counted(len(self.ranks), 'rank')} ({shape}) on {counted(self.ranks[-1].host + 1, 'host')}: each holds "
            f"{format_bytes(min(held))} to {format_bytes(max(held))}; the fullest, rank {self.fullest.rank}, grows by "
            f"at most {format_bytes(self.fullest.peak_bytes)}"
        )
        times = self.read_bytes / self.needed_bytes if self.needed_bytes else 1.0
        yield (
            f"all ranks need {format_bytes(self.needed_bytes)} of the files; if each reads for itself, they read "
            f"{format_bytes(self.read_bytes)}, {times:.2f} times as much"
        )
