"""Decisions of the ranks of a process group: whether all of them can load or save, and whether all of them have.

In: the process group that torch.distributed has, and the outcome of each rank as a value. Out: one verdict that every
rank gets, with the failures of all ranks. Start with ``agreement.Agreement``.
"""
