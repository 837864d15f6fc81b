"""Conversions: checkpoint files to files of another format, dtype or naming, through a fixed amount of memory.

In: an open checkpoint and a ``Conversion``. Out: files that are complete or absent, and a ``Written`` record.

Entry functions: ``tensor_files.convert_to_safetensors`` and ``convert_to_directory``, ``torch_files.convert_to_torch``
and ``convert_to_parameters``.
"""
