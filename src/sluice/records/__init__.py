"""Frozen records that cross layers, one module for each step of a load, in the order of the steps.

``index``:    contents of a checkpoint: ``Storage``, ``Entry``, ``Part``, ``Opaque``, ``TorchText``, ``Index``
``elements``: stored form of elements and computations on them: ``Elements``, ``Packing``
``targets``:  requested tensors and their final memory: ``Request``, ``Fill``, ``Constant``, ``Target``
``facts``:    files, and properties of them and of the machine: ``FileRecord``, ``FileFacts``, ``MachineFacts``
``plan``:     complete decision of a load: ``Copy``, ``Read``, ``Block``, ``LoadPlan``; growth of memory (``Peaks``) and
              requests for remote files (``RemoteReads``), predicted and measured
``geometry``: arithmetic of shapes, strides and copies

Import the records from this package. They hold no tensors and import no torch. Offsets and sizes are in bytes unless a
name says elements.
"""

from __future__ import annotations

from sluice.records.elements import *
from sluice.records.facts import *
from sluice.records.index import *
from sluice.records.plan import *
from sluice.records.targets import *
