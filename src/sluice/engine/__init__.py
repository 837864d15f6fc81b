"""Runs plans: threads, staging buffers, copies, and the memory that they end in.

In: a ``LoadPlan``, the sources and the target memory. Out: filled targets and what it took. The engine decides
nothing except when to step down to the next permitted read method.

Start with ``session``.
"""
