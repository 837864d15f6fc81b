"""Follow the code that ``load_state_dict`` runs, for a state dict whose tensors are not read.

- Pre-hooks, overrides of ``_load_from_state_dict`` and an override of ``load_state_dict`` of the module itself are run
  on a copy with symbolic tensors; see ``custom_loaders``. The ``_load_from_state_dict`` of torch's norms is known
  (``Slot.added_in``), and ``nn.Module.load_state_dict`` never calls that of its children.
- Lazy modules materialise their tensors in a pre-hook. That hook is skipped: their tensors are materialised when they
  are filled.
- Hooks see extra state as plain data; ``restore_extra_state`` passes it to the modules after their tensors are in
  place.
- Post-hooks of the modules whose ``load_state_dict`` is called run unchanged, at the end.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping

from torch import nn

from sluice.modules.adapters import adapter_loader
from sluice.modules.load_hooks import Followed, has_custom_loader, pre_hooks
from sluice.records import Entry

__all__ = ["follow_loading"]


def follow_loading(
    module: nn.Module,
    entries: Mapping[str, Entry],
    extra_state: Mapping[str, object] | None = None,
    *,
    versions: Mapping[str, int] | None = None,
    strict: bool = True,
    ignore_mismatched: bool = False,
) -> Followed:
    """Return the state dict that remains after the code that ``module.load_state_dict`` runs.

    Args:
        module: The module to load into; it is not changed.
        entries: The state dict, by names in the module.
        extra_state: Its extra state, by the same names.
        versions: Version of each module's state by the module's name.
        strict: Argument of ``load_state_dict``.
        ignore_mismatched: Whether a name of a different shape is accepted by an own ``load_state_dict``.
    """
    extra_state, versions = extra_state or {}, versions or {}
    own = type(module).load_state_dict is not nn.Module.load_state_dict or "load_state_dict" in vars(module)
    loader = adapter_loader(module, entries, strict=strict) if "peft" in sys.modules and not own else None
    if not (own or loader or any(has_custom_loader(part) or any(pre_hooks(part)) for part in module.modules())):
        return Followed(entries=dict(entries), extra_state=dict(extra_state), strict=strict)
    from sluice.modules.custom_loaders import follow_code, own_load_state_dict  # rarely needed

    return follow_code(
        module,
        entries,
        extra_state,
        versions=versions,
        loader=own_load_state_dict(module, strict=strict) if own else loader,
        strict=strict,
        ignore_mismatched=ignore_mismatched,
    )
