"""Quantizes weights while a model is loaded: each when it has arrived, in pieces of rows where that is equal.

In: a function that quantizes modules, such as ``torchao.quantization.quantize_``. Out: finishers for the engine. The
finished form of each weight is known before anything is read, from the same function on the meta device.

Start with ``weights.find_quantized``.
"""
