"""Contents of a model: its version, and the digest of each tensor."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from sluice._public import public

if TYPE_CHECKING:
    from sluice.reports.load import LoadReport

__all__ = ["RefreshState"]


@public()
@dataclass(frozen=True, slots=True, kw_only=True)
class RefreshState:
    """Contents of a model. It is small, and can be pickled: a digest for each tensor; the report is left out then.

    Example:
        >>> state = sluice.refresh(model, "model.pth")
        >>> sluice.refresh(model, "model.pth", since=state).version == state.version
        True
    """

    #: Version of the weights: that in the metadata of the checkpoint (``model_version`` or ``version``), else a digest.
    version: str
    #: Digest of the content of each tensor, by its name in the model.
    contents: Mapping[str, str] = field(repr=False)
    #: Names of the tensors that this refresh has filled.
    changed: tuple[str, ...] = ()
    #: Number of tensors that it has left alone.
    unchanged: int = 0
    #: Bytes, times and memory of the refresh; None for the state of a report, and after pickling.
    report: LoadReport | None = field(default=None, compare=False, repr=False)

    def __reduce__(self) -> tuple[Any, ...]:
        plain = replace(self, report=None, contents=dict(self.contents))
        return _state, (plain.version, plain.contents, plain.changed, plain.unchanged)


def _state(version: str, contents: dict[str, str], changed: tuple[str, ...], unchanged: int) -> RefreshState:
    return RefreshState(version=version, contents=contents, changed=changed, unchanged=unchanged)
