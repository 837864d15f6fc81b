"""Follow the code that ``load_state_dict`` runs, for a state dict whose tensors are not read.

- Pre-hooks, overrides of ``_load_from_state_dict`` and an override of ``load_state_dict`` of the module itself are run
  on a copy with symbolic tensors; see ``custom_loaders``. The ``_load_from_state_dict`` of torch's norms is known
  (``Slot.added_in``), and ``nn.Module.load_state_dict`` never calls that of its children.
- Lazy modules materialise their tensors in a pre-hook. That hook is skipped: their tensors are materialised when they
  are filled.
- Hooks see extra state as plain data; ``finish_loading`` passes it to the modules after their tensors are in place.
- Post-hooks of the modules whose ``load_state_dict`` is called run unchanged, at the end.

**Models of peft.** peft moves a layer to ``base_layer`` of a wrapper, and one that is trained as a whole to
``original_module`` and a copy for each adapter. A base checkpoint has the names from before: ``base_names`` finds them,
a copy gets the base weights too, and adapters keep their values.

The files of adapters leave out the name of the adapter (``lora_A.weight`` for ``lora_A.default.weight``), and each
method of peft has exceptions of its own. So peft's own ``set_peft_model_state_dict`` is followed (``custom_loaders``):
it renames and calls ``load_state_dict(strict=False)``. The caller has to pass ``strict=False`` too, because the rest of
the model is not in the file. A state dict of a whole model has the adapter's names and does not come here.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterable, Mapping
from itertools import chain

from msgspec.structs import replace
from torch import nn

from sluice._errors import MismatchError
from sluice.matching.candidates import Candidate
from sluice.matching.match import Outline
from sluice.matching.selection import Selection
from sluice.modules.collect import has_custom_loader
from sluice.modules.load_hooks import Followed, Loader, pre_hooks

__all__ = ["base_names", "base_outline", "follow_loading", "through_wrappers"]

#: Children of wrappers that hold weights of the base model.
_BASE = frozenset({"base_layer", "original_module", "modules_to_save"})

#: Name of the weights of every kind of prompt in the file of an adapter.
_PROMPT = "prompt_embeddings"

#: Part of an adapter of DoRA that is computed from the base weights, and initial values of LoRA that are not.
_MAGNITUDE, _INDEPENDENT = "lora_magnitude_vector", {True, False, "gaussian", "orthogonal"}


def follow_loading(
    module: nn.Module, found: Candidate, *, strict: bool = True, ignore_mismatched: bool = False
) -> Followed:
    """Return the state dict that remains after the code that ``module.load_state_dict`` runs.

    Args:
        module: The module to load into; it is not changed.
        found: The state dict, by names in the module.
        strict: Argument of ``load_state_dict``.
        ignore_mismatched: Whether a name of a different shape is accepted by an own ``load_state_dict``.
    """
    own = type(module).load_state_dict is not nn.Module.load_state_dict or "load_state_dict" in vars(module)
    loader = _adapter_loader(module, found.entries, strict=strict) if "peft" in sys.modules and not own else None
    if not (own or loader or any(has_custom_loader(part) or any(pre_hooks(part)) for part in module.modules())):
        return Followed(entries=found.entries, extra_state=found.extra_state, strict=strict)
    from sluice.modules.custom_loaders import follow_code, own_load_state_dict  # rarely needed

    return follow_code(
        module,
        found,
        loader=own_load_state_dict(module, strict=strict) if own else loader,
        strict=strict,
        ignore_mismatched=ignore_mismatched,
    )


def base_names(module: nn.Module, outline: Outline, names: Iterable[str]) -> dict[str, str | None] | None:
    """Return the name in a base checkpoint of each tensor of a model of peft, and None for those of adapters.

    The result is None if the module is not such a model, or the checkpoint is not one of its base model.

    Args:
        module: The module.
        outline: Its description.
        names: The names of the checkpoint.

    Raises:
        MismatchError: Its adapters were computed from the weights that the base model had before, or have no values.
    """
    root = _base_path(module)
    wrappers = any(map(_is_wrapper, module.modules()))
    if not (root or wrappers):
        return None
    own = [*(name for slot in outline.slots for name in slot.names), *outline.extra_state]
    found = {name: _base_name(module, name, root) for name in own}
    adapters = _adapter_parts(module) | _BASE
    for name in names:
        if found.get(name, name) != name or not adapters.isdisjoint(name.split(".")):
            return None
    if any(_MAGNITUDE in name.split(".") for name in own) or _is_computed(module):
        raise MismatchError(
            "the adapters of the model were computed from the weights of its base model: load the base model first, "
            "then call get_peft_model"
        )
    tensors = dict(chain(module.named_parameters(remove_duplicate=False), module.named_buffers(remove_duplicate=False)))
    if any(base is None and name in tensors and tensors[name].is_meta for name, base in found.items()):
        raise MismatchError(
            "the adapters of the model are on the meta device and have no values: load or stream the base model first, "
            "then call get_peft_model"
        )
    return found


def _is_computed(module: nn.Module) -> bool:
    """Return whether adapters are initialised from the weights of the base model."""
    configurations = getattr(module, "peft_config", None)
    found = configurations.values() if isinstance(configurations, dict) else ()
    return any(getattr(each, "init_lora_weights", True) not in _INDEPENDENT for each in found)


def base_outline(outline: Outline, names: Mapping[str, str | None]) -> Outline:
    """Return the description of the base model: its slots by their names in a base checkpoint, each once."""
    slots = []
    known: set[str] = set()
    for slot in outline.slots:
        new = tuple(base for name in slot.names if (base := names[name]) is not None and base not in known)
        known.update(new)
        if new:
            slots.append(replace(slot, names=new))
    extra_state = tuple(dict.fromkeys(base for name in outline.extra_state if (base := names[name]) is not None))
    return replace(outline, slots=tuple(slots), extra_state=extra_state)


def through_wrappers(selection: Selection, outline: Outline, names: Mapping[str, str | None]) -> Selection:
    """Return a selection for the base model by the names of the model of peft, which ``outline`` describes."""
    known = set(names.values())
    pairs = [(name, base) for name, base in names.items() if base is not None]
    others = {name: entry for name, entry in selection.entries.items() if name not in known}
    entries = dict(selection.entries)
    for slot in outline.slots:  # a copy of a tied layer, for an adapter, is not tied itself
        tied = [base for name in slot.names if (base := names[name]) is not None]
        saved = next((base for base in tied if base in selection.entries), None)
        if saved is not None:
            entries.update({base: selection.entries[saved] for base in tied if base not in entries})
    copies = {name: entries[base] for name, base in pairs if base in entries}
    adapters = sum(base is None for base in names.values())
    note = f"base weights were loaded through the wrappers of peft, without {adapters} tensors of adapters"
    return replace(
        selection,
        entries=copies | others,
        extra_state={name: selection.extra_state[base] for name, base in pairs if base in selection.extra_state},
        versions={
            path: selection.versions[saved]
            for name, base in pairs
            for path, saved in ((name.rpartition(".")[0], base.rpartition(".")[0]),)
            if saved in selection.versions
        },
        notes=(*selection.notes, note),
    )


def _base_path(module: nn.Module) -> str:
    """Return the path of the base model in a model of peft, with its dot; empty for other modules."""
    get = getattr(module, "get_base_model", None)
    if not (callable(get) and isinstance(getattr(module, "peft_config", None), dict)):
        return ""
    base = get()
    return next((f"{path}." for path, part in module.named_modules() if part is base and path), "")


def _is_wrapper(module: nn.Module | None) -> bool:
    parts = {} if module is None else module._modules  # noqa: SLF001  without those of its parts
    return "base_layer" in parts or {"original_module", "modules_to_save"}.issubset(parts.keys())


def _base_name(module: nn.Module, name: str, root: str) -> str | None:
    """Return the name of a tensor in a base checkpoint; None for one of an adapter."""
    if not name.startswith(root):
        return None
    part: nn.Module | None = module.get_submodule(root.removesuffix("."))
    kept, path = [], iter(name.removeprefix(root).split("."))
    for word in path:
        if not _is_wrapper(part):
            kept.append(word)
        elif word not in _BASE:
            return None
        part = None if part is None else part._modules.get(word)  # noqa: SLF001  as above
        if word == "modules_to_save" and isinstance(part, nn.ModuleDict):
            part = part[next(path)]
    return ".".join(kept)


def _adapter_parts(module: nn.Module) -> set[str]:
    """Return the components of names that only adapters have."""
    return {name for part in module.modules() if _is_wrapper(part) for name, _ in part.named_children()} - _BASE | {
        _PROMPT
    }


def _adapter_loader(module: nn.Module, names: Collection[str], *, strict: bool) -> Loader | None:
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
    parts = _adapter_parts(module)
    of_adapter = [name for name in names if not parts.isdisjoint(name.split("."))]
    return None if not of_adapter or any(name in own for name in of_adapter) else str(adapter)
