"""Operations on ``nn.Module``: collect its tensors, follow its load hooks, initialise and install finished tensors.

In: a module, and later its finished tensors. Out: an outline of the module as records; then the filled module.

Start with ``collect.collect`` and ``install.install``.
"""
