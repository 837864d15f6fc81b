"""Facts about the machine, asked once before planning: memory, control groups, file systems, the page cache, peaks.

In: the sources of a load. Out: ``MachineFacts``. Nothing here imports torch.

Start with ``facts.machine_facts``.
"""
