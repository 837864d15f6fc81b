"""Pure planning of a load: ranges, order and methods of reads, final memory, predicted peaks, limits.

In: requests for tensors and ``MachineFacts``. Out: a frozen ``LoadPlan``. Pure functions: no I/O, no torch.

Start with ``planner.plan_load``; ``memory_layout`` lays out final memory, ``threads`` counts readers and buffers,
``budget`` checks limits.
"""
