"""Files of a torch.distributed.checkpoint (DCP) directory: its metadata and the items in its data files.

In: the ``Source`` of each file and ``Limits``. Out: the tensors, chunks and values that the metadata describes, and the
index of each item. ``sluice.checkpoint.distributed`` combines them to one index.

Start with ``metadata.read_metadata``; ``items`` parses the data files.
"""
