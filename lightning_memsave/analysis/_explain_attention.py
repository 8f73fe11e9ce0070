"""The kind of attention that models of Hugging Face use, and how to change it."""

import contextlib
from collections.abc import Iterator
from typing import Any

from torch import nn


def attention_of(module: nn.Module) -> str | None:
    """Say which kind of attention a model uses.

    Args:
        module: Any module.

    Returns:
        Such as ``"sdpa"`` or ``"eager"``; ``None`` without a Hugging Face model in it.
    """
    found = _models(module)
    return found[0].config._attn_implementation if found else None


def set_attention(module: nn.Module, kind: str) -> None:
    """Let all Hugging Face models in a module use a kind of attention.

    Args:
        module: What they are in.
        kind: Such as ``"sdpa"``.
    """
    for model in _models(module):
        model.set_attn_implementation(kind)


@contextlib.contextmanager
def attention_set(module: nn.Module, kind: str) -> Iterator[None]:
    """Let them use it until the context is left.

    Args:
        module: As for `set_attention`.
        kind: As for `set_attention`.

    Yields:
        Nothing.
    """
    configs: dict[int, Any] = {}
    for part in module.modules():
        _add_config(configs, getattr(part, "config", None))
    before = [(config, config._attn_implementation_internal) for config in configs.values()]
    try:
        set_attention(module, kind)
        yield
    finally:
        for config, value in before:
            config._attn_implementation_internal = value


# The outermost ones: they set those inside them, too.
def _models(module: nn.Module) -> list[Any]:
    found: list[tuple[str, Any]] = []
    for name, part in module.named_modules():
        is_inside = any(not outer or name.startswith(f"{outer}.") for outer, _ in found)
        is_model = hasattr(part, "set_attn_implementation") and hasattr(part, "config")
        if is_model and not is_inside:
            found.append((name, part))
    return [part for _, part in found]


def _add_config(configs: dict[int, Any], config: Any) -> None:
    if not hasattr(config, "_attn_implementation_internal") or id(config) in configs:
        return
    configs[id(config)] = config
    for name in getattr(config, "sub_configs", {}):
        _add_config(configs, getattr(config, name, None))
