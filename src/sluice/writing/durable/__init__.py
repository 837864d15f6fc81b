"""Files that are replaced atomically: written under a hidden name, synced, renamed; also locks and direct writes.

Start with ``replacement``.
"""
