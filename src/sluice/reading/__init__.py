"""From entries of an open checkpoint to tensors: the path that loads, scans and conversions share.

In: requests and an open checkpoint. Out: finished tensors, or their bytes batch by batch.

Start with ``transfer``.
"""
