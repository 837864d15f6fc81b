"""Rules that give the tensors of a GGUF file the names and layouts of a model of transformers.

Names are those of the tables in the package gguf, by architecture. The rules undo the other changes of llama.cpp's
converter: the order of query and key rows (llama), transposes (gpt2), and 1 added to the weights of norms (gemma).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from sluice import rules
from sluice._errors import FormatError, UnsupportedError
from sluice._public import public
from sluice.api.checkpoint import open as open_checkpoint
from sluice.entries.rules import Rule

__all__ = ["gguf_rules"]

#: Architectures of files whose tensors the rules can restore.
_ARCHITECTURES = ("gemma", "gemma2", "gemma3", "gpt2", "llama", "phi3", "qwen2", "qwen3")

#: Prefixes of models with a head, for the names of a model without one.
_BASES = ("", "model.", "transformer.")


@public("sluice.hf")
def gguf_rules(model: Any, source: Any) -> list[Rule]:
    """Return the rules for loading a GGUF file into a model of transformers.

    Args:
        model: The model; it may be on the meta device.
        source: The file, as for ``sluice.open``, or an open checkpoint.

    Returns:
        Rules for ``rules=`` of every function that takes them. Tensors without a counterpart in the model keep their
        names and are reported as unexpected.

    Raises:
        FormatError: It is not a GGUF file, or its metadata lacks the number of heads or blocks.
        ImportError: The package gguf is not installed.
        UnsupportedError: The architecture is none of gemma, gemma2, gemma3, gpt2, llama, phi3, qwen2 and qwen3.

    Example:
        >>> sluice.load_into(model, "model.gguf", rules=sluice.hf.gguf_rules(model, "model.gguf"))
    """
    try:
        from gguf import MODEL_ARCH_NAMES, get_tensor_name_map
    except ImportError as error:
        raise ImportError("gguf_rules needs the package gguf: pip install 'sluice[gguf]'") from error
    with open_checkpoint(source) as checkpoint:
        metadata, path, names = checkpoint.metadata, checkpoint.files[0], set(checkpoint)
    architecture = metadata.get("general.architecture")
    if architecture is None:
        raise FormatError("not a GGUF file of a model", file=path, expected="metadata general.architecture")
    if architecture not in _ARCHITECTURES:
        raise UnsupportedError(
            "the tensors of this architecture cannot be restored by names alone",
            file=path,
            expected=", ".join(_ARCHITECTURES),
            found=architecture,
            advice="Pass rules= of your own: the names and layouts of its tensors are those of llama.cpp.",
        )
    code = next(code for code, name in MODEL_ARCH_NAMES.items() if name == architecture)
    blocks = _number(metadata, f"{architecture}.block_count", path)
    if blocks > len(names):  # the table takes 50 KiB for each
        raise FormatError("the file has fewer tensors than blocks", file=path, found=str(blocks))
    table = get_tensor_name_map(code, blocks)
    renamed = {}
    for name in model.state_dict():
        owner, dot, own = name.rpartition(".")
        found = next((new for base in _BASES if (new := table.get_name(base + owner))), None)
        if found is not None and f"{found}{dot}{own}" in names:
            renamed[f"{found}{dot}{own}"] = name
    restored = _restored(architecture, metadata, path)
    return [*restored, *(rules.rename(old, new) for old, new in renamed.items())]


def _restored(architecture: str, metadata: Mapping[str, str], path: str) -> Iterator[Rule]:
    """Yield the rules that undo the changes of llama.cpp's converter."""
    if architecture == "llama":
        heads = _number(metadata, "llama.attention.head_count", path)
        own = "llama.attention.head_count_kv"  # absent if there are as many as of queries
        key_heads = _number(metadata, own, path) if own in metadata else heads
        width = _number(metadata, "llama.embedding_length", path)
        for tensor, count in (("attn_q", heads), ("attn_k", key_heads)):
            yield from _interleaved(f"blk.*.{tensor}.weight", count, (width,))
            yield from _interleaved(f"blk.*.{tensor}.bias", count, ())
    if architecture == "gpt2":
        for tensor in ("attn_qkv", "attn_output", "ffn_up", "ffn_down"):
            yield rules.transpose(f"blk.*.{tensor}.weight", 0, 1)
    if architecture.startswith("gemma"):
        yield rules.add("**_norm.weight", -1.0)
    yield rules.drop(re.compile(r"rope_(freqs|factors_long|factors_short)\.weight"), optional=True)  # of the config


def _interleaved(pattern: str, heads: int, rest: tuple[int, ...]) -> Iterator[Rule]:
    """Yield the rules that move the even rows of each head before its odd ones."""
    yield rules.reshape(pattern, (heads, -1, 2, *rest), optional=True)
    yield rules.permute(pattern, (0, 2, 1, *range(3, 3 + len(rest))), optional=True)
    yield rules.reshape(pattern, (-1, *rest), optional=True)


def _number(metadata: Mapping[str, str], key: str, path: str) -> int:
    """Return a whole number of the metadata."""
    text = metadata.get(key, "nothing")
    if re.fullmatch(r"\d{1,18}", text) is None:
        raise FormatError(f"the metadata {key} is not a number", file=path, found=text[:200])
    return int(text)
