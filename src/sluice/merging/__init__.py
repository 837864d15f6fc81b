"""Merges of several checkpoints: a merge is a checkpoint whose bytes are computed when they are read.

In: a configuration in mergekit's YAML form, or weights by path. Out: an ``OpenCheckpoint`` for every other verb.

Entry function: ``opening.open_merge``.
"""
