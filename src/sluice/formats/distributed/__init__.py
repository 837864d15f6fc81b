"""Files of torch.distributed.checkpoint: its metadata, the items in its data files, and how chunks cover tensors.

``sluice.checkpoint.distributed`` opens a directory of them.
"""
