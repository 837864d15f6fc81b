"""Finding the files of a checkpoint and opening them.

In: a path, a file object or a directory. Out: one ``Index`` over all files, with the sources that hold the data.

Start with ``opening.classify``; ``survey`` decides the layout of a directory, ``merging`` joins the indexes of files.
"""
