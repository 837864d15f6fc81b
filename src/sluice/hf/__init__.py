"""Hugging Face models; the only package that knows transformers and its private loading code.

transformers is imported when ``from_pretrained`` is called, not before.
"""

from sluice.hf._loading import from_pretrained

__all__ = ["from_pretrained"]
