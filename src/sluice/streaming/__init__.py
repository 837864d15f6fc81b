"""Runs models whose weights do not fit into memory: each block's weights are read just before they are used.

In: a module without memory, an open checkpoint and a number of bytes. Out: a ``Stream``; until it is closed, calls of
the module read what they need.

``job`` decides, ``window`` holds what is in memory, ``calls`` predicts what is used next, and ``stream`` puts weights
into the module and takes them out.
"""
