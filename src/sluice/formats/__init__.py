"""File formats: one package for each, and ``detection.detect``, which recognizes them.

In: a ``Source`` and the ``Limits`` for hostile files. Out: an ``Index`` of every tensor, without tensor data.

Start with ``detection.detect`` and ``protocol.Format``.
"""
