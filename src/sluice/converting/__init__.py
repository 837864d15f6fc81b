"""From an open checkpoint to files: what ``sluice.convert`` takes, which files it writes, and the stream between.

In: an open checkpoint and a ``Conversion``. Out: files in the requested form.

Start with ``tensor_files`` or ``torch_files``.
"""
