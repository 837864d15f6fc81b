"""An inert unpickler: it runs the opcodes that checkpoints use and never imports or calls what a file names.

In: the bytes of a pickle and a table of allowed globals. Out: plain values and the caller's stand-ins.

Start with ``unpickler``; ``machine`` has the state, ``opcodes`` has one function per opcode.
"""
