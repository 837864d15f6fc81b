"""Files that the ranks of a process group write together: each rank writes the elements that it holds.

In: a state with DTensors on every rank, and a path. Out: files that are complete or absent, for all ranks. No rank ever
holds a whole tensor.

The pure part is ``division``: which tensors the files hold, and which rank writes which part of each. Start with
``save.save_by_ranks``.
"""
