"""One finished copy of a checkpoint for all processes of a host, in shared memory.

In: an open checkpoint and what is to be done to it. Out: a ``SharedCopy``, which is a source that loads map.

Entry function: ``copies.find_or_build``.
"""
