"""Checkpoints written through a fixed amount of memory, and never half."""
