"""Batches for the tiny models of `hugging_face.py`."""

import inspect
from typing import Any

import torch
from torch import Tensor
from transformers.models.auto import modeling_auto

from tests.techniques.hugging_face import CLASSES

BATCH, LENGTH, GRID = 2, 12, 4
SEQ_TO_SEQ = modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES
FRAMES_FIRST = {
    "canary",
    "cohere_asr",
    "granite_speech5_ctc",
    "granite_speech5_encoder",
    "lasr_ctc",
    "lasr_encoder",
    "nemotron3_5_asr",
    "nemotron3_5_transcribe_asr_audio",
    "nemotron3_5_transcribe_audio",
    "nemotron3_diarization",
    "nemotron3_diarization_audio",
    "nemotron_asr_streaming",
    "nemotron_asr_streaming_encoder",
    "parakeet_ctc",
    "parakeet_encoder",
    "parakeet_rnnt",
    "parakeet_tdt",
    "speech_to_text",
    "univnet",
    "wav2vec2-bert",
}
# Sound with a dimension of channels.
CHANNELS = {
    "dac",
    "encodec",
    "mimi",
    "mimi_encoder",
    "omniasr_audio",
    "omniasr_ctc",
    "pe_audio",
    "pe_audio_encoder",
    "pocket_tts_audio_tokenizer",
    "pocket_tts_audio_tokenizer_encoder",
    "vibevoice_acoustic_tokenizer",
    "wavtokenizer",
    "wavtokenizer_encoder",
    "xcodec",
}
VIDEOS = {"timesformer", "videomae", "vivit", "xclip"}
PAIRS_OF_IMAGES = {"efficientloftr", "lightglue"}
TEXT = torch.arange(3, 3 + LENGTH).expand(BATCH, LENGTH)
# With a token for each patch of an image, as the model embeds it.
IMAGE_TEXT = torch.tensor([60] * 4 + [*range(3, 11)]).expand(BATCH, LENGTH)
VIDEO_TEXT = torch.tensor([60] * 8 + [*range(3, 7)]).expand(BATCH, LENGTH)
BOXES = torch.tensor([0.1, 0.2, 0.3, 0.4]).expand(BATCH, LENGTH, 4)
FASTSPEECH: dict[str, Tensor | tuple[int, ...]] = {
    "spectrogram_labels": (24, 16),
    "duration_labels": torch.full((BATCH, LENGTH), 2),
    "pitch_labels": (LENGTH, 1),
    "energy_labels": (LENGTH, 1),
}
# By the end of a name: what needs no random numbers.
GIVEN = {
    "bbox": torch.tensor([1, 2, 3, 4]).expand(BATCH, LENGTH, 4),
    "grid_thw": torch.tensor([[1, GRID, GRID]]).repeat(BATCH, 1),
    "merge_sizes": torch.full((BATCH,), 2),
    "pixel_attention_mask": torch.ones(BATCH, GRID * GRID, dtype=torch.long),
    "pixel_position_ids": torch.cartesian_prod(torch.arange(GRID), torch.arange(GRID)).expand(
        BATCH, -1, -1
    ),
    "spatial_shapes": torch.full((BATCH, 2), GRID),
}
# The others of these take an image beside the text.
TEXT_ONLY = {"embedding_gemma2", "glm_image"}
# Family -> name -> a tensor, or the shape of random numbers for one sample.
OWN_INPUTS: dict[str, dict[str, Tensor | tuple[int, ...]]] = {
    "audio-spectrogram-transformer": {"input_values": (64, 16)},
    "audioflamingo3_encoder": {"input_features_mask": torch.ones(BATCH, 256)},
    "blip-2": {"input_ids": IMAGE_TEXT},
    "blip_2_qformer": {"query_embeds": (4, 32), "encoder_hidden_states": (4, 32)},
    "bros": {"bbox": BOXES},
    "clap": {"input_features": (1, 128, 32)},
    "clvp": {"input_features": (80, 64)},
    "decision_transformer": {
        "states": (4, 17),
        "actions": (4, 4),
        "rewards": (4, 1),
        "returns_to_go": (4, 1),
        "timesteps": torch.arange(4).expand(BATCH, 4),
    },
    "dia": {"decoder_input_ids": TEXT[:, :6, None].repeat(1, 1, 9)},
    "fastspeech2_conformer": FASTSPEECH,
    "fastspeech2_conformer_with_hifigan": FASTSPEECH,
    "fun_asr_nano_encoder": {
        "input_features": (64, 112),
        "input_features_mask": torch.ones(BATCH, 64),
    },
    "gemma3n_audio": {
        "audio_mel": (128, 128),
        "audio_mel_mask": torch.zeros(BATCH, 128, dtype=torch.bool),
    },
    "granite_speech5_ctc": {"input_features": (64, 64)},
    "granite_speech5_encoder": {"input_features": (64, 64)},
    "idefics": {"pixel_values": (1, 3, 32, 32), "image_attention_mask": torch.ones(BATCH, 12, 1)},
    "inkling2_vision": {"pixel_values": torch.linspace(0, 1, 24576).view(32, 256, 3)},
    "instructblip": {"input_ids": IMAGE_TEXT},
    "instructblipvideo": {"pixel_values": (2, 3, 32, 32), "input_ids": VIDEO_TEXT},
    "kosmos-2": {"image_embeds_position_mask": IMAGE_TEXT == 60},
    "kyutai_speech_to_text": {"input_ids": TEXT[:, :, None].repeat(1, 1, 33)},
    "lxmert": {"visual_feats": (4, 2048), "visual_pos": (4, 4)},
    "mimi_decoder": {"latents": (32, 8)},
    "molmo2": {"mm_token_type_ids": torch.zeros(BATCH, LENGTH, dtype=torch.long)},
    "muse_glimmer_assistant": {"noise_embeds": (16, 32), "context_hidden_states": (16, 160)},
    "muse_spark_audio": {"input_values": (7680,)},
    "musicgen": {"decoder_input_ids": TEXT[:, :6].repeat(4, 1)},
    "musicgen_melody": {"decoder_input_ids": TEXT[:, :6].repeat(4, 1)},
    "nemotron3_5_transcribe_word_timestamp": {"inputs_embeds": (16, 32)},
    "oneformer": {"task_inputs": (77,)},
    "patchtsmixer": {"past_values": (32, 1)},
    "patchtst": {"past_values": (32, 1)},
    "perceiver": {"inputs": TEXT},
    "pi0": {
        "state": (32,),
        "input_ids": TEXT,
        "pixel_values": (1, 3, 32, 32),
        "pixel_attention_mask": torch.ones(BATCH, 1, dtype=torch.bool),
        "actions": (50, 32),
    },
    "pix2struct": {"flattened_patches": torch.ones(BATCH, 16, 770)},
    "pocket_tts_audio_tokenizer_decoder": {"latents": (32, 8)},
    "pp_ocrv5_mobile_rec": {"pixel_values": (3, 128, 128)},
    "pp_ocrv5_server_rec": {"pixel_values": (3, 128, 128)},
    "pp_ocrv6_small_rec": {"pixel_values": (3, 128, 128)},
    "pp_ocrv6_tiny_rec": {"pixel_values": (3, 128, 128)},
    "qwen3_asr_encoder": {
        "input_features": (16, 100),
        "input_features_mask": torch.ones(BATCH, 100, dtype=torch.long),
    },
    "seggpt": {
        "pixel_values": (3, 32, 32),
        "prompt_pixel_values": (3, 32, 32),
        "prompt_masks": (3, 32, 32),
    },
    "siglip2": {
        "pixel_attention_mask": torch.ones(BATCH, GRID * GRID, dtype=torch.long),
        "spatial_shapes": torch.full((BATCH, 2), GRID),
    },
    "speech-encoder-decoder": {"inputs": (8000,)},
    "timesfm": {
        "past_values": (32,),
        "past_values_padding": torch.zeros(BATCH, 32),
        "freq": torch.zeros(BATCH, 1, dtype=torch.long),
    },
    "timesfm2_5": {"past_values": (32,)},
    "tvp": {
        "input_ids": TEXT[:1],
        "pixel_values": torch.linspace(0, 1, 98304).view(1, 2, 3, 128, 128),
    },
    "udop": {"bbox": BOXES},
    "uvdoc": {"pixel_values": (3, 256, 256)},
    "vibevoice_acoustic_tokenizer_decoder": {"hidden_states": (32, 8)},
    "vibevoice_acoustic_tokenizer_encoder": {"hidden_states": (1, 8000)},
    "videoprism": {"pixel_values_videos": (2, 3, 36, 36)},
    "videoprism_vision_model": {"pixel_values_videos": (2, 3, 36, 36)},
    "vjepa2": {"pixel_values_videos": (2, 3, 32, 32)},
    "voxtral_realtime": {"input_features": (16, 96)},
    "wav2vec2-bert": {"input_features": (64, 160)},
    "xmod": {"lang_ids": torch.zeros(BATCH, dtype=torch.long)},
}
for family in ("minicpm_ocr_vision", "minicpmv4_7_vision"):
    OWN_INPUTS[family] = {
        "pixel_values": torch.linspace(0, 1, 6144).view(1, 3, 8, 256),
        "target_sizes": torch.full((BATCH, 2), GRID),
    }
