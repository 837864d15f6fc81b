"""Names of the tensors of adapters: what each is for, and the module of the model that it belongs to."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches

__all__ = ["ModulePaths", "by_module"]

#: Part of an adapter by the end of a tensor's name: of peft, of kohya and ComfyUI, of older diffusers, of LyCORIS.
_PARTS = {
    ".lora_A.weight": "a",
    ".lora_B.weight": "b",
    ".lora_B.bias": "bias",
    ".lora_embedding_A": "a",
    ".lora_embedding_B": "b",
    ".lora_magnitude_vector": "magnitude",
    ".lora_magnitude_vector.weight": "magnitude",
    ".lora_down.weight": "a",
    ".lora_up.weight": "b",
    ".lora.down.weight": "a",
    ".lora.up.weight": "b",
    ".lora_linear_layer.down.weight": "a",
    ".lora_linear_layer.up.weight": "b",
    ".alpha": "alpha",
    **{f".{kind}_{part}": f"{kind}_{part}" for kind in ("hada", "lokr") for part in ("w1_a", "w1_b", "w2_a", "w2_b")},
    **{f".lokr_{part}": f"lokr_{part}" for part in ("w1", "w2")},
}

#: Prefixes that libraries write before the path of a module.
_PREFIXES = (
    *("", "base_model.model.", "base_model.", "unet.", "transformer.", "text_encoder.", "text_encoder_2."),
    *("diffusion_model.", "model.diffusion_model."),
)

#: The same in files of kohya, which write "_" for the dots of the path.
_JOINED_PREFIXES = ("lora_unet_", "lora_te_", "lora_te1_", "lora_te2_", "lora_transformer_", "lycoris_")


def by_module(names: Iterable[str]) -> tuple[dict[str, dict[str, str]], list[str]]:
    """Return the name of each part of an adapter by the path that its name begins with, and all other names."""
    found: dict[str, dict[str, str]] = {}
    others = []
    for name in names:
        end = next((end for end in _PARTS if name.endswith(end)), None)
        if end is None:
            others.append(name)
        else:
            found.setdefault(name.removesuffix(end), {})[_PARTS[end]] = name
    return found, others


class ModulePaths:
    """Paths of a model's modules, or names of its tensors, found by what libraries write for them."""

    def __init__(self, paths: Iterable[str]) -> None:
        self._paths = dict.fromkeys(paths)
        self._joined: dict[str, list[str]] = {}
        for path in self._paths:
            self._joined.setdefault(path.replace(".", "_"), []).append(path)

    def find(self, name: str) -> str | None:
        """Return the path that a name means; None if none or several do."""
        if "." not in name:
            for prefix in _JOINED_PREFIXES:
                found = self._joined.get(name.removeprefix(prefix), []) if name.startswith(prefix) else []
                if len(found) == 1:
                    return found[0]
        plain = name.replace(".base_layer", "")
        ends = (plain.removeprefix(prefix) for prefix in _PREFIXES if plain.startswith(prefix))
        return next((path for path in ends if path in self._paths), None)

    def near(self, name: str) -> str | None:
        """Return the most similar path for a name that means none."""
        return next(iter(get_close_matches(name.removeprefix("base_model.model."), self._paths, 1)), None)
