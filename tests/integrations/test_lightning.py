"""Lightning's Trainer saves, resumes and removes checkpoints through sluice."""

from __future__ import annotations

import logging
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import sluice

lightning = pytest.importorskip("lightning")

from sluice.integrations.lightning import SluiceCheckpointIO  # noqa: E402  it imports lightning

pytestmark = pytest.mark.filterwarnings("ignore")


class Net(lightning.LightningModule):  # type: ignore[misc, name-defined]
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.save_hyperparameters({"lr": 0.1})

    def training_step(self, batch: Any, _: int) -> torch.Tensor:
        loss: torch.Tensor = self.layer(batch[0]).square().sum()
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.1)


def fitted(folder: Path, epochs: int, *, plugins: list[Any], resume: Path | None = None) -> tuple[Any, Net]:
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    trainer = lightning.Trainer(
        max_epochs=epochs,
        plugins=plugins,
        default_root_dir=folder,
        accelerator="cpu",
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    torch.manual_seed(0)
    model = Net()
    with warnings.catch_warnings(action="ignore"):
        trainer.fit(model, DataLoader(TensorDataset(torch.ones(8, 4)), batch_size=4), ckpt_path=resume)
    return trainer, model


def test_training_is_resumed_as_with_the_plugin_of_lightning(tmp_path: Path) -> None:
    states = []
    for plugins in ([], [SluiceCheckpointIO()]):
        folder = tmp_path / str(len(plugins))
        first, _ = fitted(folder, 1, plugins=plugins)
        first.save_checkpoint(folder / "new" / "a.ckpt")
        second, model = fitted(folder, 2, plugins=plugins, resume=folder / "new" / "a.ckpt")
        assert (second.current_epoch, second.global_step) == (2, 4)
        states.append(model.state_dict())
    assert all(torch.equal(value, states[1][name]) for name, value in states[0].items())
    assert torch.load(tmp_path / "1" / "new" / "a.ckpt", weights_only=True)["hyper_parameters"] == {"lr": 0.1}


def test_removal_and_refusals(tmp_path: Path) -> None:
    plugin = SluiceCheckpointIO()
    plugin.save_checkpoint({"state_dict": {"w": torch.ones(2)}}, tmp_path / "a" / "b.ckpt")
    assert plugin.load_checkpoint(tmp_path / "a" / "b.ckpt", map_location=lambda s, _: s)["state_dict"]["w"].sum() == 2
    plugin.remove_checkpoint(tmp_path / "a" / "b.ckpt")
    plugin.remove_checkpoint(tmp_path / "a" / "b.ckpt")
    plugin.remove_checkpoint(tmp_path / "a")
    assert not (tmp_path / "a").exists()
    store = pytest.importorskip("fsspec").filesystem("memory")
    store.pipe("/d.ckpt", b"")
    plugin.remove_checkpoint("memory://d.ckpt")
    assert not store.exists("/d.ckpt")
    with pytest.raises(sluice.SaveError):
        plugin.save_checkpoint({"model": nn.Linear(1, 1)}, tmp_path / "c.ckpt")
    with pytest.raises(TypeError, match="storage_options"):
        plugin.save_checkpoint({}, tmp_path / "c.ckpt", storage_options={})
    with pytest.raises(FileNotFoundError):
        plugin.load_checkpoint(tmp_path / "c.ckpt")
