"""Files written by ``torch.save``: zip archives (``zip.TorchZip``) and what came before torch 1.6 (``legacy.Legacy``).

Both hold a pickled object whose tensors refer to storages. ``root`` reads that object; ``objects``, ``values`` and
``composites`` rebuild what its pickle names, as records.
"""
