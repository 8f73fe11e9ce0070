"""Batches for the tiny models of `hugging_face.py`."""

import inspect
from typing import Any

import torch
from torch import Tensor
from transformers.models.auto import modeling_auto

from tests.techniques.hugging_face import CLASSES

BATCH, LENGTH, GRID = 2, 12, 4
SEQ_TO_SEQ = modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES
VIDEOS = {"timesformer", "videomae", "vivit", "xclip"}
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


def make_inputs(model: Any, seed: int = 0) -> dict[str, Tensor]:
    random = torch.Generator().manual_seed(seed)
    config, takes = model.config, inspect.signature(type(model).forward).parameters
    if config.model_type == "pi0":
        return _inputs_of_pi0(random)
    main = model.main_input_name
    names = [name for name in ([main] if isinstance(main, str) else main) if name in takes]
    if names == ["input_ids"] and CLASSES[config.model_type].endswith("Model"):
        has_image = "pixel_values" in takes and config.model_type not in TEXT_ONLY
        names += ["pixel_values"] if has_image else []  # as CLIP's
    names += ["bbox"] if "bbox" in takes else []
    if names in ([], ["pixel_values"]) and "input_ids" in takes:
        names += ["input_ids"]
    names += [name for name, of in takes.items() if of.default is of.empty and of.kind == 1][1:]
    inputs = {name: _make_input(name, config, takes, random) for name in dict.fromkeys(names)}
    if CLASSES[config.model_type] in SEQ_TO_SEQ.values():
        inputs["labels"] = torch.randint(3, 60, (BATCH, LENGTH), generator=random)
    elif config.is_encoder_decoder and "decoder_input_ids" in takes:
        inputs["decoder_input_ids"] = torch.randint(3, 60, (BATCH, 6), generator=random)
    return inputs


def _inputs_of_pi0(random: torch.Generator) -> dict[str, Tensor]:
    shapes = {"state": (32,), "pixel_values": (1, 3, 32, 32), "actions": (50, 32)}
    return {
        "input_ids": torch.arange(3, 3 + LENGTH).repeat(BATCH, 1),
        "pixel_attention_mask": torch.ones(BATCH, 1, dtype=torch.bool),
        **{name: torch.randn(BATCH, *shape, generator=random) for name, shape in shapes.items()},
    }


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
        return BATCH, 8000
    encoder = getattr(config, "encoder_config", getattr(config, "audio_config", config))
    bins = getattr(encoder, "num_mel_bins", getattr(encoder, "input_dim", 16))
    return BATCH, bins, 2 * getattr(encoder, "max_source_positions", 64)


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
    return BATCH, channels, height, width
