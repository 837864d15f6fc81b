"""A node of ComfyUI, "Load Checkpoint (sluice)": link this folder into ``ComfyUI/custom_nodes/``; nothing is replaced.

``load_torch_file`` has the signature of that in ``comfy.utils``, for nodes of your own.
"""

from __future__ import annotations

from typing import Any

import torch

import sluice


def load_torch_file(
    ckpt: str,
    safe_load: bool = True,  # noqa: FBT001, FBT002  the signature of ComfyUI
    device: torch.device | None = None,
    return_metadata: bool = False,  # noqa: FBT001, FBT002
) -> Any:
    """Return the state dict of a file, and its metadata if asked for; code in a file is never run."""
    del safe_load
    with sluice.open(ckpt) as checkpoint:
        tree = checkpoint.tree
        key = "state_dict" if isinstance(tree, dict) and isinstance(tree.get("state_dict"), dict) else None
        state = sluice.load_state_dict(checkpoint, device=device, key=key)  # as ComfyUI, also next to averaged weights
        metadata = dict(checkpoint.metadata) if checkpoint.format == "safetensors" else None
    return (state, metadata) if return_metadata else state


class LoadCheckpoint:
    """Loads a diffusion model, its text encoders and its image decoder from one file."""

    RETURN_TYPES = ("MODEL", "CLIP", "VAE")
    FUNCTION, CATEGORY = "load", "loaders"

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:  # noqa: N802  ComfyUI calls it
        """Return the inputs of the node."""
        import folder_paths

        return {"required": {"ckpt_name": (folder_paths.get_filename_list("checkpoints"),)}}

    def load(self, ckpt_name: str) -> tuple[Any, Any, Any]:
        """Return model, text encoders and decoder."""
        import comfy.sd
        import folder_paths

        path = folder_paths.get_full_path_or_raise("checkpoints", ckpt_name)
        state, metadata = load_torch_file(path, return_metadata=True)
        parts = comfy.sd.load_state_dict_guess_config(
            state, embedding_directory=folder_paths.get_folder_paths("embeddings"), metadata=metadata
        )
        if parts is None:
            raise RuntimeError(f"ComfyUI does not know the model in {path}")
        model, clip, vae = parts[:3]
        return model, clip, vae


NODE_CLASS_MAPPINGS = {"SluiceLoadCheckpoint": LoadCheckpoint}
NODE_DISPLAY_NAME_MAPPINGS = {"SluiceLoadCheckpoint": "Load Checkpoint (sluice)"}
