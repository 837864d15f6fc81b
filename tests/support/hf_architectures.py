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


def _pixels() -> dict[str, torch.Tensor]:
    return {"pixel_values": torch.rand(2, 3, 32, 32, generator=torch.Generator().manual_seed(1))}


def _wave() -> dict[str, torch.Tensor]:
    return {"input_values": torch.rand(2, 800, generator=torch.Generator().manual_seed(1))}


def _mel() -> dict[str, torch.Tensor]:
    features = torch.rand(2, 8, 40, generator=torch.Generator().manual_seed(1))
    return {"input_features": features, "decoder_input_ids": _ids(6)}


def _text_and_boxes() -> dict[str, torch.Tensor]:
    return {**_text(), "bbox": torch.rand(2, 12, 4, generator=torch.Generator().manual_seed(1))}


def _case(name: str, settings: Mapping[str, Any], **options: Any) -> Case:
    inputs, quick = options.pop("inputs", _text), options.pop("quick", False)
    return Case(name=name, settings={**settings, **options}, inputs=inputs, quick=quick)


_DECODERS = (
    _case("GPT2LMHeadModel", _GPT2, quick=True),
    _case("LlamaForCausalLM", _LLAMA, quick=True),
    _case("MistralForCausalLM", _LLAMA),
    _case("Qwen2ForCausalLM", _LLAMA, tie_word_embeddings=True),
    _case("Qwen3ForCausalLM", _LLAMA, head_dim=8),
    _case("GemmaForCausalLM", _LLAMA, head_dim=8),
    _case("Gemma2ForCausalLM", _LLAMA, head_dim=8, sliding_window=8),
    _case("Gemma3ForCausalLM", _LLAMA, head_dim=8, sliding_window=8),
    _case("PhiForCausalLM", _ENCODER),
    _case("Phi3ForCausalLM", _LLAMA),
    _case("GPTNeoXForCausalLM", _ENCODER),
    _case("GPTJForCausalLM", _GPT2, rotary_dim=4),
    _case("GPTNeoForCausalLM", _TOKENS, vocab_size=96, hidden_size=32, num_layers=2, num_heads=4, intermediate_size=48,
          max_position_embeddings=64, attention_types=[[["global", "local"], 1]]),
    _case("BloomForCausalLM", _TOKENS, vocab_size=96, hidden_size=32, n_layer=2, n_head=4, quick=True),
    _case("MptForCausalLM", _TOKENS, vocab_size=96, d_model=32, n_layers=2, n_heads=4, max_seq_len=64),
    _case("FalconForCausalLM", _TEXT),
    _case("OPTForCausalLM", _TOKENS, vocab_size=96, hidden_size=32, num_hidden_layers=2, num_attention_heads=4,
          ffn_dim=48, max_position_embeddings=64, word_embed_proj_dim=16),
    _case("StableLmForCausalLM", _LLAMA),
    _case("Starcoder2ForCausalLM", _LLAMA),
    _case("OlmoForCausalLM", _LLAMA),
    _case("Olmo2ForCausalLM", _LLAMA),
    _case("CohereForCausalLM", _LLAMA),
    _case("GraniteForCausalLM", _LLAMA),
    _case("CodeGenForCausalLM", _GPT2, rotary_dim=4),
    _case("XGLMForCausalLM", _TOKENS, vocab_size=96, d_model=32, num_layers=2, attention_heads=4, ffn_dim=48,
          max_position_embeddings=64),
    _case("BioGptForCausalLM", _ENCODER),
    _case("CTRLLMHeadModel", _GPT2, dff=48),
    _case("OpenAIGPTLMHeadModel", _GPT2),
    _case("XLNetLMHeadModel", _TOKENS, vocab_size=96, d_model=32, n_layer=2, n_head=4, d_inner=48),
)  # fmt: skip

_EXPERTS = (
    _case("MixtralForCausalLM", _LLAMA, num_local_experts=4, quick=True),
    _case("Qwen2MoeForCausalLM", _MOE, shared_expert_intermediate_size=24),
    _case("Qwen3MoeForCausalLM", _MOE, head_dim=8),
    _case("OlmoeForCausalLM", _LLAMA, num_experts=4, num_experts_per_tok=2),
    _case("DeepseekV3ForCausalLM", _ENCODER, num_key_value_heads=4, moe_intermediate_size=24, n_routed_experts=4,
          n_group=2, topk_group=1, num_experts_per_tok=2, q_lora_rank=16, kv_lora_rank=16, qk_rope_head_dim=8,
          qk_nope_head_dim=8, v_head_dim=8, first_k_dense_replace=1),
    _case("GptOssForCausalLM", _LLAMA, num_local_experts=4, num_experts_per_tok=2, head_dim=8, sliding_window=8),
    _case("GraniteMoeForCausalLM", _LLAMA, num_local_experts=4, num_experts_per_tok=2),
    _case("PhimoeForCausalLM", _LLAMA, num_local_experts=4),
    _case("SwitchTransformersForConditionalGeneration", _T5, num_experts=4, num_sparse_encoder_layers=1,
          num_sparse_decoder_layers=1, num_decoder_layers=2, inputs=_pair),
    _case("JambaForCausalLM", _LLAMA, num_experts=4, attn_layer_period=2, attn_layer_offset=1, expert_layer_period=2,
          expert_layer_offset=1, mamba_d_state=8, mamba_dt_rank=4, use_mamba_kernels=False),
)  # fmt: skip

