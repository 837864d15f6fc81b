"""Conversions: checkpoint files to files in a different format, dtype or naming, through a fixed amount of memory.

In: an open checkpoint and a ``SaveJob``, which names a destination. Out: files that are complete or absent, and a
``SaveReport``.

Entry function: ``convert.convert_checkpoint``.
"""
