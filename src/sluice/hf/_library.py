"""Imports of transformers, public and private; the only module that imports it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

__all__ = ["VERSIONS", "bitsandbytes_operations", "find_library"]

#: Supported releases of transformers: the first, and the first unsupported one.
VERSIONS = ((5, 20), (5, 24))


def find_library() -> Any:
    """Import transformers and the private functions that sluice uses.

    Raises:
        ImportError: It is not installed, or its version is not supported.
    """
    (*_, first), (*_, end) = VERSIONS
    advice = f"pip install 'sluice[hf]' installs transformers 5.{first} or later, below 5.{end}"
    try:
        import transformers
    except ImportError as error:
        raise ImportError(f"sluice.hf needs transformers: {advice}") from error
    version = tuple(int(part) for part in transformers.__version__.split(".")[:2])
    if not VERSIONS[0] <= version < VERSIONS[1]:
        raise ImportError(f"sluice.hf does not support transformers {transformers.__version__}: {advice}")
    try:
        from transformers import initialization, modeling_utils
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import (
            WeightConverter,
            WeightRenaming,
            dot_natural_key,
            rename_source_key,
        )
        from transformers.monkey_patching import apply_patches, patch_output_recorders
        from transformers.quantizers.auto import get_hf_quantizer
    except ImportError as error:
        raise ImportError(
            f"transformers {transformers.__version__} lacks a function that sluice.hf uses: {advice}"
        ) from error
    return SimpleNamespace(
        transformers=transformers,
        PreTrainedModel=modeling_utils.PreTrainedModel,
        local_torch_dtype=modeling_utils.local_torch_dtype,
        no_tie_weights=initialization.no_tie_weights,
        get_model_conversion_mapping=get_model_conversion_mapping,
        WeightConverter=WeightConverter,
        WeightRenaming=WeightRenaming,
        dot_natural_key=dot_natural_key,
        rename_source_key=rename_source_key,
        apply_patches=apply_patches,
        patch_output_recorders=patch_output_recorders,
        get_hf_quantizer=get_hf_quantizer,
    )


def bitsandbytes_operations() -> tuple[Any, Any]:
    """Import, with bitsandbytes, the operations that make weights of saved ones in 4 and in 8 bits."""
    from transformers.integrations.bitsandbytes import Bnb4bitDeserialize, Bnb8bitDeserialize

    return Bnb4bitDeserialize, Bnb8bitDeserialize
