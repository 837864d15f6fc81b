"""The table of a load: how each tensor was filled, one row per name, cheap for 100,000 tensors."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, overload

from msgspec import Struct

from sluice._units import format_bytes
from sluice.reports.document import Grid, Report, Section, plain

__all__ = ["TensorRow", "TensorTable"]

_HEADERS = ("name", "dtype", "shape", ">bytes", "device", "how", "from")


class TensorRow(Struct, frozen=True, kw_only=True):
    """How one tensor of the model was filled."""

    #: Its name in the model.
    name: str
    #: Dtype in the checkpoint; None for a tensor that is not in the checkpoint.
    file_dtype: str | None
    #: Dtype of the finished tensor.
    dtype: str
    #: Size of each dimension, in elements.
    shape: tuple[int, ...]
    #: Bytes of the finished tensor; tied names repeat it, though they share the memory.
    nbytes: int
    #: Device of the finished tensor, as torch writes it.
    device: str
    #: ``direct into place``: read into its final memory. ``through staging``: copied out of a staging buffer.
    #: ``cast``: cast on the way. ``mapped``: pages of the file. ``kept``: not in the checkpoint, unchanged.
    #: ``initialised``: not in the checkpoint, filled by its module. ``computed``: a non-persistent buffer.
    #: ``tied to ...``: another name of that tensor. ``empty``: no elements.
    how: str
    #: Names in the checkpoint of the tensors that it comes from.
    source_names: tuple[str, ...] = ()
    #: How rules produced it, in words; empty if no rule applied.
    origin: str = ""

    def cells(self) -> tuple[str, ...]:
        """Return the cells of the row as text."""
        dtype = self.dtype if self.file_dtype in {None, self.dtype} else f"{self.file_dtype} -> {self.dtype}"
        origin = self.origin or ", ".join(self.source_names)
        return self.name, dtype, str(list(self.shape)), format_bytes(self.nbytes), self.device, self.how, origin


class TensorTable(Report, Sequence[TensorRow]):
    """Rows in the order of the model. ``str(table)`` is aligned text; rich prints it as a table.

    Example:
        >>> row = TensorRow(name="bias", file_dtype="float32", dtype="bfloat16", shape=(3,), nbytes=6, device="cpu",
        ...                 how="cast", source_names=("module.bias",))
        >>> print(TensorTable([row]))
        name  dtype                shape  bytes  device  how   from
        bias  float32 -> bfloat16  [3]      6 B  cpu     cast  module.bias
    """

    def __init__(self, rows: Iterable[TensorRow]) -> None:
        self._rows = tuple(rows)

    @overload
    def __getitem__(self, index: int) -> TensorRow: ...

    @overload
    def __getitem__(self, index: slice) -> TensorTable: ...

    def __getitem__(self, index: int | slice) -> TensorRow | TensorTable:
        return TensorTable(self._rows[index]) if isinstance(index, slice) else self._rows[index]

    def __len__(self) -> int:
        return len(self._rows)

    def to_json(self) -> Any:
        """Return the rows as plain values that ``json.dumps`` takes."""
        return [plain(row) for row in self._rows]

    def sections(self) -> Iterator[Section]:
        """Yield the table as it is printed by the command line."""
        yield Grid(_HEADERS, [row.cells() for row in self._rows])

    def __repr__(self) -> str:
        return f"<TensorTable of {len(self)} rows>"
