"""Adapters that are merged into base weights: their configurations, the names of their tensors, and the computations.

In: a directory of peft, or a file of peft, kohya, diffusers or ComfyUI. Out: functions that add an adapter to a whole
weight, with the bits of ``merge_and_unload`` of peft 0.21.
"""
