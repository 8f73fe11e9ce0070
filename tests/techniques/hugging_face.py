"""Tiny models of every architecture family that transformers can build from a config."""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers.models.auto import modeling_auto

# Where one model has several tasks, the first one here.
TASKS = (
    "IMAGE_TEXT_TO_TEXT",
    "CAUSAL_LM",
    "MASKED_LM",
    "SEQ_TO_SEQ_CAUSAL_LM",
    "SPEECH_SEQ_2_SEQ",
    "SEQUENCE_CLASSIFICATION",
    "TOKEN_CLASSIFICATION",
    "IMAGE_CLASSIFICATION",
    "VIDEO_CLASSIFICATION",
    "AUDIO_CLASSIFICATION",
    "CTC",
)
CLASSES: dict[str, str] = {}
for names in [
    *(getattr(modeling_auto, f"MODEL_FOR_{task}_MAPPING_NAMES") for task in TASKS),
    modeling_auto.MODEL_MAPPING_NAMES,
]:
    for family, classes in names.items():
        CLASSES.setdefault(family, classes if isinstance(classes, str) else classes[0])
CLASSES["musicgen"] = "MusicgenForConditionalGeneration"
CLASSES["musicgen_melody"] = "MusicgenMelodyForConditionalGeneration"

VOCABULARY, WIDTH, LAYERS, HEADS, WIDER, HEAD, EXPERTS = 64, 32, 3, 2, 64, 16, 4
SIZES = {
    name: size
    for names, size in {
        """
            vocab_size text_vocab_size audio_vocab_size vocab_size_per_layer_input codebook_size
            entity_vocab_size num_embeddings pronunciation_vocab_size shape_vocab_size
            num_codevectors_per_group t2u_vocab_size unit_hifi_gan_vocab_size
        """: VOCABULARY,
        """
            hidden_size d_model n_embd dim embed_dim embedding_size projection_dim
            word_embed_proj_dim lru_width hidden_dim emb_dim encoder_hidden_size decoder_hidden_size
            q_lora_rank kv_lora_rank output_dim out_hidden_size projection_size fpn_hidden_size
            encoder_hidden_dim text_hidden_size audio_hidden_size condition_dim backbone_hidden_size
            output_channels mask_feature_size iou_head_hidden_dim fusion_hidden_size upsample_groups
            vector_quantization_hidden_dimension codebook_dim embedding_dim entity_emb_size
            pronunciation_embed_dim shape_embed_dim upsample_initial_channel unit_embed_dim
            hidden_size_per_layer_input latent_channels projector_hidden_size image_text_hidden_size
            loss_weighting_hidden_size vit_dim mit_hidden_size base_channels
        """: WIDTH,
        """
            num_hidden_layers n_layer n_layers num_layers encoder_layers decoder_layers
            num_encoder_layers num_decoder_layers layers encoder_num_hidden_layers
            decoder_num_hidden_layers depth speech_encoder_layers t2u_encoder_layers
            t2u_decoder_layers
        """: LAYERS,
        """
            num_attention_heads n_head n_heads num_heads encoder_attention_heads
            decoder_attention_heads num_key_value_heads linear_num_key_heads linear_num_value_heads
            encoder_num_attention_heads decoder_num_attention_heads linear_num_heads attention_heads
            index_n_heads swa_num_attention_heads swa_num_key_value_heads
            decoder_self_attention_heads decoder_cross_attention_heads mit_num_attention_heads
            prompt_num_attention_heads speech_encoder_attention_heads t2u_encoder_attention_heads
            t2u_decoder_attention_heads
        """: HEADS,
        """
            intermediate_size ffn_dim d_ff d_inner encoder_ffn_dim decoder_ffn_dim
            moe_intermediate_size shared_expert_intermediate_size ffn_hidden_size mlp_dim
            dim_feedforward encoder_feedforward_dim projection_hidden_dim
            projection_intermediate_size classifier_proj_size expert_ffn_hidden_size
            speech_encoder_intermediate_size moe_shared_expert_intermediate_size t2u_encoder_ffn_dim
            t2u_decoder_ffn_dim downsample_hidden_size mit_intermediate_size
        """: WIDER,
        """
            head_dim d_kv qk_nope_head_dim qk_rope_head_dim v_head_dim linear_key_head_dim
            linear_value_head_dim linear_head_dim index_head_dim swa_head_dim num_mel_bins
            num_pos_feats
        """: HEAD,
        """
            num_experts num_local_experts n_routed_experts moe_num_experts num_filters
            zero_expert_num
        """: EXPERTS,
        """
            max_position_embeddings n_positions max_source_positions max_target_positions
            max_2d_position_embeddings
        """: 128,
        "image_size pretrain_image_size": 32,
        "patch_size": 8,
        "num_queries": 4,
        "num_experts_per_tok num_experts_per_token num_frames moe_topk eos_token_id": 2,
        "n_group topk_group num_expert_group bos_token_id": 1,
        "pad_token_id decoder_start_token_id": 0,
    }.items()
    for name in names.split()
}
# Lists with an entry for each stage of a model.
STAGES = {
    name: size
    for size, names in {
        LAYERS: "depths stage_num_blocks stage_numb_of_layers",
        HEADS: "num_heads num_attention_heads",
        WIDTH: """
            hidden_sizes embed_dim embed_dims conv_dim stem_channels stage_in_channels
            stage_mid_channels stage_out_channels encoder_in_channels decoder_in_channels
            neck_hidden_sizes
        """,
    }.items()
    for name in names.split()
}


