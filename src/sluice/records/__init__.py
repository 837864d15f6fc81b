"""The frozen records that cross layers; a file for each step of a load, in the order in which it makes them.

``_index``:   what a checkpoint holds: ``FileRecord``, ``Storage``, ``Entry``, ``Part``, ``Opaque``, ``Index``
``_plain``:   values of torch as plain ones: ``TorchText``, ``TorchSize``
``_targets``: what is wanted and what fills it: ``Request``, ``Fill``, ``Constant``, ``Target``
``_facts``:   what was asked of the machine: ``FileFacts``, ``DeviceFacts``, ``MachineFacts``
``_plan``:    what the engine runs: ``Copy``, ``Swap``, ``Read``, ``Block``, ``LoadPlan`` and the plan of each device
``_memory``:  what memory grows by, predicted and measured: ``Peaks``, ``DeviceMemory``

They are imported from here. No record holds a tensor, and none of them imports torch. Offsets and sizes are bytes
unless a name says elements.
"""

from __future__ import annotations

from sluice.records.elements import Elements, MathBit, RowKernel, elements_of
from sluice.records.facts import AccessFacts, DeviceFacts, FileFacts, MachineFacts, largest_access, local_access
from sluice.records.index import (
    NO_STORAGE,
    Entry,
    FileIdentity,
    FileRecord,
    Index,
    Opaque,
    Part,
    Quantized,
    Sparse,
    Storage,
    UnsupportedValue,
)
from sluice.records.memory import DeviceMemory, Peaks
from sluice.records.plan import (
    Block,
    BlockKind,
    Copy,
    DevicePlan,
    LoadPlan,
    MappedRange,
    Method,
    Read,
    Reservation,
    Swap,
)
from sluice.records.targets import Constant, Fill, Finisher, Request, Target, View
from sluice.records.torch_values import TorchSize, TorchText

__all__ = [
    "NO_STORAGE",
    "AccessFacts",
    "Block",
    "BlockKind",
    "Constant",
    "Copy",
    "DeviceFacts",
    "DeviceMemory",
    "DevicePlan",
    "Elements",
    "Entry",
    "FileFacts",
    "FileIdentity",
    "FileRecord",
    "Fill",
    "Finisher",
    "Index",
    "LoadPlan",
    "MachineFacts",
    "MappedRange",
    "MathBit",
    "Method",
    "Opaque",
    "Part",
    "Peaks",
    "Quantized",
    "Read",
    "Request",
    "Reservation",
    "RowKernel",
    "Sparse",
    "Storage",
    "Swap",
    "Target",
    "TorchSize",
    "TorchText",
    "UnsupportedValue",
    "View",
    "elements_of",
    "largest_access",
    "local_access",
]
