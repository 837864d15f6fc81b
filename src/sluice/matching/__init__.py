"""Match names: find the state dict of a model in a checkpoint, and the entry that fills each tensor.

In: the tree of an index and the outline of a module or optimizer. Out: a ``Match`` or ``MatchedState``, or one error
with every problem. Pure; no torch.

Start with ``selection.select``, then ``match.match``.
"""
