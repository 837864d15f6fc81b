"""The safetensors format.

In: a ``Source`` and ``Limits``. Out: an ``Index`` of every tensor, without tensor data.

Start with ``reader.SafetensorsFormat``, whose module has the specification; ``header`` parses the JSON header.
"""
