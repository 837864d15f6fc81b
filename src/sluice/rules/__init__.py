r"""Rules: what the tensors of a checkpoint become before they are matched with a model.

A list of rules turns one architecture's checkpoint into another one's, while it is read and inside the memory contract:
transposes, splits and concatenations are copies between strided boxes, so that nothing is held twice.

    >>> from sluice import rules
    >>> gpt2 = [
    ...     rules.transpose("h.*.attn.c_attn.weight"),
    ...     rules.split("h.*.attn.c_attn.weight", into=("blocks.*.q.weight", "blocks.*.k.weight", "blocks.*.v.weight")),
    ...     rules.rename("h.*.ln_1.weight", "blocks.*.norm1.scale"),
    ... ]
    >>> print(gpt2[1])
    split('h.*.attn.c_attn.weight')

**Patterns.** A text matches whole names. ``*`` in it stands for one component (``h.*.bias``), ``**`` for anything,
dots and nothing included (``module.**``). A new name repeats the wildcards in their order. A compiled regular
expression works wherever a pattern does, and new names then use its groups: ``rename(re.compile(r"h\.(\d+)\.(.*)"),
r"blocks.\1.\2")``.

**Order.** The names are those of the chosen part of the checkpoint (``key=``), after ``rename=``. Rules are applied one
after the other, each to all tensors that the ones before it left. What comes out is matched with the model.

**Errors.** A rule that matches nothing, two tensors of one name and a tensor that a rule cannot be applied to are each
a ``MismatchError``, before anything is read. ``optional=True`` lets a rule match nothing. Shapes that still differ from
the model's are errors as ever.

**Values.** Elements are multiplied first, in the dtype of the file, and cast last, once, whatever the order of the
rules: ``(tensor * factor).to(dtype)``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from sluice._dtypes import dtype_name
from sluice.rules._apply import Rule
from sluice.rules._kinds import (
    Cast,
    Copy,
    Drop,
    Join,
    Permute,
    Rename,
    Reshape,
    Resize,
    Scale,
    Split,
    Transpose,
)
from sluice.rules._patterns import NamePattern

if TYPE_CHECKING:
    import torch

__all__ = [
    "NamePattern",
    "Rule",
    "cast",
    "concatenate",
    "copy",
    "drop",
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
    """Give tensors another name.

    Args:
        pattern: Their names; see the module's description of patterns.
        new: The new name, with the wildcards of the pattern in their order.
        optional: Whether it may match nothing.

    Example:
        >>> prefix = rename("transformer.**", "**")
        >>> exact = rename("wte.weight", "tok_emb.weight")
    """
    return Rename(pattern=pattern, new=new, optional=optional)


def copy(pattern: NamePattern, new: str, *, optional: bool = False) -> Rule:
    """Give tensors a second name: the head of a model that does not tie it to the embedding, out of one that does.

    The bytes are read once.

    Example:
        >>> head = copy("wte.weight", "out_head.weight")
    """
    return Copy(pattern=pattern, new=new, optional=optional)


def drop(pattern: NamePattern, *, optional: bool = False) -> Rule:
    """Leave tensors out.

    Example:
        >>> masks = drop("h.*.attn.bias", optional=True)
    """
    return Drop(pattern=pattern, optional=optional)


def transpose(pattern: NamePattern, dim0: int = 0, dim1: int = 1, *, optional: bool = False) -> Rule:
    """Swap two dimensions, as ``tensor.transpose(dim0, dim1)``.

    Example:
        >>> conv1d = transpose("h.*.mlp.c_fc.weight")
    """
    return Transpose(pattern=pattern, dim0=dim0, dim1=dim1, optional=optional)


def permute(pattern: NamePattern, dims: Sequence[int], *, optional: bool = False) -> Rule:
    """Put the dimensions in another order, as ``tensor.permute(dims)``.

    Example:
        >>> from_tensorflow = permute("conv.*.kernel", (3, 2, 0, 1))
    """
    return Permute(pattern=pattern, dims=tuple(dims), optional=optional)


def reshape(pattern: NamePattern, shape: Sequence[int], *, optional: bool = False) -> Rule:
    """Give tensors another shape, as ``tensor.reshape(shape)``; one size may be -1.

    What strides cannot express is copied box by box; a tensor that would take more than 4,096 boxes is an error.

    Example:
        >>> patches = reshape("patch_embed.weight", (768, 3, 16, 16))
    """
    return Reshape(pattern=pattern, shape=tuple(shape), optional=optional)


def split(
    pattern: NamePattern,
    into: Sequence[str],
    *,
    dim: int = 0,
    sizes: Sequence[int] | None = None,
    optional: bool = False,
) -> Rule:
    """Cut tensors along a dimension and name the pieces.

    Args:
        pattern: Names of the tensors.
        into: Name of each piece, with the wildcards of the pattern.
        dim: The dimension that is cut.
        sizes: Size of each piece in it; None for equal ones.
        optional: Whether it may match nothing.

    Example:
        >>> grouped = split("layers.*.qkv.weight", ("layers.*.q.weight", "layers.*.kv.weight"), sizes=(4096, 2048))
    """
    return Split(
        pattern=pattern,
        into=_names(into),
        dim=dim,
        sizes=None if sizes is None else tuple(sizes),
        optional=optional,
    )


def concatenate(
    patterns: NamePattern | Sequence[NamePattern], into: str, *, dim: int = 0, optional: bool = False
) -> Rule:
    """Put tensors one after the other along a dimension, as ``torch.cat``.

    Args:
        patterns: Names of the tensors in their order. Several patterns, whose wildcards tell the groups apart; or one
            pattern with a ``#``, which stands for the numbers from 0 on.
        into: Name of the whole, with the wildcards of the patterns, without the ``#``.
        dim: The dimension along which they lie.
        optional: Whether it may match nothing.

    Example:
        >>> fused = concatenate(("blocks.*.q.weight", "blocks.*.k.weight"), "h.*.qk.weight", dim=1)
    """
    return _join(patterns, into, dim, optional=optional, new_dim=False)


def stack(patterns: NamePattern | Sequence[NamePattern], into: str, *, dim: int = 0, optional: bool = False) -> Rule:
    """Put tensors one after the other along a new dimension, as ``torch.stack``; see ``concatenate``.

    Example:
        >>> experts = stack("layers.*.experts.#.up.weight", "layers.*.experts.up")
    """
    return _join(patterns, into, dim, optional=optional, new_dim=True)


def cast(pattern: NamePattern, dtype: torch.dtype | str, *, optional: bool = False) -> Rule:
    """Decide the dtype of finished tensors, whatever ``dtype=`` and the model say; the last such rule counts.

    Args:
        pattern: Names of the tensors.
        dtype: A ``torch.dtype`` or its name. Unlike ``dtype=``, this also applies to integers.
        optional: Whether it may match nothing.

    Example:
        >>> norms = cast("**norm*.scale", "float32")
    """
    return Cast(pattern=pattern, dtype=dtype if isinstance(dtype, str) else dtype_name(dtype), optional=optional)


def scale(pattern: NamePattern, factor: float, *, optional: bool = False) -> Rule:
    """Multiply tensors by a number: ``(tensor * factor).to(dtype)``, with the product in the dtype of the file.

    As torch does, half-precision products are computed in float32 and rounded once. Only float16, bfloat16, float32 and
    float64 can be multiplied.

    Example:
        >>> folded = scale("layers.*.q.weight", 128**-0.5)
    """
    return Scale(pattern=pattern, factor=float(factor), optional=optional)


def resize(pattern: NamePattern, rows: int, *, fill: float = 0.0, dim: int = 0, optional: bool = False) -> Rule:
    """Cut tensors to a number of rows or pad them: a vocabulary that has grown or shrunk.

    Args:
        pattern: Names of the tensors.
        rows: Size of the dimension afterwards.
        fill: What new elements are, rounded to the dtype of the file.
        dim: The dimension.
        optional: Whether it may match nothing.

    Example:
        >>> rounded_up = resize("tok_emb.weight", 50304)
    """
    return Resize(pattern=pattern, size=rows, fill=fill, dim=dim, optional=optional)


def _join(patterns: NamePattern | Sequence[NamePattern], into: str, dim: int, *, optional: bool, new_dim: bool) -> Rule:
    several = tuple(patterns) if isinstance(patterns, Sequence) and not isinstance(patterns, str) else (patterns,)
    return Join(
        pattern=several[0] if several else "",
        patterns=several,
        into=into,
        dim=dim,
        new_dim=new_dim,
        optional=optional,
    )


def _names(into: Sequence[str]) -> tuple[str, ...]:
    if isinstance(into, str):
        raise TypeError("into takes a name for each piece, as a tuple")
    return tuple(into)
