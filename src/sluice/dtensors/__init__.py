"""DTensors of torch.distributed: which part of each this rank holds, its local memory, and DTensors of new memory.

In: a tensor. Out: records of ``sharding``, its local tensor, or a DTensor that is divided like another one. Nothing
here communicates. Start with ``description.sharding_of``.
"""
