"""Tiny models of every architecture family that transformers can build from a config."""

import inspect
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers.models.auto import modeling_auto

# Where one model has several tasks, the first one here.
TASKS = (
    "CAUSAL_LM",
    "MASKED_LM",
    "SEQ_TO_SEQ_CAUSAL_LM",
    "SPEECH_SEQ_2_SEQ",
    "IMAGE_TEXT_TO_TEXT",
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

SIZES: dict[str, Any] = {
    **dict.fromkeys(("vocab_size", "text_vocab_size", "audio_vocab_size"), 64),
    **dict.fromkeys(
        (
            "hidden_size",
            "d_model",
            "n_embd",
            "dim",
            "embed_dim",
            "embedding_size",
            "projection_dim",
            "word_embed_proj_dim",
            "lru_width",
            "hidden_dim",
            "emb_dim",
            "encoder_hidden_size",
            "decoder_hidden_size",
            "q_lora_rank",
            "kv_lora_rank",
            "output_dim",
        ),
        32,
    ),
    **dict.fromkeys(
        (
            "num_hidden_layers",
            "n_layer",
            "n_layers",
            "num_layers",
            "encoder_layers",
            "decoder_layers",
            "num_encoder_layers",
            "num_decoder_layers",
            "encoder_num_hidden_layers",
            "decoder_num_hidden_layers",
            "depth",
        ),
        3,
    ),
    **dict.fromkeys(
        (
            "num_attention_heads",
            "n_head",
            "n_heads",
            "num_heads",
            "encoder_attention_heads",
            "decoder_attention_heads",
            "num_key_value_heads",
            "linear_num_key_heads",
            "linear_num_value_heads",
            "encoder_num_attention_heads",
            "decoder_num_attention_heads",
        ),
        2,
    ),
    **dict.fromkeys(
        (
            "intermediate_size",
            "ffn_dim",
            "d_ff",
            "d_inner",
            "n_inner",
            "encoder_ffn_dim",
            "decoder_ffn_dim",
            "moe_intermediate_size",
            "shared_expert_intermediate_size",
            "ffn_hidden_size",
        ),
        64,
    ),
    **dict.fromkeys(
        (
            "head_dim",
            "d_kv",
            "qk_nope_head_dim",
            "qk_rope_head_dim",
            "v_head_dim",
            "linear_key_head_dim",
            "linear_value_head_dim",
        ),
        16,
    ),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    "num_experts_per_tok": 2,
    "max_position_embeddings": 128,
    "n_positions": 128,
    "max_source_positions": 128,
    "max_target_positions": 128,
    "image_size": 32,
    "patch_size": 8,
    "num_mel_bins": 16,
    **dict.fromkeys(("pad_token_id", "decoder_start_token_id"), 0),
    "bos_token_id": 1,
    "eos_token_id": 2,
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
    return settings


def make_config(family: str) -> Any:
    config_class = transformers.CONFIG_MAPPING[family]
    settings = tiny_settings(config_class()) | OWN.get(family, {})
    config = config_class(**settings)
    if config.is_encoder_decoder:
        config.decoder_start_token_id = 0
    return config


HYBRID = {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8, "mamba_n_groups": 1}
SECTIONS = {
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10000.0,
        "mrope_section": [2, 3, 3],
        "partial_rotary_factor": 1.0,
    }
}
OWN: dict[str, dict[str, Any]] = {
    "gptj": {"rotary_dim": 8},
    "codegen": {"rotary_dim": 8, "n_head": 4},
    "ernie4_5_moe": {"moe_k": 2},
    "deepseek_v2": {"topk_group": 1, "n_group": 1},
    **dict.fromkeys(("glm4v_text", "glm_image_text", "glm_ocr_text"), SECTIONS),
    "bamba": {**HYBRID, "attn_layer_indices": [1]},
    "granitemoehybrid": {**HYBRID, "layer_types": ["mamba", "attention", "mamba"]},
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
    "zamba": {"num_hidden_layers": 6, "attn_layer_period": 3, "attn_layer_offset": 2},
    "qwen3_next": {"layer_types": ["linear_attention", "full_attention", "linear_attention"]},
    "nemotron_h": {"layers_block_type": ["mamba", "attention", "mlp"]},
    "jamba": {"attn_layer_period": 3, "attn_layer_offset": 1},
    "lfm2": {"layer_types": ["conv", "full_attention", "conv"]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention", "conv"]},
    "mamba2": {"num_heads": 4, "head_dim": 16, "n_groups": 1, "state_size": 8},
    "gpt_neo": {"attention_types": [[["global", "local", "global"], 1]]},
    "ministral": {"head_dim": 16},
    "nemotron": {"head_dim": 16},
    "autoformer": {"prediction_length": 4},
    "informer": {"prediction_length": 4},
    "time_series_transformer": {"prediction_length": 4},
    "reformer": {"is_decoder": True},
    "esm": {"vocab_size": 64},
    "hunyuan_v1_dense": {"head_dim": 16},
    "hunyuan_v1_moe": {"head_dim": 16},
    "falcon_h1": {**HYBRID, "mamba_d_ssm": 64},
}
BATCH = 2
SEQ_TO_SEQ = modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES
FRAMES_FIRST = {
    "canary",
    "cohere_asr",
    "granite_speech5_ctc",
    "granite_speech5_encoder",
    "lasr_ctc",
    "lasr_encoder",
    "parakeet_ctc",
    "parakeet_encoder",
    "speech_to_text",
    "wav2vec2-bert",
}


class Tiny(nn.Module):
    """A model of a family with a loss of all that it returns."""

    def __init__(self, family: str) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.model = getattr(transformers, CLASSES[family])(make_config(family))

    def forward(self, batch: Any) -> Tensor:
        output = self.model(**batch)
        values = [value for value in output.values() if isinstance(value, Tensor)]
        return torch.stack(
            [v.float().square().mean() for v in values if v.is_floating_point() and v.requires_grad]
        ).sum()


def make_inputs(model: Any, seed: int = 0) -> dict[str, Tensor]:
    random = torch.Generator().manual_seed(seed)
    config, takes = model.config, inspect.signature(type(model).forward).parameters
    wanted = [model.main_input_name]
    if wanted == ["input_ids"] and CLASSES[config.model_type].endswith("Model"):
        wanted += ["pixel_values"] if "pixel_values" in takes else []  # as CLIP's
    wanted += ["bbox"] if "bbox" in takes else []
    if wanted == ["pixel_values"] and "input_ids" in takes:
        wanted += ["input_ids"]
    inputs = {name: _make_input(name, config, random) for name in wanted}
    if CLASSES[config.model_type] in SEQ_TO_SEQ.values():
        inputs["labels"] = torch.randint(3, 60, (BATCH, 12), generator=random)
    elif config.is_encoder_decoder and "decoder_input_ids" in takes:
        inputs["decoder_input_ids"] = torch.randint(3, 60, (BATCH, 6), generator=random)
    return inputs


def _make_input(name: str, config: Any, random: torch.Generator) -> Tensor:
    if name == "input_ids":
        return torch.randint(3, 60, (BATCH, 12), generator=random)
    if name == "bbox":
        return torch.tensor([1, 2, 3, 4]).expand(BATCH, 12, 4)
    if name == "pixel_values":
        vision = getattr(config, "vision_config", config)
        size = getattr(vision, "image_size", 32)
        size = size if isinstance(size, int) else size[0]
        channels = getattr(vision, "num_channels", 3)
        return torch.randn(BATCH, channels, size, size, generator=random)
    if name == "input_values":
        channel = (1,) if config.model_type in ("dac", "encodec", "mimi") else ()
        return torch.randn(BATCH, *channel, 8000, generator=random)
    encoder = getattr(config, "encoder_config", getattr(config, "audio_config", config))
    bins = getattr(encoder, "num_mel_bins", getattr(encoder, "input_dim", 16))
    frames = 2 * getattr(encoder, "max_source_positions", 64)
    shape = (BATCH, frames, bins) if config.model_type in FRAMES_FIRST else (BATCH, bins, frames)
    return torch.randn(shape, generator=random)


# Reason -> families. What is not tried yet may well train: take its name out and see.
REASONS = {
    "its tiny config has over 8 M parameters": """
        align bark bit blt clap convnext convnextv2 cvt depth_pro dinov3_convnext
        dots3_note_text efficientnet fastspeech2_conformer_with_hifigan florence2 gemma4
        gemma4_text glm46v glm4v glm4v_moe glm4v_moe_vision glm4v_vision glm5_next
        glm5_next_vision glm_ocr glm_ocr_vision glmga inkling2_vision janus longcat_flash
        luke muse_glimmer perceiver pvt regnet resnet roc_bert sam2_hiera_det_model textnet
        univnet vibevoice vibevoice_acoustic_tokenizer vibevoice_acoustic_tokenizer_decoder
        vibevoice_acoustic_tokenizer_encoder vibevoice_asr vits vjepa2 xcodec2
    """,
    "needs a config of its own": """
        bridgetower cohere_compass cohere_compass_text conditional_detr cosmos3_edge
        cosmos3_edge_text csm d_fine dab-detr dbrx deepseek_ocr2 deformable_detr deimv2
        diffusion_gemma donut-swin dots1 dots3_note edgetam edgetam_video
        edgetam_vision_model efficientloftr embedding_gemma2 emu3 ernie4_5_vl_moe
        fun_asr_nano gemma3n_text gemma4_assistant gemma4_unified_assistant
        gradium_phonon_tts granite4_vision granite_docling grounding-dino hunyuan_vl
        hunyuan_vl_text inkling2 kyutai_speech_to_text llama4 lw_detr mask2former maskformer
        maskformer-swin mimi mimi_decoder mllama mm-grounding-dino molmo2
        moonshine_streaming muse_spark muse_spark_audio musicflamingo musicgen
        musicgen_melody nemo_speechlm nemotron nemotron3_5_transcribe_audio
        nemotron3_diarization nemotron_h_omni omdet-turbo oneformer pocket_tts
        pocket_tts_audio_tokenizer pocket_tts_audio_tokenizer_decoder pp_doclayout_v3
        pp_doclayout_v4 pp_ocrv5_mobile_rec pp_ocrv5_server_rec pp_ocrv6_medium_det
        pp_ocrv6_small_det pp_ocrv6_small_rec pp_ocrv6_tiny_rec qwen3_5 qwen3_5_moe
        qwen4_exp reformer rf_detr rt_detr rt_detr_v2 sam2 sam2_video sam2_vision_model sam3
        sam3_lite_text sam3_tracker sam3_tracker_video sam3_video sam3_vision_model swin2sr
        swinv2 t5gemma2_encoder table-transformer tvp uvdoc voxtral_realtime_text
    """,
    "needs a config or inputs of its own": """
        audio-spectrogram-transformer axk1 bailing_hybrid blenderbot blip-2 bros clvp
        decision_transformer deepseek_v2 dia glm4v_moe_text glm5_next_text glm_image
        glm_image_vqmodel granite_speech5_ctc granite_speech5_encoder kimi_linear lasr_ctc
        lasr_encoder layoutlmv3 levit lightglue lilt lxmert mgp-str mimi_encoder
        mimo_v2_flash minicpm_ocr minicpmv4_6 minicpmv4_7 mistral4 mobilevitv2
        nemotron3_5_asr nemotron3_5_transcribe_asr_audio
        nemotron3_5_transcribe_word_timestamp nemotron3_diarization_audio
        nemotron_asr_streaming nemotron_asr_streaming_encoder paddleocr_vl parakeet_ctc
        parakeet_encoder parakeet_rnnt parakeet_tdt patchtsmixer patchtst pe_audio_encoder
        pi0 pix2struct pocket_tts_audio_tokenizer_encoder videomae videoprism_vision_model
        vivit voxtral_realtime wav2vec2-bert xclip xcodec xlstm xmod
    """,
    "needs detectron2": """
        layoutlmv2
    """,
    "needs natten": """
        dinat
    """,
    "needs other inputs than these": """
        audioflamingo3_encoder autoformer blip_2_qformer chameleon cohere_compass_vision
        cosmos3_edge_vision exaone4_5_vision fastspeech2_conformer fun_asr_nano_encoder
        gemma3n_audio gemma4_vision glm_image_vision hunyuan_vl_vision idefics
        idefics3_vision informer instructblip instructblipvideo kimi_k25_vision kosmos-2
        lfm3_vl_vision minicpm_ocr_vision minicpmv4_7_vision muse_glimmer_assistant
        muse_glimmer_vision muse_spark_vision neucodec owlv2 owlvit pe_audio
        time_series_transformer video_llama_3_vision videoprism
    """,
    "needs scipy": """
        inkling_mm_model
    """,
    "needs timm": """
        detr fast_vlm gemma3n gemma3n_vision pe_audio_video pe_audio_video_encoder pe_video
        pe_video_encoder perception_lm timm_backbone timm_wrapper
    """,
    "needs torchaudio": """
        higgs_audio_v2_tokenizer
    """,
    "not tried yet": """
        dac data2vec-audio encodec poolformer pop2piano pp_chart2table pp_formulanet
        pp_lcnet prophetnet pvt_v2 qianfan_ocr qianfan_ocr_vision qwen2 qwen2_5_omni_thinker
        qwen2_5_vl qwen2_5_vl_text qwen2_5_vl_vision qwen2_audio qwen2_audio_encoder
        qwen2_moe qwen2_vl qwen2_vl_text qwen3 qwen3_5_moe_text qwen3_5_moe_vision
        qwen3_5_text qwen3_5_vision qwen3_asr qwen3_asr_encoder qwen3_moe
        qwen3_omni_moe_thinker qwen3_vl qwen3_vl_moe qwen3_vl_moe_text qwen3_vl_moe_vision
        qwen3_vl_text qwen3_vl_vision qwen4_exp_text qwen4_exp_vision radio rembert roberta
        roberta-prelayernorm roformer rwkv sam sam3_lite_text_text_model sam3_vit_model
        sam_hq sam_hq_vision_model sam_vision_model sapiens2 seamless_m4t seamless_m4t_v2
        seed_oss segformer seggpt sew sew-d shieldgemma2 siglip siglip2 siglip2_vision_model
        siglip_vision_model smollm3 smolvlm smolvlm_vision solar_open speech-encoder-decoder
        speech_to_text speecht5 splinter squeezebert stablelm starcoder2 step3p7 swiftformer
        swin switch_transformers t5gemma t5gemma2 tapas timesfm timesfm2_5 timesformer
        tipsv2 tipsv2_text_model tipsv2_vision_model trocr udop ultrabert ultravbert umt5
        unispeech unispeech-sat yolos
    """,
    "trains differently each time by itself": """
        hubert wav2vec2 wav2vec2-conformer wavlm
    """,
}
NOT_TRAINED = {family: why for why, names in REASONS.items() for family in names.split()}
FAMILIES = [family for family in sorted(CLASSES) if family not in NOT_TRAINED]
