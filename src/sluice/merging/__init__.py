"""Merges of several checkpoints, and deltas over one: checkpoints whose bytes are computed when they are read.

In: a configuration in mergekit's YAML form, weights by path, or a base and deltas. Out: an ``OpenCheckpoint`` for every
other verb.

Entry points: ``opening.open_merge``, ``patched.Patched``, ``patches.write_patch``.
"""
