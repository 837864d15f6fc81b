"""Hugging Face models: ``from_pretrained`` with sluice reading the weights, and GGUF files for models of transformers.

In: a local model directory, the name of a model of the hub, or a GGUF file. Out: a model of transformers, a stream of
one, or rules. Only this package uses transformers and its private loading code, which is imported when
``from_pretrained`` or ``stream``, the entry functions, are called.
"""

from sluice.hf._gguf import gguf_rules
from sluice.hf._loading import from_pretrained, stream

__all__ = ["from_pretrained", "gguf_rules", "stream"]
