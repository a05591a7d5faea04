"""Hugging Face `transformers`, each architecture from a tiny configuration: text, images, sound and series."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from zoo.entries import Called, Entry, Inputs, images, numbers, tokens

SYMBOLS = {"vocab_size": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
SMALL: dict[str, Any] = {
    **SYMBOLS, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "max_position_embeddings": 64,
}  # fmt: skip
SHARED_KEYS: dict[str, Any] = {**SMALL, "num_key_value_heads": 2}
GPT: dict[str, Any] = {**SYMBOLS, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "n_ctx": 64}
EXPERTS: dict[str, Any] = {
    **SHARED_KEYS, "num_local_experts": 4, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32, "n_routed_experts": 4,
}  # fmt: skip
LATENT: dict[str, Any] = {
    **EXPERTS, "n_group": 1, "topk_group": 1, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8, "v_head_dim": 8, "first_k_dense_replace": 1, "n_shared_experts": 1,
    "num_key_value_heads": 4,
}  # fmt: skip
PAIR: dict[str, Any] = {
    **SYMBOLS, "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "max_position_embeddings": 64,
    "decoder_start_token_id": 2,
}  # fmt: skip
T5: dict[str, Any] = {
    **SYMBOLS, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_decoder_layers": 2, "num_heads": 4,
    "decoder_start_token_id": 0,
}  # fmt: skip
PATCHES: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "image_size": 32,
    "patch_size": 8, "num_labels": 5,
}  # fmt: skip
STAGES: dict[str, Any] = {"num_labels": 5}
WAVES: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 40,
    "conv_dim": (16, 16, 16), "conv_stride": (5, 2, 2), "conv_kernel": (10, 3, 3), "num_labels": 5,
    "num_conv_pos_embeddings": 16, "num_conv_pos_embedding_groups": 4, "classifier_proj_size": 16,
    "num_feat_extract_layers": 3,
}  # fmt: skip


def entry(
    architecture: str,
    task: str,
    settings: dict[str, Any],
    inputs: Inputs,
    names: Sequence[str],
    result: str | None = None,
) -> Entry:
    """A network from the tables of `transformers`: `AutoModelFor<task>` of a configuration."""

    def build() -> nn.Module:
        import transformers

        config = transformers.AutoConfig.for_model(architecture, **settings)
        return Called(getattr(transformers, f"AutoModel{task}").from_config(config), names, result)

    return Entry(f"transformers/{architecture}", build, inputs, ("transformers",))


def causal(architecture: str, settings: dict[str, Any] = SHARED_KEYS, **more: Any) -> Entry:
    return entry(architecture, "ForCausalLM", {**settings, **more}, tokens(), ["input_ids"])


def classifying(architecture: str, settings: dict[str, Any] = SMALL, length: int = 12, **more: Any) -> Entry:
    settings = {**settings, "num_labels": 5, **more}
    return entry(architecture, "ForSequenceClassification", settings, tokens(length), ["input_ids"])


def masked(architecture: str, settings: dict[str, Any] = SMALL, length: int = 12, **more: Any) -> Entry:
    return entry(architecture, "ForMaskedLM", {**settings, **more}, tokens(length), ["input_ids"])


def translating(architecture: str, settings: dict[str, Any] = PAIR, length: int = 12, **more: Any) -> Entry:
    return entry(
        architecture, "ForSeq2SeqLM", {**settings, **more}, tokens(length, times=2), ["input_ids", "decoder_input_ids"]
    )


def seeing(architecture: str, settings: dict[str, Any] = PATCHES, size: int = 32, **more: Any) -> Entry:
    return entry(architecture, "ForImageClassification", {**settings, **more}, images(size), ["pixel_values"])


def hearing(architecture: str, settings: dict[str, Any] = WAVES, length: int = 800, **more: Any) -> Entry:
    return entry(architecture, "ForAudioClassification", {**settings, **more}, numbers(2, length), ["input_values"])


def spectrogram_and_tokens() -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(2, 16, 32, generator=generator), torch.randint(4, 60, (2, 6), generator=generator)


def frames_and_tokens() -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(2, 32, 16, generator=generator), torch.randint(4, 60, (2, 6), generator=generator)


# fmt: off
ENTRIES: list[Entry] = [
    # decoders
    causal("llama"), causal("mistral"), causal("qwen2"), causal("qwen3", head_dim=8), causal("gemma", head_dim=8),
    causal("gemma2", head_dim=8, sliding_window=8), causal("gemma3_text", head_dim=8, sliding_window=8),
    causal("phi"), causal("phi3"), causal("stablelm"), causal("olmo"), causal("olmo2"), causal("cohere"),
    causal("cohere2", sliding_window=8), causal("starcoder2"), causal("granite"), causal("glm", head_dim=8),
    causal("glm4", head_dim=8), causal("helium", head_dim=8), causal("nemotron"), causal("persimmon", SMALL),
    causal("gpt_neox", SMALL), causal("gpt_neox_japanese", SMALL), causal("smollm3"), causal("arcee"),
    causal("exaone4", sliding_window=8), causal("seed_oss", head_dim=8), causal("bitnet"), causal("diffllama"),
    causal("apertus"), causal("ministral", head_dim=8, sliding_window=8), causal("ernie4_5", head_dim=8),
    causal("bloom", {**SYMBOLS, "hidden_size": 32, "n_layer": 2, "n_head": 4}),
    causal("opt", {**SMALL, "ffn_dim": 48, "word_embed_proj_dim": 32}),
    causal("gpt2", GPT), causal("gptj", {**GPT, "rotary_dim": 4}), causal("codegen", {**GPT, "rotary_dim": 4}),
    causal("gpt_bigcode", GPT), causal("openai-gpt", GPT), causal("ctrl", {**GPT, "dff": 48}),
    causal("gpt_neo", {
        **SYMBOLS, "hidden_size": 32, "num_layers": 2, "num_heads": 4, "intermediate_size": 48,
        "attention_types": [[["global", "local"], 1]], "max_position_embeddings": 64, "window_size": 8,
    }),
    causal("falcon", SMALL, ffn_hidden_size=48), causal("mpt", {
        **SYMBOLS, "d_model": 32, "n_heads": 4, "n_layers": 2, "max_seq_len": 64, "expansion_ratio": 2,
    }),
    causal("xglm", {**SYMBOLS, "d_model": 32, "num_layers": 2, "attention_heads": 4, "ffn_dim": 48}),
    causal("biogpt", SMALL), causal("bert-generation", SMALL, is_decoder=True),
    causal("mamba", {**SYMBOLS, "hidden_size": 32, "state_size": 4, "num_hidden_layers": 2}),
    causal("falcon_mamba", {**SYMBOLS, "hidden_size": 32, "state_size": 4, "num_hidden_layers": 2}),
    causal("rwkv", {**SYMBOLS, "hidden_size": 32, "attention_hidden_size": 32, "num_hidden_layers": 2}),
    causal("recurrent_gemma", SHARED_KEYS, lru_width=32, head_dim=8, attention_window_size=8, num_hidden_layers=3),
    causal("mixtral", EXPERTS), causal("qwen2_moe", EXPERTS), causal("qwen3_moe", EXPERTS, head_dim=8),
    causal("olmoe", EXPERTS), causal("granitemoe", EXPERTS), causal("deepseek_v3", LATENT),
    causal("gpt_oss", EXPERTS, head_dim=8, sliding_window=8), causal("lfm2", SHARED_KEYS, block_ff_dim=48),
    # encoders
    *(classifying(name) for name in (
        "bert", "roberta", "camembert", "xlm-roberta", "xlm-roberta-xl", "albert", "electra", "deberta",
        "mpnet", "ernie", "rembert", "megatron-bert", "layoutlm", "roberta-prelayernorm",
        "data2vec-text", "ibert", "nystromformer", "yoso", "mra", "fnet", "roc_bert", "esm",
    )),
    classifying("convbert", embedding_size=32),
    classifying("deberta-v2", relative_attention=True, pos_att_type=["p2c", "c2p"], position_buckets=8),
    classifying("distilbert", {**SYMBOLS, "dim": 32, "hidden_dim": 48, "n_layers": 2, "n_heads": 4}),
    classifying("xlm", {**SYMBOLS, "emb_dim": 32, "n_layers": 2, "n_heads": 4, "n_langs": 1}),
    classifying("flaubert", {**SYMBOLS, "emb_dim": 32, "n_layers": 2, "n_heads": 4, "n_langs": 1}),
    classifying("xlnet", {**SYMBOLS, "d_model": 32, "n_layer": 2, "n_head": 4, "d_inner": 48}),
    classifying("funnel", {
        **SYMBOLS, "d_model": 32, "n_head": 4, "d_head": 8, "d_inner": 48, "block_sizes": [1, 1, 1],
        "num_decoder_layers": 1,
    }),
    classifying("squeezebert", embedding_size=32), classifying("roformer", embedding_size=32),
    classifying("longformer", length=16, attention_window=8),
    classifying("big_bird", length=64, block_size=4, num_random_blocks=1, max_position_embeddings=128),
    classifying("mobilebert", intra_bottleneck_size=16, embedding_size=16, true_hidden_size=16),
    classifying("modernbert", global_attn_every_n_layers=2, local_attention=8, cls_token_id=1, sep_token_id=2),
    classifying("luke", entity_vocab_size=10, entity_emb_size=16), classifying("xmod", languages=["en_XX"],
                                                                             default_language="en_XX"),
    classifying("perceiver", {
        **SYMBOLS, "d_model": 32, "d_latents": 32, "num_latents": 8, "num_blocks": 1, "num_self_attends_per_block": 2,
        "num_self_attention_heads": 4, "num_cross_attention_heads": 4, "max_position_embeddings": 12,
    }),
    classifying("reformer", {
        **SYMBOLS, "hidden_size": 32, "attention_head_size": 8, "num_attention_heads": 4, "feed_forward_size": 48,
        "attn_layers": ["local", "lsh"], "axial_pos_shape": [4, 4], "axial_pos_embds_dim": [16, 16],
        "local_attn_chunk_length": 4, "lsh_attn_chunk_length": 4, "max_position_embeddings": 16, "num_hashes": 1,
        "num_buckets": 4, "is_decoder": False,
    }, length=16),
    # pairs
    *(translating(name) for name in (
        "bart", "mbart", "pegasus", "blenderbot", "blenderbot-small", "m2m_100", "marian", "plbart", "mvp",
    )),
    translating("fsmt", src_vocab_size=64, tgt_vocab_size=64, langs=["en", "de"]),
    translating("led", length=16, attention_window=8, max_encoder_position_embeddings=64,
                max_decoder_position_embeddings=64),
    translating("prophetnet", {
        **SYMBOLS, "hidden_size": 32, "num_encoder_layers": 2, "num_decoder_layers": 2, "encoder_ffn_dim": 48,
        "decoder_ffn_dim": 48, "num_encoder_attention_heads": 4, "num_decoder_attention_heads": 4, "ngram": 2,
        "max_position_embeddings": 64, "num_buckets": 8,
    }),
    *(translating(name, T5) for name in ("t5", "mt5", "umt5", "longt5")),
    translating("switch_transformers", T5, num_experts=4, num_sparse_encoder_layers=1, num_sparse_decoder_layers=1),
    translating("pegasus_x", block_size=4, num_global_tokens=2),
    translating("bigbird_pegasus", length=64, attention_type="block_sparse", block_size=4, num_random_blocks=1,
                max_position_embeddings=128),
    entry("whisper", "ForSpeechSeq2Seq", {
        **PAIR, "num_mel_bins": 16, "max_source_positions": 16, "max_target_positions": 32,
    }, spectrogram_and_tokens, ["input_features", "decoder_input_ids"]),
    entry("speech_to_text", "ForSpeechSeq2Seq", {
        **PAIR, "input_feat_per_channel": 16, "input_channels": 1, "conv_channels": 24, "max_source_positions": 64,
        "max_target_positions": 32,
    }, frames_and_tokens, ["input_features", "decoder_input_ids"]),
    # images
    *(seeing(name) for name in (
        "vit", "vit_msn", "beit", "data2vec-vision", "dinov2", "ijepa", "dinov2_with_registers",
    )),
    seeing("swin", STAGES, image_size=32, patch_size=4, embed_dim=16, depths=[2, 2], num_heads=[2, 4], window_size=4),
    seeing("swinv2", STAGES, image_size=32, patch_size=4, embed_dim=16, depths=[2, 2], num_heads=[2, 4], window_size=4),
    seeing("convnext", STAGES, hidden_sizes=[8, 16, 24, 32], depths=[1, 1, 2, 1]),
    seeing("convnextv2", STAGES, hidden_sizes=[8, 16, 24, 32], depths=[1, 1, 2, 1]),
    seeing("poolformer", STAGES, hidden_sizes=[8, 16, 24, 32], depths=[1, 1, 1, 1]),
    seeing("segformer", STAGES, hidden_sizes=[8, 16, 24, 32], depths=[1, 1, 1, 1], num_attention_heads=[1, 2, 4, 4]),
    seeing("pvt", STAGES, image_size=32, hidden_sizes=[8, 16, 24, 32], depths=[1, 1, 1, 1],
           num_attention_heads=[1, 2, 4, 4]),
    seeing("pvt_v2", STAGES, image_size=32, hidden_sizes=[8, 16, 24, 32], depths=[1, 1, 1, 1],
           num_attention_heads=[1, 2, 4, 4]),
    seeing("focalnet", STAGES, image_size=32, embed_dim=16, depths=[1, 1], hidden_sizes=[16, 32], focal_levels=[1, 1],
           focal_windows=[3, 3]),
    seeing("hiera", STAGES, size=64, image_size=[64, 64], embed_dim=8, depths=[1, 1, 1, 1], num_heads=[1, 2, 4, 8]),
    seeing("mobilevit", STAGES, image_size=64, hidden_sizes=[16, 24, 32], neck_hidden_sizes=[8, 8, 16, 16, 24, 32, 48],
           num_attention_heads=4, size=64),
    seeing("mobilevitv2", STAGES, size=64, image_size=64, width_multiplier=0.25),
    seeing("mobilenet_v1", STAGES, depth_multiplier=0.25), seeing("mobilenet_v2", STAGES, depth_multiplier=0.35),
    seeing("resnet", STAGES, embedding_size=16, hidden_sizes=[16, 32, 48, 64], depths=[1, 1, 1, 1]),
    seeing("regnet", STAGES, embedding_size=8, hidden_sizes=[16, 32, 48, 64], depths=[1, 1, 1, 1], groups_width=8),
    seeing("bit", STAGES, embedding_size=16, hidden_sizes=[32, 64, 96, 128], depths=[1, 1, 1, 1], num_groups=8),
    seeing("efficientnet", STAGES, width_coefficient=0.25, depth_coefficient=0.25, image_size=64,
           size=64, hidden_dim=320),
    seeing("swiftformer", STAGES, size=64, image_size=64, embed_dims=[16, 16, 32, 32], depths=[1, 1, 1, 1]),
    seeing("textnet", STAGES, size=64),
    entry("imagegpt", "ForImageClassification", {**GPT, "num_labels": 5}, tokens(), ["input_ids"]),
    seeing("clip", {"vision_config": PATCHES, "text_config": SMALL, "num_labels": 5}),
    seeing("siglip", {"vision_config": PATCHES, "text_config": SMALL, "num_labels": 5}),
    # sound
    *(hearing(name) for name in ("wav2vec2", "hubert", "wavlm", "unispeech", "unispeech-sat", "data2vec-audio")),
    hearing("sew", squeeze_factor=2), hearing("wav2vec2-conformer"),
    entry("audio-spectrogram-transformer", "ForAudioClassification", {
        **PATCHES, "num_mel_bins": 16, "max_length": 32, "frequency_stride": 8, "time_stride": 8,
    }, numbers(2, 32, 16), ["input_values"]),
]
# fmt: on
