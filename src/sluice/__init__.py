"""Any PyTorch checkpoint into any ``nn.Module``, with peak memory = the finished model + a fixed pool of buffers.

Example:
    >>> import sluice
    >>> with sluice.empty_init():
    ...     model = GPTModel(config)
    >>> report = sluice.load_into(model, "model.pth")

Names are resolved on first use: ``import sluice`` imports neither torch nor anything else that is slow.
"""

from __future__ import annotations

import gc

TYPE_CHECKING = False  # type checkers take it for True; the module typing takes longer to import than this package
if TYPE_CHECKING:
    from sluice import hf, rules
    from sluice._errors import (
        Alternative,
        BudgetError,
        CheckpointError,
        EmptyInitError,
        FormatError,
        IncompleteCheckpointError,
        IntegrityError,
        LimitError,
        MismatchError,
        MissingFileError,
        PartialLoadError,
        PathEscapeError,
        RankError,
        ReadError,
        ReadPermissionError,
        RemoteError,
        SaveError,
        SluiceError,
        SourceChangedError,
        StreamError,
        TruncatedError,
        UnsafeContentError,
        UnsupportedError,
    )
    from sluice._options import Limits, MemoryLimits
    from sluice._progress import ProgressEvent
    from sluice.adapters.config import Adapter
    from sluice.api.checkpoint import Checkpoint, LazyTensor, open  # noqa: A004  the name is the public API
    from sluice.api.convert import convert
    from sluice.api.diff import diff
    from sluice.api.load import load_into, load_state_dict
    from sluice.api.load_optimizer import load_optimizer
    from sluice.api.merge import merge
    from sluice.api.plan import plan
    from sluice.api.refresh import refresh
    from sluice.api.save import save
    from sluice.api.shared import shared
    from sluice.api.stream import stream
    from sluice.api.verify import verify
    from sluice.measuring import MemoryReport, measure
    from sluice.merging.patched import Patched
    from sluice.modules.empty_init import empty_init
    from sluice.records import Opaque, Peaks, UnsupportedValue
    from sluice.reports.diff import DiffReport, TensorDifference
    from sluice.reports.load import LoadReport, RankReport, RefreshState
    from sluice.reports.plan import PlanReport
    from sluice.reports.save import SaveReport
    from sluice.reports.stream import StreamPlan, StreamReport
    from sluice.reports.verify import NonFinite, VerifyProblem, VerifyReport
    from sluice.sharing.copies import SharedCopy
    from sluice.sources.remote.location import Remote
    from sluice.streaming.stream import Stream

__version__ = "0.1.0"

__all__ = [
    "Adapter",
    "Alternative",
    "BudgetError",
    "Checkpoint",
    "CheckpointError",
    "DiffReport",
    "EmptyInitError",
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
    "MissingFileError",
    "NonFinite",
    "Opaque",
    "PartialLoadError",
    "Patched",
    "PathEscapeError",
    "Peaks",
    "PlanReport",
    "ProgressEvent",
    "RankError",
    "RankReport",
    "ReadError",
    "ReadPermissionError",
    "RefreshState",
    "Remote",
    "RemoteError",
    "SaveError",
    "SaveReport",
    "SharedCopy",
    "SluiceError",
    "SourceChangedError",
    "Stream",
    "StreamError",
    "StreamPlan",
    "StreamReport",
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
    "merge",
    "open",
    "plan",
    "refresh",
    "rules",
    "save",
    "shared",
    "stream",
    "verify",
]

#: Public names by the module in which they live. Other functions have a module of their name in ``api``, and every
#: exception is in ``_errors``.
_HOMES = {
    "_options": ("Limits", "MemoryLimits"),
    "_progress": ("ProgressEvent",),
    "adapters.config": ("Adapter",),
    "api.checkpoint": ("Checkpoint", "LazyTensor", "open"),
    "api.load": ("load_into", "load_state_dict"),
    "measuring": ("MemoryReport", "measure"),
    "merging.patched": ("Patched",),
    "modules.empty_init": ("empty_init",),
    "records": ("Opaque", "Peaks", "UnsupportedValue"),
    "reports.diff": ("DiffReport", "TensorDifference"),
    "reports.load": ("LoadReport", "RankReport", "RefreshState"),
    "reports.plan": ("PlanReport",),
    "reports.save": ("SaveReport",),
    "reports.stream": ("StreamPlan", "StreamReport"),
    "reports.verify": ("NonFinite", "VerifyProblem", "VerifyReport"),
    "sharing.copies": ("SharedCopy",),
    "sources.remote.location": ("Remote",),
    "streaming.stream": ("Stream",),
}

#: Public packages, imported when they are first used.
_ROOMS = {"hf", "integrations", "measuring", "rules", "safetensors", "testing", "torch"}


if not TYPE_CHECKING:  # a type checker that saw it would accept every name

    def __getattr__(name: str) -> object:
        if name not in __all__ and name not in _ROOMS:
            from sluice._public import name_hint

            raise AttributeError(f"module 'sluice' has no attribute {name!r}{name_hint(name)}")
        # Here, not above: an interrupt of the command line during imports shows a traceback.
        from importlib import import_module

        if name in _ROOMS:
            return import_module(f"sluice.{name}")
        # A pass of the garbage collector over the objects of ``import torch`` takes a third of the time of this import.
        collecting = gc.isenabled()
        gc.disable()
        try:
            other = f"api.{name}" if name.islower() else "_errors"
            home = next((module for module, names in _HOMES.items() if name in names), other)
            value = getattr(import_module(f"sluice.{home}"), name)
        finally:
            if collecting:
                gc.enable()
        globals()[name] = value  # the next access does not come here
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
