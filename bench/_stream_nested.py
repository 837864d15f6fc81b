"""Models whose blocks have lists of modules in them, and what a stream reads of them: ``bench.stream --models``."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

import sluice
from sluice._units import format_bytes

__all__ = ["HEADINGS", "NESTED", "rows"]

HEADINGS = (
    *("model", "weights", "memory", "first call", "read by a call", "of what does not stay", "of what memory leaves"),
    *("there or on the way", "right"),
)

#: Percent of the weights for which memory is given.
_SHARES = (35, 60, 90)

#: Calls that are counted, after two that are not.
_CALLS = 4


def _pixels(size: int) -> torch.Tensor:
    return torch.linspace(-1, 1, 3 * size * size).reshape(1, 3, size, size)


def _t5() -> nn.Module:
    import transformers as hf  # as below: an extra

    return hf.T5ForConditionalGeneration(hf.T5Config(decoder_start_token_id=0))  # type: ignore[no-any-return]


def _whisper() -> nn.Module:
    import transformers as hf

    sizes = {"d_model": 768, "encoder_layers": 12, "decoder_layers": 12, "max_source_positions": 250}
    heads = {"encoder_attention_heads": 12, "decoder_attention_heads": 12}
    widths = {"encoder_ffn_dim": 3072, "decoder_ffn_dim": 3072}
    return hf.WhisperForConditionalGeneration(hf.WhisperConfig(**sizes, **heads, **widths))  # type: ignore[no-any-return]


def _unet() -> nn.Module:
    import diffusers

    return diffusers.UNet2DConditionModel(  # type: ignore[no-any-return]
        block_out_channels=(128, 256, 512, 512), cross_attention_dim=512, sample_size=16
    )


def _vae() -> nn.Module:
    import diffusers

    kinds = {"down_block_types": ["DownEncoderBlock2D"] * 4, "up_block_types": ["UpDecoderBlock2D"] * 4}
    return diffusers.AutoencoderKL(block_out_channels=(128, 256, 512, 512), layers_per_block=2, **kinds)  # type: ignore[no-any-return]


def _convnext() -> nn.Module:
    import transformers as hf

    return hf.ConvNextForImageClassification(hf.ConvNextConfig())  # type: ignore[no-any-return]


def _swin() -> nn.Module:
    import transformers as hf

    return hf.SwinForImageClassification(hf.SwinConfig())  # type: ignore[no-any-return]


def _sam() -> nn.Module:
    import transformers as hf

    vision = {"image_size": 256, "global_attn_indexes": [2, 5, 8, 11]}
    return hf.SamModel(hf.SamConfig(vision_config=vision, prompt_encoder_config={"image_size": 256}))  # type: ignore[no-any-return]


#: Builders of the models and of the arguments of a call, by name.
NESTED: dict[str, tuple[Callable[[], nn.Module], Callable[[], dict[str, Any]]]] = {
    "T5": (_t5, lambda: {"input_ids": torch.arange(16)[None], "decoder_input_ids": torch.arange(4)[None]}),
    "Whisper": (
        _whisper,
        lambda: {"input_features": torch.ones(1, 80, 500), "decoder_input_ids": torch.arange(4)[None]},
    ),
    "UNet": (
        _unet,
        lambda: {"sample": torch.ones(1, 4, 16, 16), "timestep": 7, "encoder_hidden_states": torch.ones(1, 8, 512)},
    ),
    "VAE": (_vae, lambda: {"sample": _pixels(64)}),
    "ConvNeXt": (_convnext, lambda: {"pixel_values": _pixels(64)}),
    "Swin": (_swin, lambda: {"pixel_values": _pixels(224)}),
    "SAM": (_sam, lambda: {"pixel_values": _pixels(256), "input_points": torch.ones(1, 1, 1, 2)}),
}


def rows(folder: Path) -> Iterator[tuple[str, ...]]:
    """Yield the cells of each model with each share of memory; the files are written to a folder."""
    for name, (build, arguments) in NESTED.items():
        path = folder / f"{name}.pth"
        torch.manual_seed(0)
        model = build().eval()
        torch.save(model.state_dict(), path)
        with torch.inference_mode():
            want = _numbers(model(**arguments()))
        nbytes = sum(parameter.nbytes for parameter in model.parameters())
        del model
        for share in _SHARES:
            yield _row(name, build, arguments(), path, want, nbytes, share)
        path.unlink()


def _row(
    name: str,
    build: Callable[[], nn.Module],
    arguments: dict[str, Any],
    path: Path,
    want: list[torch.Tensor],
    nbytes: int,
    share: int,
) -> tuple[str, ...]:
    with sluice.empty_init():
        model = build().eval()
    with torch.inference_mode(), sluice.stream(model, path, memory=nbytes * share // 100) as stream:
        model(**arguments)
        first = stream.report.read_bytes
        model(**arguments)
        before = stream.report
        for _ in range(_CALLS):
            found = _numbers(model(**arguments))
        after = stream.report
    read = (after.read_bytes - before.read_bytes) / _CALLS
    hits, misses = after.hits - before.hits, after.misses - before.misses
    same = all(torch.equal(one, other) for one, other in zip(found, want, strict=True))
    return (
        name,
        format_bytes(nbytes),
        f"{share} %",
        format_bytes(first),
        format_bytes(int(read)),
        f"{read / after.call_bytes:.2f}",
        f"{read / (nbytes * (100 - share) / 100):.2f}",
        f"{hits} of {hits + misses}",
        "yes" if same else "NO",
    )


def _numbers(output: Any) -> list[torch.Tensor]:
    """Return the tensors of a result that has names or is a tuple."""
    values = output.values() if hasattr(output, "values") else output
    return [value for value in values if isinstance(value, torch.Tensor)]
