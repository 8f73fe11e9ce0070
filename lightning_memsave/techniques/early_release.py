"""Let go of what is not needed any more."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any, ClassVar
from weakref import WeakKeyDictionary

import torch
from torch import nn

from lightning_memsave.core.blocks import (
    Block,
    BlockSelector,
    as_selectors,
    find_blocks,
    repeated_classes,
)
from lightning_memsave.core.patching import (
    is_patched_with,
    is_undone,
    patch_method,
    previous_method,
)
from lightning_memsave.core.technique import Exactness, Handle, Technique
from lightning_memsave.errors import Problem
from lightning_memsave.techniques._weights.weight_casts import WeightCasts, caches_casts

# What is known of each block; not on the block, as a copy begins anew.
_CASTS: WeakKeyDictionary[nn.Module, WeightCasts] = WeakKeyDictionary()


@dataclass(frozen=True)
class EarlyRelease(Technique[nn.Module]):
    """Let go of the copies of weights that autocast makes, after each block.

    Autocast keeps a half-precision copy of every weight until the forward pass is over: 2 bytes per
    parameter. Where blocks are checkpointed nothing needs them, as they are made again in backward.
    With this they are gone when the block has used them, and no weight is cast more often.

    Args:
        blocks: Which modules are blocks, as for ``ActivationCheckpointing``. ``None`` finds them.

    Raises:
        ConfigurationError: If ``blocks`` chooses nothing.

    Note:
        Exactness is *bitwise*. Copies are kept as before where a weight is used several times in a
        forward pass, since their gradients are summed in the copy's precision: in blocks that are
        called several times, or share weights with others. To know that, the first call of each
        block is only watched. What is not seen: a weight of a block that other code uses
        directly, or a block that is called once at first and several times later; gradients are
        then rounded differently.

        It saves something where blocks are checkpointed and autocast keeps copies, as it does in
        Fabric and by default; Lightning's ``Trainer`` switches that off. It costs nothing
        elsewhere. In a loop of your own give each forward pass an autocast context of its own.

    Example:
        >>> model = nn.Sequential(*[nn.Linear(8, 8) for _ in range(4)])
        >>> with EarlyRelease(blocks=nn.Linear).apply(model) as handle:
        ...     handle.summary
        "autocast's copies of weights released after each of 4 blocks: 4 x Linear"

    References:
        Automatic Mixed Precision package - torch.amp, of the documentation of PyTorch, on
        ``cache_enabled``.
    """

    name: ClassVar[str] = "early_release"
    exactness: ClassVar[Exactness] = Exactness.BITWISE
    source: ClassVar[str] = "lightning-memsave"

    _: KW_ONLY
    blocks: BlockSelector | Sequence[BlockSelector] | None = None

    def __post_init__(self) -> None:
        if self.blocks is not None:
            object.__setattr__(self, "blocks", as_selectors(self.blocks))

    def check(self, target: nn.Module) -> list[Problem]:
        """Find every reason why ``apply`` would be refused; changes nothing.

        Args:
            target: The model.

        Returns:
            None: what cannot be released is left as it is.
        """
        return []

    def _apply(self, target: nn.Module) -> Handle[nn.Module]:
        blocks = find_blocks(target, self.blocks)
        if not blocks:
            return Handle(target, (), [self._nothing_found(target)])
        plain = [b for b in blocks if not isinstance(b.module, torch.jit.ScriptModule)]
        fresh = [b for b in plain if not is_patched_with(b.module, _Released._call_impl)]
        alone = _without_shared_weights(target, fresh)
        counts = {
            "are TorchScript": len(blocks) - len(plain),
            "release them already": len(plain) - len(fresh),
            "share weights": len(fresh) - len(alone),
        }
        skipped = [f"{n} of {len(blocks)} blocks {why}" for why, n in counts.items() if n]
        undo = [_release_after(block.module) for block in alone]
        classes = Counter(type(block.module).__name__ for block in alone)
        listed = ", ".join(f"{count} x {name}" for name, count in classes.items())
        words = f"autocast's copies of weights released after each of {len(alone)} blocks"
        return Handle(target, [b.name for b in alone], skipped, undo, f"{words}: {listed}")

    def _nothing_found(self, model: nn.Module) -> str:
        sought = "no repeated block was found"
        if self.blocks is not None:
            sought = f"nothing matches `blocks={self.blocks!r}`"
        return (
            f"{sought} in `{type(model).__name__}`. Classes that repeat: "
            f"{repeated_classes(model) or 'none but single layers'}"
        )


# Around the call and not around `forward`, which checkpointing replaces. Not as hooks: torch's
# transformer layers compute otherwise in evaluation while they have any.
class _Released:
    @staticmethod
    def _call_impl(block: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
        run = previous_method(block, "_call_impl")
        is_off = torch.compiler.is_compiling() or is_undone(block, "_call_impl")
        if is_off or not caches_casts(block):
            return run(*args, **kwargs)
        casts = _CASTS.setdefault(block, WeightCasts())
        if casts.need_no_cache():
            torch.set_autocast_cache_enabled(False)
            try:
                return run(*args, **kwargs)
            finally:
                torch.set_autocast_cache_enabled(True)
        output = run(*args, **kwargs)
        casts.learn((args, kwargs), output)
        return output


def _release_after(block: nn.Module) -> Callable[[], None]:
    restore = patch_method(block, _Released._call_impl)

    def undo() -> None:
        restore()
        _CASTS.pop(block, None)

    return undo


def _without_shared_weights(model: nn.Module, blocks: list[Block]) -> list[Block]:
    # A module that is registered twice counts twice, too.
    everywhere = Counter(id(p) for _, p in model.named_parameters(remove_duplicate=False))
    return [
        block for block in blocks if all(everywhere[id(p)] == 1 for p in block.module.parameters())
    ]
