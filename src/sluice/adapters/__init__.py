"""Adapters merged into base weights, with the computations of peft 0.21: a checkpoint computed when it is read."""
