"""Atomic replacement of files and directories: hidden names, syncs, renames, locks and direct writes.

In: bytes and a path. Out: the path refers to the complete new content, or to the unchanged old one.

Entry class and function: ``replacement.Replacement`` and ``directories.publish_set``.
"""
