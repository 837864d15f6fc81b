"""Writers of checkpoint files, which use a fixed amount of memory.

In: tensors or their descriptions, and a path. Out: files that are complete or absent.

Entry functions: ``torch_zip.write_torch_zip``, ``safetensors.lay_out_safetensors`` and
``shards.write_model_directory``. ``durable`` replaces files atomically.
"""
