"""Frozen records that cross layers, one module for each step of a load, in the order of the steps.

``index``:        contents of a checkpoint: ``FileRecord``, ``Storage``, ``Entry``, ``Part``, ``Opaque``, ``Index``
``elements``:     stored form of elements and computations on them: ``Elements``, ``Packing``
``torch_values``: values of torch types without torch: ``TorchText``, ``TorchSize``
``targets``:      requested tensors and their final memory: ``Request``, ``Fill``, ``Constant``, ``Target``
``facts``:        properties of files and of the machine: ``FileFacts``, ``DeviceFacts``, ``MachineFacts``
``plan``:         complete decision of a load: ``Copy``, ``Read``, ``Block``, ``LoadPlan``, ``DevicePlan``
``memory``:       growth of memory, predicted and measured: ``Peaks``, ``DeviceMemory``
``requests``:     requests for remote files, planned and made: ``Traffic``, ``RequestRecord``, ``RemoteReads``
``bulk``:         fast construction of many records
``geometry``:     arithmetic of shapes, strides and copies

Import the records from this package. They hold no tensors and import no torch. Offsets and sizes are in bytes unless a
name says elements.
"""

from __future__ import annotations

from sluice.records.elements import Arithmetic, Elements, MathBit, Packing, elements_of
from sluice.records.facts import (
    REMOTE_FILESYSTEM,
    AccessFacts,
    DeviceFacts,
    FileFacts,
    MachineFacts,
    largest_access,
    local_access,
)
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
    requests_of,
)
from sluice.records.requests import RemoteReads, RequestRecord, Traffic
from sluice.records.targets import Constant, Fill, Finisher, Request, Target, View
from sluice.records.torch_values import TorchSize, TorchText

__all__ = [
    "NO_STORAGE",
    "REMOTE_FILESYSTEM",
    "AccessFacts",
    "Arithmetic",
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
    "Packing",
    "Part",
    "Peaks",
    "Quantized",
    "Read",
    "RemoteReads",
    "Request",
    "RequestRecord",
    "Reservation",
    "Sparse",
    "Storage",
    "Target",
    "TorchSize",
    "TorchText",
    "Traffic",
    "UnsupportedValue",
    "View",
    "elements_of",
    "largest_access",
    "local_access",
    "requests_of",
]
