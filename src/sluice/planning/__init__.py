"""Planning: ranges, order and method of reads, layout of final memory, predicted peaks, and limits.

In: requests for tensors and ``MachineFacts``. Out: a frozen ``LoadPlan``. Pure functions: no I/O, no torch.

Start with ``planner.plan_load``; ``memory_layout`` lays out final memory, ``budget`` checks limits.
"""
