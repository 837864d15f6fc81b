"""Facts about the machine, collected once before planning: memory, control groups, file systems, page cache, peaks.

In: the sources of a load. Out: ``MachineFacts``. Nothing here imports torch.

Start with ``facts.machine_facts``.
"""
