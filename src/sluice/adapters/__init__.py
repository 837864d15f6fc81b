"""Adapters that are merged into base weights: configurations, names of tensors, and the computations of peft 0.21."""
