"""Files written by ``torch.save``: zip archives, and the legacy layout from before torch 1.6.

In: a ``Source`` and ``Limits``. Out: an ``Index`` of the object in the file, without tensor data.

Start with ``zip_format.TorchZipFormat`` or ``legacy_format.TorchLegacyFormat``. Both hold one pickled object whose
tensors refer to storages by key. ``allowlist``, ``plain_values`` and ``composites`` define which globals the pickle may
name and rebuild tensors as records; ``tree_limits`` checks the result.
"""
