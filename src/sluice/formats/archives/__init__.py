"""Archive containers of checkpoints: zip directories and records, and tar files, which are recognized but refused.

In: a ``Source`` and ``Limits``. Out: the central directory of a zip archive, and the offset, bytes and CRC-32 of its
records; for a tar archive, the error to raise. Nothing is extracted.

Start with ``zip_directory.read_directory``; ``zip_records`` reads local headers, and ``tar`` refuses tar files.
"""
