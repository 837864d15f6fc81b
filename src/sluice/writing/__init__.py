"""Writers of checkpoint files, which use a fixed amount of memory.

In: ``Contents``, tensors of an object or of a checkpoint, and a ``SaveJob``. Out: files that are complete or absent.

Entry functions: ``formats.write_contents`` and ``ranks.save.save_by_ranks``. ``durable`` replaces files atomically,
``uploads`` writes to object stores.
"""
