"""Verification of a checkpoint against its checksums and manifest, and comparison of two checkpoints.

In: open checkpoints. Out: a ``VerifyReport`` or a ``DiffReport``.

Start with ``verify_run`` and ``diff``.
"""
