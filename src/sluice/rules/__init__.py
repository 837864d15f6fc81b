r"""Rules: changes to the names and tensors of a checkpoint before they are matched with a model.

A list of rules converts the checkpoint of one architecture for another while it is read, within the memory contract:
transposes, splits and concatenations are copies between strided boxes, so that no tensor is held twice.

    >>> from sluice import rules
    >>> gpt2 = [
    ...     rules.transpose("h.*.attn.c_attn.weight"),
    ...     rules.split("h.*.attn.c_attn.weight", into=("blocks.*.q.weight", "blocks.*.k.weight", "blocks.*.v.weight")),
    ...     rules.rename("h.*.ln_1.weight", "blocks.*.norm1.scale"),
    ... ]
    >>> print(gpt2[1])
    split('h.*.attn.c_attn.weight')

**Patterns.** Text matches whole names. ``*`` in it matches one component (``h.*.bias``), ``**`` any text, including
dots and nothing (``module.**``). A new name repeats the wildcards in order. A compiled regular
expression works wherever a pattern does, and new names then use its groups: ``rename(re.compile(r"h\.(\d+)\.(.*)"),
r"blocks.\1.\2")``.

**Order.** The names are those of the chosen part of the checkpoint (``key=``), after ``rename=``. Rules are applied one
after the other, each to the result of the one before it. The final result is matched with the model.

**Errors.** A rule that matches nothing, two tensors with one name, and a tensor to which a rule cannot be applied are
each a ``MismatchError``, before anything is read. ``optional=True`` lets a rule match nothing. Shapes that still differ
from the model's are errors as without rules.

**Values.** Products and sums come first, in the order of the rules and in the dtype of the file, and the cast comes
last, once: ``(tensor * factor).to(dtype)``.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import index
from typing import TYPE_CHECKING

from sluice._dtypes import ITEM_BYTES, parse_dtype
from sluice.entries.patterns import NamePattern, compile_pattern, compile_template
from sluice.entries.rules import EachRule, Rule
from sluice.rules import _kinds as kinds
from sluice.rules import _megatron as ranks

if TYPE_CHECKING:
    import torch

__all__ = [
    "NamePattern",
    "Rule",
    "add",
    "cast",
    "concatenate",
    "copy",
    "drop",
    "megatron",
    "permute",
    "rename",
    "reshape",
    "resize",
    "scale",
    "split",
    "stack",
    "transpose",
]


def rename(pattern: NamePattern, new: str, *, optional: bool = False) -> Rule:
    """Rename tensors.

    Args:
        pattern: Their names; see the module's description of patterns.
        new: The new name, with the wildcards of the pattern in their order.
        optional: Whether it may match nothing.

    Example:
        >>> prefix = rename("transformer.**", "**")
        >>> exact = rename("wte.weight", "tok_emb.weight")
    """
    return kinds.renaming(pattern, new, copy=False, optional=optional)


def copy(pattern: NamePattern, new: str, *, optional: bool = False) -> Rule:
    """Give tensors a second name, such as the head of a model that does not tie it to the embedding.

    The bytes are read once.

    Example:
        >>> head = copy("wte.weight", "out_head.weight")
    """
    return kinds.renaming(pattern, new, copy=True, optional=optional)


def drop(pattern: NamePattern, *, optional: bool = False) -> Rule:
    """Leave tensors out.

    Example:
        >>> masks = drop("h.*.attn.bias", optional=True)
    """
    return EachRule(kind="drop", pattern=pattern, effect=kinds.dropped, optional=optional)


def transpose(pattern: NamePattern, dim0: int = 0, dim1: int = 1, *, optional: bool = False) -> Rule:
    """Swap two dimensions, as ``tensor.transpose(dim0, dim1)``.

    Example:
        >>> conv1d = transpose("h.*.mlp.c_fc.weight")
    """
    return kinds.changing("transpose", pattern, kinds.transposed, index(dim0), index(dim1), optional=optional)


def permute(pattern: NamePattern, dims: Sequence[int], *, optional: bool = False) -> Rule:
    """Reorder dimensions, as ``tensor.permute(dims)``.

    Example:
        >>> from_tensorflow = permute("conv.*.kernel", (3, 2, 0, 1))
    """
    return kinds.changing("permute", pattern, kinds.permuted, tuple(map(index, dims)), optional=optional)


def reshape(pattern: NamePattern, shape: Sequence[int], *, optional: bool = False) -> Rule:
    """Reshape tensors, as ``tensor.reshape(shape)``; one size may be -1.

    If strides cannot express the result, it is copied box by box; more than 4,096 boxes are an error.

    Example:
        >>> patches = reshape("patch_embed.weight", (768, 3, 16, 16))
    """
    shape = tuple(map(index, shape))
    if shape.count(-1) > 1 or any(size < -1 for size in shape):
        raise ValueError(f"shape {list(shape)} must hold sizes, and -1 at most once")
    return kinds.changing("reshape", pattern, kinds.reshaped, shape, optional=optional)


def split(
    pattern: NamePattern,
    into: Sequence[str],
    *,
    dim: int = 0,
    sizes: Sequence[int] | None = None,
    optional: bool = False,
) -> Rule:
    """Split tensors along a dimension and name the pieces.

    Args:
        pattern: Names of the tensors.
        into: Name of each piece, with the wildcards of the pattern.
        dim: Dimension to split.
        sizes: Size of each piece in it; None for equal ones.
        optional: Whether it may match nothing.

    Example:
        >>> grouped = split("layers.*.qkv.weight", ("layers.*.q.weight", "layers.*.kv.weight"), sizes=(4096, 2048))
    """
    if isinstance(into, str):
        raise TypeError("into must be a sequence of names, one for each piece, not a str")
    into, sizes = tuple(into), None if sizes is None else tuple(map(index, sizes))
    for new in into:
        compile_template(new, compile_pattern(pattern))
    if not into or (sizes is not None and len(sizes) != len(into)):
        raise ValueError("split needs a name for each piece, and a size for each name if sizes are given")
    if sizes is not None and min(sizes) < 0:
        raise ValueError("sizes cannot be negative")
    arguments = (pattern, into, index(dim), sizes)
    return EachRule(kind="split", pattern=pattern, effect=kinds.split, arguments=arguments, optional=optional)


def concatenate(
    patterns: NamePattern | Sequence[NamePattern], into: str, *, dim: int = 0, optional: bool = False
) -> Rule:
    """Concatenate tensors along a dimension, as ``torch.cat``.

    Args:
        patterns: Names of the tensors in order. Several patterns, whose wildcards distinguish the groups; or one
            pattern with a ``#``, which matches the numbers from 0 on.
        into: Name of the result, with the wildcards of the patterns, without the ``#``.
        dim: Dimension along which they are joined.
        optional: Whether it may match nothing.

    Example:
        >>> fused = concatenate(("blocks.*.q.weight", "blocks.*.k.weight"), "h.*.qk.weight", dim=1)
    """
    return _join(patterns, into, dim, optional=optional, new_dim=False)


def stack(patterns: NamePattern | Sequence[NamePattern], into: str, *, dim: int = 0, optional: bool = False) -> Rule:
    """Stack tensors along a new dimension, as ``torch.stack``; see ``concatenate``.

    Example:
        >>> experts = stack("layers.*.experts.#.up.weight", "layers.*.experts.up")
    """
    return _join(patterns, into, dim, optional=optional, new_dim=True)


def cast(pattern: NamePattern, dtype: torch.dtype | str, *, optional: bool = False) -> Rule:
    """Set the dtype of finished tensors, regardless of ``dtype=`` and the model; the last such rule counts.

    Args:
        pattern: Names of the tensors.
        dtype: A ``torch.dtype`` or its name. Unlike ``dtype=``, this also applies to integers.
        optional: Whether it may match nothing.

    Example:
        >>> norms = cast("**norm*.scale", "float32")
    """
    name = parse_dtype(dtype, auto=False)
    if name not in ITEM_BYTES:
        raise ValueError(f"{name!r} is not a dtype of strided tensors")
    return kinds.changing("cast", pattern, kinds.with_cast, name, optional=optional)


def scale(pattern: NamePattern, factor: float, *, optional: bool = False) -> Rule:
    """Multiply tensors by a number: ``(tensor * factor).to(dtype)``, with the product in the dtype of the file.

    As torch does, half-precision products are computed in float32 and rounded once. Only float16, bfloat16, float32 and
    float64 can be multiplied.

    Example:
        >>> folded = scale("layers.*.q.weight", 128**-0.5)
    """
    return kinds.changing("scale", pattern, kinds.computed, "mul", float(factor), optional=optional)


def add(pattern: NamePattern, number: float, *, optional: bool = False) -> Rule:
    """Add a number to every element: ``(tensor + number).to(dtype)``, with the sum in the dtype of the file.

    The same dtypes as for ``scale``.

    Example:
        >>> gemma_from_gguf = add("**_norm.weight", -1.0)
    """
    return kinds.changing("add", pattern, kinds.computed, "add", float(number), optional=optional)


def resize(pattern: NamePattern, rows: int, *, fill: float = 0.0, dim: int = 0, optional: bool = False) -> Rule:
    """Cut or pad tensors to a number of rows, such as for a larger or smaller vocabulary.

    Args:
        pattern: Names of the tensors.
        rows: New size of the dimension.
        fill: Value of new elements, rounded to the dtype of the file.
        dim: Dimension to resize.
        optional: Whether it may match nothing.

    Example:
        >>> rounded_up = resize("tok_emb.weight", 50304)
    """
    if rows < 0:
        raise ValueError(f"a tensor cannot have {rows} rows")
    return kinds.changing("resize", pattern, kinds.resized, index(rows), index(dim), fill, optional=optional)


def megatron(layout: ranks.Layout, *, heads: int | None = None, vocabulary: int | None = None) -> Rule:
    """Join the tensors of Megatron's tensor and pipeline ranks, and name them as another library does.

    It takes the names of a directory of ``mp_rank_*`` directories, and of ``.nemo`` archives with those: rows and
    columns are concatenated, gates and queries regrouped, and the layers of pipeline stages counted on. Of what every
    rank repeats, the first rank's counts. Other names are left out.

    Args:
        layout: Names of the result: ``"core"`` for those of a whole model of Megatron-core, ``"gpt"`` for GPT-2 and
            ``"llama"`` for Llama in transformers.
        heads: Attention heads of the whole model, which the files do not tell; not needed for ``"core"``. The number of
            groups follows from shapes.
        vocabulary: Rows of embeddings without Megatron's padding; None keeps it.

    Example:
        >>> joined = megatron("llama", heads=32, vocabulary=32000)
    """
    if layout not in ("core", "gpt", "llama"):
        raise ValueError(f"layout is {layout!r}; write 'core', 'gpt' or 'llama'")
    if layout != "core" and (heads is None or heads < 1):
        raise ValueError(f"layout {layout!r} needs heads=, the number of attention heads of the model")
    if vocabulary is not None and vocabulary < 1:
        raise ValueError(f"vocabulary is {vocabulary}; write the number of rows, or None to keep them all")
    return ranks.MegatronRule(pattern=ranks.PREFIX, layout=layout, heads=heads, vocabulary=vocabulary)


def _join(patterns: NamePattern | Sequence[NamePattern], into: str, dim: int, *, optional: bool, new_dim: bool) -> Rule:
    several = tuple(patterns) if isinstance(patterns, Sequence) and not isinstance(patterns, str) else (patterns,)
    return kinds.JoinRule(
        pattern=several[0] if several else "",
        patterns=several,
        into=into,
        dim=index(dim),
        new_dim=new_dim,
        optional=optional,
    )
