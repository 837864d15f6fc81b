"""Which part of a tensor each rank holds: pure functions of mesh shape, coordinate and placements; no torch.

In: how a tensor is divided over a device mesh, as ``Sharding`` records. Out: the region of a rank, as intervals of
indices for each dimension. Start with ``regions.region_of``.
"""