_STATE_SPACE = (
    _case("MambaForCausalLM", _MAMBA, quick=True),
    _case("Mamba2ForCausalLM", _MAMBA, num_heads=8, head_dim=8, n_groups=1, chunk_size=8),
    _case("FalconMambaForCausalLM", _MAMBA),
    _case("RecurrentGemmaForCausalLM", _LLAMA, num_key_value_heads=1, lru_width=32, num_hidden_layers=3,
          attention_window_size=8, head_dim=8),
)  # fmt: skip

_ENCODERS = (
    _case("BertForMaskedLM", _ENCODER, quick=True),
    _case("BertModel", _ENCODER),
    _case("RobertaForSequenceClassification", _ENCODER),
    _case("DistilBertForMaskedLM", _TOKENS, vocab_size=96, dim=32, n_layers=2, n_heads=4, hidden_dim=48,
          max_position_embeddings=64),
    _case("AlbertForMaskedLM", _ENCODER, embedding_size=16),
    _case("ElectraForPreTraining", _ENCODER, embedding_size=16),
    _case("DebertaV2ForMaskedLM", _ENCODER, relative_attention=True, pos_att_type=["p2c", "c2p"],
          max_relative_positions=16),
    _case("DebertaModel", _ENCODER, relative_attention=True, pos_att_type=["p2c"], max_relative_positions=16),
    _case("MPNetModel", _ENCODER),
    _case("ModernBertForMaskedLM", _ENCODER, cls_token_id=1, sep_token_id=2, local_attention=8),
    _case("XLMRobertaForTokenClassification", _ENCODER),
    _case("BrosModel", _ENCODER, hidden_size=64, inputs=_text_and_boxes, quick=True),
    _case("SqueezeBertModel", _ENCODER, embedding_size=32, q_groups=2, k_groups=2, v_groups=2, post_attention_groups=1,
          intermediate_groups=2, output_groups=2),
)  # fmt: skip

_PAIRS = (
    _case("T5ForConditionalGeneration", _T5, inputs=_pair, quick=True),
    _case("MT5ForConditionalGeneration", _T5, inputs=_pair),
    _case("BartForConditionalGeneration", _BART, inputs=_pair, quick=True),
    _case("MarianMTModel", _BART, inputs=_pair),
    _case("PegasusForConditionalGeneration", _BART, inputs=_pair),
    _case("MBartForConditionalGeneration", _BART, inputs=_pair),
    _case("M2M100ForConditionalGeneration", _BART, inputs=_pair),
)  # fmt: skip

_IMAGES = (
    _case("ViTForImageClassification", _VISION, inputs=_pixels, quick=True),
    _case("DeiTForImageClassification", _VISION, inputs=_pixels),
    _case("BeitModel", _VISION, use_relative_position_bias=True, inputs=_pixels),
    _case("Dinov2Model", _VISION, inputs=_pixels),
    _case("SwinForImageClassification", {}, image_size=32, patch_size=4, embed_dim=16, depths=[1, 1], num_heads=[2, 2],
          window_size=4, inputs=_pixels),
    _case("ConvNextForImageClassification", {}, hidden_sizes=[8, 16], depths=[1, 1], num_stages=2, inputs=_pixels),
    _case("ResNetForImageClassification", {}, embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], inputs=_pixels),
    _case("SegformerForSemanticSegmentation", {}, num_encoder_blocks=2, depths=[1, 1], sr_ratios=[2, 1],
          hidden_sizes=[8, 16], num_attention_heads=[1, 2], patch_sizes=[7, 3], strides=[4, 2], mlp_ratios=[2, 2],
          decoder_hidden_size=16, inputs=_pixels),
    _case("MobileNetV2ForImageClassification", {}, depth_multiplier=0.35, inputs=_pixels),
)  # fmt: skip

_SOUND = (
    _case("Wav2Vec2ForCTC", _SPEECH, vocab_size=32, inputs=_wave, quick=True),
    _case("HubertModel", _SPEECH, inputs=_wave),
    _case("WavLMModel", _SPEECH, inputs=_wave),
    _case("WhisperForConditionalGeneration", _BART, num_mel_bins=8, max_source_positions=20, max_target_positions=32,
          suppress_tokens=None, begin_suppress_tokens=None, inputs=_mel),
)  # fmt: skip


_SEVERAL = (
    _case("CLIPModel", {}, text_config=lambda transformers: transformers.CLIPTextConfig(**_ENCODER).to_dict(),
          vision_config=lambda transformers: transformers.CLIPVisionConfig(**_VISION).to_dict(), projection_dim=16,
          inputs=lambda: {**_text(), **_pixels()}),
)  # fmt: skip

CASES = (*_DECODERS, *_EXPERTS, *_STATE_SPACE, *_ENCODERS, *_PAIRS, *_IMAGES, *_SOUND, *_SEVERAL)


def case_named(name: str) -> Case:
    """Return the case of a model class."""
    return next(case for case in CASES if case.name == name)
