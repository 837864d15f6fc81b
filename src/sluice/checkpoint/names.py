"""Names that say what a file is, for the modules that open one file and for those that open several."""

from __future__ import annotations

__all__ = ["METADATA_FILE", "PLACES"]

#: File that describes a torch.distributed.checkpoint directory.
METADATA_FILE = ".metadata"

#: Key of the metadata of a shard that torch's ``HuggingFaceStorageWriter`` wrote: the places of its chunks in their
#: tensors (``chunks``).
PLACES = "DCP_SHARDING_INFO"