for family in ("neucodec", "xcodec2"):
    OWN_INPUTS[family] = {"input_values": (1, 8000), "input_features": (25, 160)}
for family in ("autoformer", "informer", "time_series_transformer"):
    OWN_INPUTS[family] = {
        "past_values": (11,),
        "past_time_features": (11, 0),
        "past_observed_mask": torch.ones(BATCH, 11),
        "future_values": (4,),
        "future_time_features": (4, 0),
    }


def make_inputs(model: Any, seed: int = 0) -> dict[str, Tensor]:
    random = torch.Generator().manual_seed(seed)
    config, takes = model.config, inspect.signature(type(model).forward).parameters
    own = OWN_INPUTS.get(config.model_type, {})
    main = model.main_input_name
    names = [name for name in ([main] if isinstance(main, str) else main) if name in takes]
    if names == ["input_ids"] and CLASSES[config.model_type].endswith("Model"):
        has_image = "pixel_values" in takes and config.model_type not in TEXT_ONLY
        names += ["pixel_values"] if has_image else []  # as CLIP's
    names += ["bbox"] if "bbox" in takes else []
    if names in ([], ["pixel_values"]) and "input_ids" in takes:
        names += ["input_ids"]
    names += [name for name, of in takes.items() if of.default is of.empty and of.kind == 1][1:]
    inputs: dict[str, Tensor] = {}
    for name in dict.fromkeys([*names, *own]):
        value = own.get(name)
        if isinstance(value, tuple):
            value = torch.randn(BATCH, *value, generator=random)
        inputs[name] = _make_input(name, config, takes, random) if value is None else value.clone()
    if CLASSES[config.model_type] in SEQ_TO_SEQ.values():
        inputs["labels"] = torch.randint(3, 60, (BATCH, LENGTH), generator=random)
    elif config.is_encoder_decoder and "decoder_input_ids" in takes:
        inputs.setdefault("decoder_input_ids", torch.randint(3, 60, (BATCH, 6), generator=random))
    return inputs


