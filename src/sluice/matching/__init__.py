"""Names against names: which part of a checkpoint is the state dict of a model, and which entry fills which tensor.

In: the tree of an index and the outline of a module or optimizer. Out: a ``Match``, or one error with every problem.
Pure; torch is not imported.

Start with ``selection.select``, then ``match.match``.
"""