def tiny_settings(config: Any) -> dict[str, Any]:
    settings: dict[str, Any] = {}
    for name, value in vars(config).items():
        if isinstance(value, transformers.PreTrainedConfig):
            settings[name] = {"model_type": value.model_type, **tiny_settings(value)}
        elif name.endswith("token_id") and name in SIZES:
            settings[name] = SIZES[name]
        elif name in SIZES and type(value) is int:
            settings[name] = min(value, SIZES[name])
        elif name.endswith(("_token_id", "_token_index")) and type(value) is int:
            settings[name] = min(value, 60)
        elif name == "_out_indices" and hasattr(config, "depths"):
            settings["out_indices"] = value
        elif isinstance(value, list | tuple) and value:
            settings |= _tiny_list(name, value, config)
        elif isinstance(value, dict) and "mrope_section" in value:
            settings[name] = ROTATION
    return settings | OWN.get(config.model_type, {})


def _tiny_list(name: str, values: Any, config: Any) -> dict[str, Any]:
    if name == "image_size":
        return {name: [min(value, SIZES[name]) for value in values]}
    if STAGES.get(name) == LAYERS:
        return {name: [min(value, 2) for value in values]}
    if STAGES.get(name) == HEADS:
        return {name: [HEADS] * len(values)}
    if STAGES.get(name) == WIDTH and type(values[0]) is int:
        return {name: [value // 8 if value > 8 else value for value in values]}
    layers = getattr(config, "num_hidden_layers", None)
    if len(values) == layers and all(isinstance(value, str) for value in values):
        kinds = list(dict.fromkeys(values))
        return {name: (kinds * LAYERS)[: min(layers, LAYERS)]}
    return {}


def make_config(family: str, **settings: Any) -> Any:
    config_class = transformers.CONFIG_MAPPING[family]
    config = config_class(**(tiny_settings(config_class()) | settings))
    if config.is_encoder_decoder:
        config.decoder_start_token_id = 0
    return config


def tiny(family: str, of: str | None = None, **settings: Any) -> Any:
    """A model of a family, of a class if it is named, with other settings where they are given."""
    torch.manual_seed(1)
    return getattr(transformers, of or CLASSES[family])(make_config(family, **settings))


HYBRID = {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8, "mamba_n_groups": 1}
ROTATION = {
    "rope_type": "default",
    "rope_theta": 10000.0,
    "mrope_section": [3, 3, 2],
    "partial_rotary_factor": 1.0,
}


def _each(families: str, **settings: Any) -> dict[str, dict[str, Any]]:
    return dict.fromkeys(families.split(), settings)


# By the model type of a config, wherever it is nested.
OWN: dict[str, dict[str, Any]] = {
    **_each(
        """
        glm4v_text glm4v_moe_text glm_image_text glm_ocr_text
        paddleocr_vl_text qwen2_5_omni_text qwen2_5_vl_text qwen2_vl_text
        """,
        rope_parameters=ROTATION,
    ),
    **_each("swin donut-swin maskformer-swin", image_size=64, window_size=2),
    **_each("lfm2 lfm2_moe", layer_types=["conv", "full_attention", "conv"]),
    **_each("hunyuan_v1_dense hunyuan_v1_moe ministral", head_dim=16),
    **_each("gemma3n_text gemma4_unified_text", num_kv_shared_layers=0),
    "bamba": {**HYBRID, "attn_layer_indices": [1]},
    "blenderbot": {"encoder_layers": 3},
    "codegen": {"rotary_dim": 8, "n_head": 4},
    "deepseek_v2": {"topk_group": 1, "n_group": 1, "num_experts_per_tok": 2},
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2},
    "ernie4_5_moe": {"moe_k": 2},
    "esm": {"vocab_size": 64},
    "falcon_h1": {**HYBRID, "mamba_d_ssm": 64},
    "gpt_neo": {"attention_types": [[["global", "local", "global"], 1]]},
    "gptj": {"rotary_dim": 8},
    "granitemoehybrid": {**HYBRID, "layer_types": ["mamba", "attention", "mamba"]},
    "jamba": {"attn_layer_period": 3, "attn_layer_offset": 1},
    "layoutlmv3": {"coordinate_size": 6, "shape_size": 4},
    "lilt": {"hidden_size": 48},
    "mamba2": {"num_heads": 4, "head_dim": 16, "n_groups": 1, "state_size": 8},
    "mimo_v2_flash": {"num_attention_heads": 8, "num_key_value_heads": 4},
    "mistral4": {"qk_head_dim": 32, "head_dim": 32},
    "nemotron": {"head_dim": 16, "num_key_value_heads": 2},
    "nemotron_h": {"layers_block_type": ["mamba", "attention", "mlp"]},
    "qwen3_next": {"layer_types": ["linear_attention", "full_attention", "linear_attention"]},
    "t5gemma2_text": {"dropout_rate": 0.0},
    "xlstm": {"use_cache": False},
    "zamba": {"num_hidden_layers": 6, "layer_types": ["mamba", "mamba", "hybrid"] * 2},
    "zamba2": {
        "num_hidden_layers": 4,
        "layer_types": ["mamba", "hybrid", "mamba", "hybrid"],
        "hybrid_layer_ids": [1, 3],
        "mamba_d_state": 8,
        "n_mamba_heads": 4,
        "mamba_headdim": 16,
        "mamba_ngroups": 1,
        "use_shared_attention_adapter": False,
    },
}


class Tiny(nn.Module):
    """A model of a family with a loss of all that it returns."""

    def __init__(self, family: str) -> None:
        super().__init__()
        self.model = tiny(family)

    def forward(self, batch: Any) -> Tensor:
        output = self.model(**batch)
        values = [value for value in output.values() if isinstance(value, Tensor)]
        values = values or list(next(iter(output.values())))
        # A loss is a number already; its square could not be split into micro-batches.
        return torch.stack(
            [
                v.float().clamp(-1e4, 1e4).square().mean() if v.ndim else v.float()
                for v in values
                if v.is_floating_point()
            ]
        ).sum()


@contextlib.contextmanager
def caches_off(model: nn.Module) -> Iterator[None]:
    """Set ``use_cache=False``, as Hugging Face's own checkpointing does.

    Keys and values that were copied into a cache have other strides, for which some CPUs use other
    kernels: on an AMD EPYC the last digits of some decoders then differ, without any technique.
    """
    configs = {id(c): c for m in model.modules() if (c := getattr(m, "config", None)) is not None}
    before = [(c, c.use_cache) for c in configs.values() if getattr(c, "use_cache", None)]
    for config, _ in before:
        config.use_cache = False
    try:
        yield
    finally:
        for config, value in before:
            config.use_cache = value


# Reason -> families.
REASONS = {
    "gives zeros with the small weights that transformers begins with": """
        sam_hq_vision_model sam_vision_model
    """,
    "has no `forward`": "bark glm_image_vqmodel",
    "fails by itself in transformers 5.24: its language model has no `image_outputs`": "llama4",
    "has settings of its own for some layers, with over 8 M parameters": """
        dots3_note dots3_note_text
    """,
    "is not exported by transformers": "voxtral_realtime_text",
    "its default neck does not fit its default backbone": "pp_ocrv6_small_det",
    "needs a configuration of its convolutions, which has no default": "pp_ocrv6_medium_det",
    "needs a map of layers and a rate of downsampling, which have no default": "granite4_vision",
    "needs an inference session for its video": """
        edgetam_video sam2_video sam3_tracker_video sam3_video
    """,
    "needs detectron2": "layoutlmv2",
    "needs natten": "dinat",
    "needs settings or inputs of its own": """
        align apertus1p5 audio-spectrogram-transformer audioflamingo3_encoder autoformer bit blip-2
        blip_2_qformer blt bridgetower bros canary chameleon clap clvp cohere_asr cohere_compass
        cohere_compass_text cvt dac dbrx decision_transformer deepseek_ocr2 depth_pro dia
        diffusion_gemma efficientloftr efficientnet emu3 encodec ernie4_5_vl_moe
        fastspeech2_conformer fastspeech2_conformer_with_hifigan fun_asr_nano fun_asr_nano_encoder
        gemma3n_audio granite_speech5_ctc granite_speech5_encoder hunyuan_vl hunyuan_vl_text idefics
        informer inkling2_vision instructblip instructblipvideo kosmos-2 kyutai_speech_to_text
        lasr_ctc lasr_encoder levit lightglue lw_detr lxmert mimi mimi_decoder mimi_encoder
        minicpm_ocr_vision minicpmv4_7_vision mobilevitv2 molmo2 moonshine_streaming
        muse_glimmer_assistant muse_spark muse_spark_audio musicgen musicgen_melody nemotron3_5_asr
        nemotron3_5_transcribe_asr_audio nemotron3_5_transcribe_audio
        nemotron3_5_transcribe_word_timestamp nemotron3_diarization nemotron3_diarization_audio
        nemotron_asr_streaming nemotron_asr_streaming_encoder nemotron_h_omni neucodec omniasr_audio
        omniasr_ctc oneformer parakeet_ctc parakeet_encoder parakeet_rnnt parakeet_tdt patchtsmixer
        patchtst pe_audio pe_audio_encoder perceiver pix2struct pocket_tts_audio_tokenizer
        pocket_tts_audio_tokenizer_decoder pocket_tts_audio_tokenizer_encoder pp_doclayout_v3
        pp_formulanet pp_ocrv5_mobile_rec pp_ocrv5_server_rec pp_ocrv6_small_rec pp_ocrv6_tiny_rec
        qwen3_asr_encoder qwen4_exp qwen4_exp_text sam2 sam2_hiera_det_model sam2_vision_model
        sam3_tracker seggpt siglip2 speech-encoder-decoder speech_to_text step3p7 textnet
        time_series_transformer timesfm timesfm2_5 tvp udop univnet uvdoc
        vibevoice_acoustic_tokenizer vibevoice_acoustic_tokenizer_decoder
        vibevoice_acoustic_tokenizer_encoder videoprism videoprism_vision_model vits vjepa2
        voxtral_realtime wav2vec2-bert wavtokenizer xcodec xcodec2 xmod
    """,
    "needs scipy": "inkling_mm_model",
    "needs the keys and values of the model that it drafts for": """
        gemma4_assistant gemma4_unified_assistant
    """,
    "needs timm": """
        conditional_detr dab-detr deformable_detr detr edgetam edgetam_vision_model fast_vlm gemma3n
        gemma3n_vision omdet-turbo pe_audio_video pe_audio_video_encoder pe_video pe_video_encoder
        perception_lm table-transformer timm_backbone timm_wrapper
    """,
    "needs torchaudio": "higgs_audio_v2_tokenizer",
    "returns codes only, which have no gradient": "wavtokenizer_encoder",
    "seeds torch anew in each layer: trains differently each time by itself": "reformer",
}
NOT_TRAINED = {family: why for why, names in REASONS.items() for family in names.split()}
FAMILIES = [family for family in sorted(CLASSES) if family not in NOT_TRAINED]
