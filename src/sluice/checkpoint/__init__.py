"""Which files are one checkpoint, and that checkpoint opened.

In: a path, a file object or a directory. Out: one ``Index`` over all files, with the sources that hold the data.

Start with ``opening.open_path``; ``survey`` decides what a directory is, ``merging`` joins the indexes of its files.
"""
