"""A report's table of tensors: one row for each name, cheap for 100,000 of them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, overload

from sluice._units import format_bytes

if TYPE_CHECKING:
    from rich.table import Table

__all__ = ["TensorRow", "TensorTable", "aligned"]

#: Columns are padded up to here: one name of 4,096 characters should not push every other row to the right.
_PADDED_COLUMNS = 100

_HEADERS = ("name", "dtype", "shape", "bytes", "device", "how", "from")


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorRow:
    """How one tensor of the model was filled."""

    #: Its name in the model.
    name: str
    #: Dtype in the checkpoint; None for a tensor that did not come from there.
    file_dtype: str | None
    #: Dtype of the finished tensor.
    dtype: str
    #: Size of each dimension, in elements.
    shape: tuple[int, ...]
    #: Bytes of the finished tensor; of a tied name too, though they are held once.
    nbytes: int
    #: Device of the finished tensor, as torch writes it.
    device: str
    #: ``direct into place``: read to where it stays. ``through staging``: copied out of a staging buffer. ``cast``: on
    #: the way there. ``mapped``: pages of the file. ``kept``: not in the checkpoint. ``initialised``: not in the
    #: checkpoint, and filled by its module. ``computed``: a buffer that no state dict holds. ``tied to ...``: another
    #: name of that tensor. ``empty``: no elements.
    how: str
    #: Names in the checkpoint of what it was made from.
    source_names: tuple[str, ...] = ()
    #: What rules made of these, in words; empty where no rule applied.
    origin: str = ""

    def cells(self) -> tuple[str, ...]:
        """Return the row as text, safe for terminals: names are a stranger's."""
        dtype = self.dtype if self.file_dtype in {None, self.dtype} else f"{self.file_dtype} -> {self.dtype}"
        made_from = _printable(self.origin or ", ".join(self.source_names))
        size = format_bytes(self.nbytes)
        return _printable(self.name), dtype, str(list(self.shape)), size, self.device, _printable(self.how), made_from


class TensorTable(Sequence[TensorRow]):
    """Rows in the order of the model. ``str(table)`` is aligned text; rich prints it as a table.

    Example:
        >>> row = TensorRow(name="bias", file_dtype="float32", dtype="bfloat16", shape=(3,), nbytes=6, device="cpu",
        ...                 how="cast", source_names=("module.bias",))
        >>> print(TensorTable([row]))
        name  dtype                shape  bytes  device  how   from
        bias  float32 -> bfloat16  [3]    6 B    cpu     cast  module.bias
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

    def to_json(self) -> list[dict[str, object]]:
        """Return the rows as plain values that ``json.dumps`` takes."""
        return [asdict(row) for row in self._rows]

    def __str__(self) -> str:
        return "\n".join(aligned(_HEADERS, [row.cells() for row in self._rows]))

    def __repr__(self) -> str:
        return f"<TensorTable of {len(self)} rows>"

    def __rich__(self) -> Table:
        from rich.table import Table
        from rich.text import Text

        table = Table(*_HEADERS)
        for row in self._rows:
            table.add_row(*map(Text, row.cells()))  # Text: markup in names stays as it is
        return table


def aligned(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Yield headers and rows as lines of aligned columns; rich needs a third of a millisecond for each row."""
    lines = [headers, *rows]
    widths = [min(_PADDED_COLUMNS, max(map(len, column))) for column in zip(*lines, strict=True)]
    return ("  ".join(map(str.ljust, line, widths)).rstrip() for line in lines)


def _printable(text: str) -> str:
    return text if text.isprintable() else repr(text)[1:-1]
