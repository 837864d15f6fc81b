"""Any PyTorch checkpoint into any ``nn.Module``, with peak memory = the finished model + a small fixed gate.

Example:
    >>> import sluice
    >>> with sluice.empty_init():
    ...     model = GPTModel(config)
    >>> report = sluice.load_into(model, "model.pth")

Names are resolved on first use: ``import sluice`` imports neither torch nor anything else that is slow.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sluice import hf, rules
    from sluice._api import load_into, load_optimizer, load_state_dict
    from sluice._checkpoint import Checkpoint, LazyTensor, open  # noqa: A004  the name is the public API
    from sluice._convert import convert
    from sluice._diff import diff
    from sluice._diff_report import DiffReport, TensorDifference
    from sluice._empty_init import empty_init
    from sluice._errors import (
        Alternative,
        BudgetError,
        CheckpointError,
        FormatError,
        IncompleteCheckpointError,
        IntegrityError,
        LimitError,
        MismatchError,
        PartialLoadError,
        PathEscapeError,
        ReadError,
        RemoteError,
        SaveError,
        SluiceError,
        SourceChangedError,
        TruncatedError,
        UnsafeContentError,
        UnsupportedError,
    )
    from sluice._options import Limits, MemoryLimits
    from sluice._plan import plan
    from sluice._plan_report import PlanReport
    from sluice._progress import ProgressEvent
    from sluice._records import Opaque, Peaks, UnsupportedValue
    from sluice._report import LoadReport
    from sluice._save import SaveReport, save
    from sluice._verify import verify
    from sluice._verify_report import NonFinite, VerifyProblem, VerifyReport
    from sluice.measuring import MemoryReport, measure

__version__ = "0.1.0"

__all__ = [
    "Alternative",
    "BudgetError",
    "Checkpoint",
    "CheckpointError",
    "DiffReport",
    "FormatError",
    "IncompleteCheckpointError",
    "IntegrityError",
    "LazyTensor",
    "LimitError",
    "Limits",
    "LoadReport",
    "MemoryLimits",
    "MemoryReport",
    "MismatchError",
    "NonFinite",
    "Opaque",
    "PartialLoadError",
    "PathEscapeError",
    "Peaks",
    "PlanReport",
    "ProgressEvent",
    "ReadError",
    "RemoteError",
    "SaveError",
    "SaveReport",
    "SluiceError",
    "SourceChangedError",
    "TensorDifference",
    "TruncatedError",
    "UnsafeContentError",
    "UnsupportedError",
    "UnsupportedValue",
    "VerifyProblem",
    "VerifyReport",
    "convert",
    "diff",
    "empty_init",
    "hf",
    "load_into",
    "load_optimizer",
    "load_state_dict",
    "measure",
    "open",
    "plan",
    "rules",
    "save",
    "verify",
]

#: Where each public name lives; every exception is in ``_errors``.
_HOMES = {
    "Checkpoint": "_checkpoint",
    "LazyTensor": "_checkpoint",
    "DiffReport": "_diff_report",
    "Limits": "_options",
    "LoadReport": "_report",
    "MemoryLimits": "_options",
    "MemoryReport": "measuring",
    "NonFinite": "_verify_report",
    "Opaque": "_records",
    "Peaks": "_records",
    "PlanReport": "_plan_report",
    "UnsupportedValue": "_records",
    "ProgressEvent": "_progress",
    "SaveReport": "_save",
    "VerifyProblem": "_verify_report",
    "VerifyReport": "_verify_report",
    "convert": "_convert",
    "TensorDifference": "_diff_report",
    "diff": "_diff",
    "empty_init": "_empty_init",
    "load_into": "_api",
    "load_optimizer": "_api",
    "load_state_dict": "_api",
    "measure": "measuring",
    "open": "_checkpoint",
    "plan": "_plan",
    "save": "_save",
    "verify": "_verify",
}


if not TYPE_CHECKING:  # a type checker that saw it would accept every name

    def __getattr__(name: str) -> object:
        if name not in __all__:
            raise AttributeError(f"module 'sluice' has no attribute {name!r}")
        if name in {"hf", "rules"}:
            return import_module(f"sluice.{name}")
        value = getattr(import_module(f"sluice.{_HOMES.get(name, '_errors')}"), name)
        globals()[name] = value  # the next access does not come here
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
