"""An inert unpickler: it runs the opcodes that checkpoints use and never imports or calls the globals in a file.

In: the bytes of a pickle, or its offset in a ``Source``, and an ``Allowlist`` of globals. Out: plain values, and the
objects that the allowlist builds.

Start with ``unpickler.Unpickler``, or ``unpickle_at`` for a pickle of unknown length; ``machine`` has the state,
``opcodes`` the handlers, and ``tensor_opcodes`` a fast path for tensors.
"""
