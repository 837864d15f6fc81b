"""Which part of a tensor each rank holds: from mesh shape, coordinate and placements, or of a DTensor.

In: how a tensor is divided over a device mesh, as ``Sharding`` records, or a DTensor. Out: the region of a rank, as
intervals of indices for each dimension. Pure functions, but for ``dtensors``, which alone imports torch and which
does not communicate either. Start with ``regions.region_of``.
"""
