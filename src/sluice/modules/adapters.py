"""Adapters of peft that were saved without their base model.

Their files leave out the name of the adapter (``lora_A.weight`` for ``lora_A.default.weight``), and each method of peft
has exceptions of its own. So peft's own ``set_peft_model_state_dict`` is followed (``load_overrides``): it renames and
calls ``load_state_dict(strict=False)``. The caller has to pass ``strict=False`` too, because the rest of the model is
not in the file. A state dict of a whole model has the adapter's names and does not come here.
"""

from __future__ import annotations

import sys
from collections.abc import Collection

from torch import nn

from sluice._errors import MismatchError
from sluice.modules.load_overrides import Loader

__all__ = ["adapter_loader"]


def adapter_loader(module: nn.Module, names: Collection[str], *, strict: bool) -> Loader | None:
    """Return how peft loads a state dict with these names if it holds an adapter of the module alone.

    Raises:
        MismatchError: It does, and ``strict`` asks for the whole model.
    """
    adapter = _adapter_alone(module, names)
    if adapter is None:
        return None
    if strict:
        raise MismatchError(
            f"the checkpoint holds an adapter ({adapter!r}) without its base model: load the base model first, then "
            "the adapter with strict=False"
        )
    load = sys.modules["peft"].set_peft_model_state_dict
    return Loader(
        name="peft.set_peft_model_state_dict", load=lambda copy, state: load(copy, dict(state), adapter_name=adapter)
    )


def _adapter_alone(module: nn.Module, names: Collection[str]) -> str | None:
    """Return the name of the adapter of the module that a file with these names holds without its base model."""
    configurations = getattr(module, "peft_config", None)
    if not isinstance(configurations, dict) or not configurations:
        return None
    adapter: object = getattr(module, "active_adapter", None)
    if not isinstance(adapter, str) or adapter not in configurations:
        adapter = next(iter(configurations))
    own = {name for kind in (module.named_parameters, module.named_buffers) for name, _ in kind(remove_duplicate=False)}
    whole = any(name in own and adapter in name.split(".") for name in names)
    return None if whole or own.issuperset(names) else str(adapter)
