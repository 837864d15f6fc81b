"""Imports of transformers, public and private; the only module that imports it."""

from __future__ import annotations

from importlib import import_module
from types import SimpleNamespace
from typing import Any

__all__ = ["VERSIONS", "bitsandbytes_operations", "find_library"]

#: Supported releases of transformers: the first, and the first unsupported one.
VERSIONS = ((5, 20), (5, 24))

#: Classes and functions that sluice uses, by their modules.
_NAMES = {
    "transformers.modeling_utils": ("PreTrainedModel", "local_torch_dtype"),
    "transformers.initialization": ("no_tie_weights",),
    "transformers.conversion_mapping": ("get_model_conversion_mapping",),
    "transformers.core_model_loading": ("WeightConverter", "WeightRenaming", "dot_natural_key", "rename_source_key"),
    "transformers.monkey_patching": ("apply_patches", "patch_output_recorders"),
    "transformers.quantizers.auto": ("get_hf_quantizer",),
}


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
        found = {name: getattr(import_module(module), name) for module, names in _NAMES.items() for name in names}
    except (ImportError, AttributeError) as error:
        raise ImportError(
            f"transformers {transformers.__version__} lacks a function that sluice.hf uses: {advice}"
        ) from error
    return SimpleNamespace(transformers=transformers, **found)


def bitsandbytes_operations() -> tuple[Any, Any]:
    """Import, with bitsandbytes, the operations that make weights of saved ones in 4 and in 8 bits."""
    from transformers.integrations.bitsandbytes import Bnb4bitDeserialize, Bnb8bitDeserialize

    return Bnb4bitDeserialize, Bnb8bitDeserialize
