"""Sources of bytes: local files, memory, and ranges of either, behind one small protocol.

In: a path, a URL or a file object. Out: a ``Source``, which reads any range from any thread and detects changes.

Start with ``opening.find_place`` and ``protocol.Source``.
"""
