"""What bytes mean: one package for each file format, and ``detection.detect``, which tells them apart.

In: a ``Source`` and the ``Limits`` for hostile files. Out: an ``Index`` of every tensor, without tensor data.

Start with ``detection.detect``; ``protocol.Format`` is what a format implements.
"""
