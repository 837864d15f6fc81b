"""Decides what is read, in which order and how, where it goes, and how much memory that takes.

In: requests for tensors and ``MachineFacts``. Out: a frozen ``LoadPlan``. Every function is pure: no I/O, no torch.

Start with ``planner.plan_load``; ``memory_layout`` lays out final memory, ``budget`` checks limits.
"""
