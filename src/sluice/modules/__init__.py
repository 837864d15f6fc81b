"""What an ``nn.Module`` needs: collect its tensors, follow its load hooks, initialise, and swap finished tensors in.

In: a module, and later the tensors for it. Out: its outline as records; afterwards the module, filled.

Start with ``collect.collect`` and ``install.install``.
"""
