"""Pure functions on the records of an index: walk its tree, look up a key, slice, and assemble tensors from tensors.

In: an ``Index`` or an ``Entry``. Out: other entries; no tensor data is read and torch is not imported.

Start with ``tree.walk``; ``lookup.subtree`` resolves a key, ``slicing.slice_entry`` indexes, ``assembly`` joins.
"""
