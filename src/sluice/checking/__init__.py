"""Verification of a checkpoint against its checksums and a manifest, and comparison of two checkpoints.

In: open checkpoints. Out: a ``VerifyReport`` or a ``DiffReport``.

Entry functions: ``verification.verify_checkpoint`` and ``diff.compare_parts``.
"""
