"""Checkpoints of DeepSpeed's ZeRO: what the file of each rank holds, and where each parameter lies in their vectors.

Enters: the trees of files that the inert unpickler read. Leaves: places of parameters, for ``checkpoint.zero``.
Start reading at ``states``.
"""
