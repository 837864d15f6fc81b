"""The forms of a saved checkpoint, written through a fixed amount of memory.

In: tensors, or a description of them, and a path. Out: files that are complete or absent.

Start with ``torch_zip`` or ``safetensors``; ``durable`` replaces files atomically.
"""
