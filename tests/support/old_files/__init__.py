"""Checkpoints of old torch, written by ``tools/write_old_files.py``."""
