"""The GGUF format of llama.cpp.

In: a ``Source`` and ``Limits``. Out: an ``Index`` of every tensor, without tensor data.

Start with ``reader.GgufFormat``, whose module has the specification; ``header`` walks over metadata and tensor
descriptions, ``types`` lists the types of tensors. ``sluice.engine.packs`` decodes the quantized ones.
"""
