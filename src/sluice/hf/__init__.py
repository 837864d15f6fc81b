"""Hugging Face models: ``from_pretrained`` with sluice reading the weights.

In: a local model directory. Out: a model of transformers. Only this package uses transformers and its private loading
code, which is imported when ``from_pretrained``, the entry function, is called.
"""

from sluice.hf._loading import from_pretrained

__all__ = ["from_pretrained"]
