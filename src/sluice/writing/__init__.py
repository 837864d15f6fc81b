"""Writers of checkpoint files, which use a fixed amount of memory.

In: ``Contents``, tensors of an object or of a checkpoint, and a ``SaveJob``. Out: files that are complete or absent.

Entry functions: ``save.save_state`` and ``formats.write_contents``. ``durable`` replaces files atomically, ``uploads``
writes to object stores.
"""
