"""``SluiceCheckpointIO``: checkpoints of Lightning's Trainer and Fabric, written and read by sluice.

A plugin of Lightning: ``Trainer(plugins=[SluiceCheckpointIO()])``. The files are ordinary ones, which
``torch.load(weights_only=True)`` reads.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO

from sluice.torch import load, save

__all__ = ["SluiceCheckpointIO"]


class SluiceCheckpointIO(TorchCheckpointIO):  # type: ignore[misc]  # lightning may not be installed
    """Saves atomically and in fixed memory, and loads from every format and source that sluice reads.

    Example:
        >>> trainer = Trainer(plugins=[SluiceCheckpointIO()])
    """

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: str | os.PathLike[str], storage_options: Any | None = None
    ) -> None:
        """Write a checkpoint; its directory is made if it does not exist.

        Raises:
            SaveError: It holds an object that only pickle can store, such as a module among the hyperparameters.
            TypeError: There are storage options.
        """
        if storage_options is not None:
            raise TypeError("SluiceCheckpointIO takes no storage_options: pass a sluice.Remote as the path")
        if isinstance(path, (str, Path)) and "://" not in str(path):
            Path(path).parent.mkdir(parents=True, exist_ok=True)
        save(checkpoint, path)

    def load_checkpoint(
        self,
        path: str | os.PathLike[str],
        map_location: Any | None = None,
        weights_only: bool | None = None,  # noqa: FBT001  the signature of Lightning
    ) -> dict[str, Any]:
        """Read a checkpoint to the CPU, or to the device that ``map_location`` is.

        Raises:
            UnsafeContentError: It holds an object that only running code could build.
            FileNotFoundError: It does not exist.
            ValueError: ``weights_only`` is False.
        """
        device = None if callable(map_location) else map_location  # Lightning's own functions keep tensors on the CPU
        checkpoint: dict[str, Any] = load(path, map_location=device, weights_only=weights_only)
        return checkpoint
