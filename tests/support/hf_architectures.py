"""Small random models of many architectures, with inputs. Every size is the smallest that the library accepts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True, kw_only=True)
class Case:
    """An architecture."""

    #: Name of the model class in transformers.
    name: str
    #: Its kind, for the table in the documentation.
    kind: str
    #: Keyword arguments of its configuration.
    settings: Mapping[str, Any]
    #: Inputs of one forward pass.
    inputs: Callable[[], dict[str, torch.Tensor]]
    #: Whether CI runs it too.
    quick: bool = False

    def config(self, transformers: Any) -> Any:
        """Return a new configuration."""
        made = {name: value(transformers) if callable(value) else value for name, value in self.settings.items()}
        return getattr(transformers, self.name).config_class(**made)

    def model(self, transformers: Any) -> Any:
        """Return a new model with random weights, also for tensors that the library initializes with zeros and ones."""
        torch.manual_seed(0)
        model = getattr(transformers, self.name)(self.config(transformers)).eval()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter) * 0.02)
        return model


_TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_TEXT = {**_TOKENS, "vocab_size": 96, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
_ENCODER = {**_TEXT, "intermediate_size": 48, "max_position_embeddings": 64}
_LLAMA = {**_ENCODER, "num_key_value_heads": 2}
_GPT2 = {**_TOKENS, "vocab_size": 96, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
_MOE = {**_LLAMA, "moe_intermediate_size": 24, "num_experts": 4, "num_experts_per_tok": 2}
_BART = {
    **_TOKENS,
    "vocab_size": 96,
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "max_position_embeddings": 64,
    "decoder_start_token_id": 2,
    "forced_eos_token_id": 2,
}
_T5 = {
    "vocab_size": 96,
    "d_model": 32,
    "d_kv": 8,
    "d_ff": 48,
    "num_layers": 2,
    "num_heads": 4,
    "relative_attention_num_buckets": 8,
    "decoder_start_token_id": 0,
    "pad_token_id": 0,
    "eos_token_id": 1,
}
_VISION = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "image_size": 32,
    "patch_size": 8,
}
_SPEECH = {
    **_ENCODER, "conv_dim": (16, 16), "conv_kernel": (10, 3), "conv_stride": (5, 2), "num_conv_pos_embeddings": 16,
    "num_conv_pos_embedding_groups": 2, "num_feat_extract_layers": 2, "mask_time_prob": 0.0,
}  # fmt: skip
_MAMBA = {**_TOKENS, "vocab_size": 96, "hidden_size": 32, "num_hidden_layers": 2, "state_size": 8}


def _ids(count: int = 12) -> torch.Tensor:
    return torch.arange(3, 3 + 2 * count).view(2, count)


def _text() -> dict[str, torch.Tensor]:
    return {"input_ids": _ids()}


def _pair() -> dict[str, torch.Tensor]:
    return {"input_ids": _ids(), "decoder_input_ids": _ids(6)}


def _pixels(size: int = 32) -> dict[str, torch.Tensor]:
    return {"pixel_values": torch.rand(2, 3, size, size, generator=torch.Generator().manual_seed(1))}


def _wave() -> dict[str, torch.Tensor]:
    return {"input_values": torch.rand(2, 800, generator=torch.Generator().manual_seed(1))}


def _mel() -> dict[str, torch.Tensor]:
    features = torch.rand(2, 8, 40, generator=torch.Generator().manual_seed(1))
    return {"input_features": features, "decoder_input_ids": _ids(6)}


def _text_and_pixels() -> dict[str, torch.Tensor]:
    return {**_text(), **_pixels()}


def _text_and_boxes() -> dict[str, torch.Tensor]:
    return {**_text(), "bbox": torch.rand(2, 12, 4, generator=torch.Generator().manual_seed(1))}


def _case(kind: str, name: str, settings: Mapping[str, Any], *more: Mapping[str, Any], **options: Any) -> Case:
    inputs = options.pop("inputs", _text)
    quick = options.pop("quick", False)
    joined = dict(settings)
    for one in more:
        joined.update(one)
    return Case(name=name, kind=kind, settings={**joined, **options}, inputs=inputs, quick=quick)


_DECODERS = (
    _case("decoder, learned positions, tied head", "GPT2LMHeadModel", _GPT2, quick=True),
    _case("decoder, rotary", "LlamaForCausalLM", _LLAMA, quick=True),
    _case("decoder, rotary", "MistralForCausalLM", _LLAMA),
    _case("decoder, rotary, tied head", "Qwen2ForCausalLM", _LLAMA, tie_word_embeddings=True),
    _case("decoder, rotary", "Qwen3ForCausalLM", _LLAMA, head_dim=8),
    _case("decoder, rotary, tied head", "GemmaForCausalLM", _LLAMA, head_dim=8),
    _case("decoder, rotary, tied head", "Gemma2ForCausalLM", _LLAMA, head_dim=8, sliding_window=8),
    _case("decoder, two rotaries, tied head", "Gemma3ForCausalLM", _LLAMA, head_dim=8, sliding_window=8),
    _case("decoder, partial rotary", "PhiForCausalLM", _ENCODER),
    _case("decoder, rotary, fused projections", "Phi3ForCausalLM", _LLAMA),
    _case("decoder, partial rotary", "GPTNeoXForCausalLM", _ENCODER),
    _case("decoder, rotary", "GPTJForCausalLM", _GPT2, rotary_dim=4),
    _case("decoder, local attention, tied head", "GPTNeoForCausalLM", _TOKENS, vocab_size=96, hidden_size=32,
          num_layers=2, num_heads=4, intermediate_size=48, max_position_embeddings=64,
          attention_types=[[["global", "local"], 1]]),
    _case("decoder, ALiBi, tied head", "BloomForCausalLM", _TOKENS, vocab_size=96, hidden_size=32, n_layer=2, n_head=4,
          quick=True),
    _case("decoder, ALiBi, tied head", "MptForCausalLM", _TOKENS, vocab_size=96, d_model=32, n_layers=2, n_heads=4,
          max_seq_len=64),
    _case("decoder, rotary, tied head", "FalconForCausalLM", _TEXT),
    _case("decoder, learned positions, tied head", "OPTForCausalLM", _TOKENS, vocab_size=96, hidden_size=32,
          num_hidden_layers=2, num_attention_heads=4, ffn_dim=48, max_position_embeddings=64, word_embed_proj_dim=16),
    _case("decoder, partial rotary", "StableLmForCausalLM", _LLAMA),
    _case("decoder, rotary, tied head", "Starcoder2ForCausalLM", _LLAMA),
    _case("decoder, rotary", "OlmoForCausalLM", _LLAMA),
    _case("decoder, rotary", "Olmo2ForCausalLM", _LLAMA),
    _case("decoder, rotary, tied head", "CohereForCausalLM", _LLAMA),
    _case("decoder, rotary", "GraniteForCausalLM", _LLAMA),
    _case("decoder, rotary", "CodeGenForCausalLM", _GPT2, rotary_dim=4),
    _case("decoder, sinusoidal positions, tied head", "XGLMForCausalLM", _TOKENS, vocab_size=96, d_model=32,
          num_layers=2, attention_heads=4, ffn_dim=48, max_position_embeddings=64),
    _case("decoder, learned positions, tied head", "BioGptForCausalLM", _ENCODER),
    _case("decoder, sinusoidal positions, tied head", "CTRLLMHeadModel", _GPT2, dff=48),
    _case("decoder, learned positions, tied head", "OpenAIGPTLMHeadModel", _GPT2),
    _case("decoder, relative attention, tied head", "XLNetLMHeadModel", _TOKENS, vocab_size=96, d_model=32, n_layer=2,
          n_head=4, d_inner=48),
)  # fmt: skip

_EXPERTS = (
    _case("MoE", "MixtralForCausalLM", _LLAMA, num_local_experts=4, quick=True),
    _case("MoE", "Qwen2MoeForCausalLM", _MOE, shared_expert_intermediate_size=24),
    _case("MoE", "Qwen3MoeForCausalLM", _MOE, head_dim=8),
    _case("MoE", "OlmoeForCausalLM", _LLAMA, num_experts=4, num_experts_per_tok=2),
    _case("MoE", "DeepseekV3ForCausalLM", _ENCODER, num_key_value_heads=4, moe_intermediate_size=24,
          n_routed_experts=4, n_group=2, topk_group=1, num_experts_per_tok=2, q_lora_rank=16, kv_lora_rank=16,
          qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=8, first_k_dense_replace=1),
    _case("MoE", "GptOssForCausalLM", _LLAMA, num_local_experts=4, num_experts_per_tok=2, head_dim=8,
          sliding_window=8),
    _case("MoE", "GraniteMoeForCausalLM", _LLAMA, num_local_experts=4, num_experts_per_tok=2),
    _case("MoE", "PhimoeForCausalLM", _LLAMA, num_local_experts=4),
    _case("MoE, encoder-decoder, relative bias", "SwitchTransformersForConditionalGeneration", _T5, num_experts=4,
          num_sparse_encoder_layers=1, num_sparse_decoder_layers=1, num_decoder_layers=2, inputs=_pair),
    _case("MoE and state space", "JambaForCausalLM", _LLAMA, num_experts=4, attn_layer_period=2, attn_layer_offset=1,
          expert_layer_period=2, expert_layer_offset=1, mamba_d_state=8, mamba_dt_rank=4, use_mamba_kernels=False),
)  # fmt: skip

_STATE_SPACE = (
    _case("state space, tied head", "MambaForCausalLM", _MAMBA, quick=True),
    _case("state space", "Mamba2ForCausalLM", _MAMBA, num_heads=8, head_dim=8, n_groups=1, chunk_size=8),
    _case("state space", "FalconMambaForCausalLM", _MAMBA),
    _case("recurrent and attention", "RecurrentGemmaForCausalLM", _LLAMA, num_key_value_heads=1, lru_width=32,
          num_hidden_layers=3, attention_window_size=8, head_dim=8),
)  # fmt: skip

_ENCODERS = (
    _case("encoder, tied head", "BertForMaskedLM", _ENCODER, quick=True),
    _case("encoder", "BertModel", _ENCODER),
    _case("encoder", "RobertaForSequenceClassification", _ENCODER),
    _case("encoder, tied head", "DistilBertForMaskedLM", _TOKENS, vocab_size=96, dim=32, n_layers=2, n_heads=4,
          hidden_dim=48, max_position_embeddings=64),
    _case("encoder, shared layers, tied head", "AlbertForMaskedLM", _ENCODER, embedding_size=16),
    _case("encoder", "ElectraForPreTraining", _ENCODER, embedding_size=16),
    _case("encoder, relative attention, tied head", "DebertaV2ForMaskedLM", _ENCODER, relative_attention=True,
          pos_att_type=["p2c", "c2p"], max_relative_positions=16),
    _case("encoder, relative attention", "DebertaModel", _ENCODER, relative_attention=True, pos_att_type=["p2c"],
          max_relative_positions=16),
    _case("encoder, relative bias", "MPNetModel", _ENCODER),
    _case("encoder, rotary, tied head", "ModernBertForMaskedLM", _ENCODER, cls_token_id=1, sep_token_id=2,
          local_attention=8),
    _case("encoder", "XLMRobertaForTokenClassification", _ENCODER),
    _case("encoder, buffers made from buffers", "BrosModel", _ENCODER, hidden_size=64, inputs=_text_and_boxes,
          quick=True),
    _case("encoder", "SqueezeBertModel", _ENCODER, embedding_size=32, q_groups=2, k_groups=2, v_groups=2,
          post_attention_groups=1, intermediate_groups=2, output_groups=2),
)  # fmt: skip

_PAIRS = (
    _case("encoder-decoder, relative bias, tied head", "T5ForConditionalGeneration", _T5, inputs=_pair, quick=True),
    _case("encoder-decoder, relative bias", "MT5ForConditionalGeneration", _T5, inputs=_pair),
    _case("encoder-decoder, tied head", "BartForConditionalGeneration", _BART, inputs=_pair, quick=True),
    _case("encoder-decoder, sinusoidal positions, tied head", "MarianMTModel", _BART, inputs=_pair),
    _case("encoder-decoder, sinusoidal positions", "PegasusForConditionalGeneration", _BART, inputs=_pair),
    _case("encoder-decoder, tied head", "MBartForConditionalGeneration", _BART, inputs=_pair),
    _case("encoder-decoder, sinusoidal positions", "M2M100ForConditionalGeneration", _BART, inputs=_pair),
)  # fmt: skip

_IMAGES = (
    _case("vision", "ViTForImageClassification", _VISION, inputs=_pixels, quick=True),
    _case("vision", "DeiTForImageClassification", _VISION, inputs=_pixels),
    _case("vision, relative bias", "BeitModel", _VISION, use_relative_position_bias=True, inputs=_pixels),
    _case("vision", "Dinov2Model", _VISION, inputs=_pixels),
    _case("vision, windows, relative bias", "SwinForImageClassification", {}, image_size=32, patch_size=4, embed_dim=16,
          depths=[1, 1], num_heads=[2, 2], window_size=4, inputs=_pixels),
    _case("vision, convolutions", "ConvNextForImageClassification", {}, hidden_sizes=[8, 16], depths=[1, 1],
          num_stages=2, inputs=_pixels),
    _case("vision, batch norm", "ResNetForImageClassification", {}, embedding_size=8, hidden_sizes=[8, 16],
          depths=[1, 1], inputs=_pixels),
    _case("vision", "SegformerForSemanticSegmentation", {}, num_encoder_blocks=2, depths=[1, 1], sr_ratios=[2, 1],
          hidden_sizes=[8, 16], num_attention_heads=[1, 2], patch_sizes=[7, 3], strides=[4, 2], mlp_ratios=[2, 2],
          decoder_hidden_size=16, inputs=_pixels),
    _case("vision, batch norm", "MobileNetV2ForImageClassification", {}, depth_multiplier=0.35, inputs=_pixels),
)  # fmt: skip

_SOUND = (
    _case("audio, weight norm", "Wav2Vec2ForCTC", _SPEECH, vocab_size=32, inputs=_wave, quick=True),
    _case("audio, weight norm", "HubertModel", _SPEECH, inputs=_wave),
    _case("audio, relative bias", "WavLMModel", _SPEECH, inputs=_wave),
    _case("audio, encoder-decoder, tied head", "WhisperForConditionalGeneration", _BART, num_mel_bins=8,
          max_source_positions=20, max_target_positions=32, suppress_tokens=None, begin_suppress_tokens=None,
          inputs=_mel),
)  # fmt: skip


def _clip_text(transformers: Any) -> Any:
    return transformers.CLIPTextConfig(**_ENCODER).to_dict()


def _clip_vision(transformers: Any) -> Any:
    return transformers.CLIPVisionConfig(**_VISION).to_dict()


_SEVERAL = (
    _case("vision and text", "CLIPModel", {}, text_config=_clip_text, vision_config=_clip_vision, projection_dim=16,
          inputs=_text_and_pixels),
)  # fmt: skip

CASES = (*_DECODERS, *_EXPERTS, *_STATE_SPACE, *_ENCODERS, *_PAIRS, *_IMAGES, *_SOUND, *_SEVERAL)