def _make_input(name: str, config: Any, takes: Any, random: torch.Generator) -> Tensor:
    if name.endswith("input_ids"):
        return torch.randint(3, 60, (BATCH, LENGTH), generator=random)
    for ending, value in GIVEN.items():
        if name.endswith(ending):
            return value.clone()
    if name == "pixel_values" or (name == "hidden_states" and "grid_thw" in takes):
        return torch.randn(_shape_of_image(config, takes), generator=random)
    return torch.randn(_shape_of_sound(name, config), generator=random)


def _shape_of_sound(name: str, config: Any) -> tuple[int, ...]:
    if name == "input_values":
        return (BATCH, 1, 8000) if config.model_type in CHANNELS else (BATCH, 8000)
    encoder = getattr(config, "encoder_config", getattr(config, "audio_config", config))
    bins = getattr(encoder, "num_mel_bins", getattr(encoder, "input_dim", 16))
    frames = 2 * getattr(encoder, "max_source_positions", 64)
    return (BATCH, frames, bins) if config.model_type in FRAMES_FIRST else (BATCH, bins, frames)


def _shape_of_image(config: Any, takes: Any) -> tuple[int, ...]:
    vision = getattr(config, "vision_config", config)
    size = getattr(vision, "image_size", 32)
    height, width = (size, size) if isinstance(size, int) else size
    channels = getattr(vision, "num_channels", getattr(vision, "in_channels", 3))
    if any(name.endswith(("grid_thw", "pixel_position_ids", "spatial_shapes")) for name in takes):
        patch = vision.patch_size
        depth = getattr(vision, "temporal_patch_size", getattr(vision, "patch_temporal", 1))
        if config.model_type == "kimi_k25_vision":
            return BATCH * GRID * GRID, channels, patch, patch
        if "grid_thw" in takes:
            return BATCH * GRID * GRID, channels * depth * patch * patch
        return BATCH, GRID * GRID, channels * patch * patch
    if config.model_type in VIDEOS:
        return BATCH, getattr(vision, "num_frames", 2), channels, height, width
    if config.model_type in PAIRS_OF_IMAGES:
        return BATCH, 2, channels, height, width
    return BATCH, channels, height, width
