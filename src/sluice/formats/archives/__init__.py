"""Archive containers of checkpoints: zip directories and records, and tar files.

In: a ``Source`` and ``Limits``. Out: the central directory of a zip archive, and the offset, bytes and CRC-32 of its
records; for a tar archive, its members. Nothing is extracted.

Start with ``zip_directory.read_directory``; ``zip_records`` reads local headers, and ``tar`` those of tar files.
"""
