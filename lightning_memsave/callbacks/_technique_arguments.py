"""One function for each argument of ``MemSaveCallback`` that changes model or optimizer."""

from typing import Any

from lightning_memsave.callbacks._argument_values import (
    Arguments,
    as_given,
    is_asked,
    refuse_technique,
    why_beyond,
)
from lightning_memsave.callbacks._backward_updates import BackwardUpdates
from lightning_memsave.callbacks._early_release import EarlyReleases
from lightning_memsave.callbacks._module_techniques import (
    Checkpointing,
    FusedAttention,
    LossWithoutLogits,
    ModuleTechnique,
)
from lightning_memsave.callbacks._optimizer_techniques import OptimizerTechnique
from lightning_memsave.callbacks._precision import full_name
from lightning_memsave.callbacks._settings import Setting
from lightning_memsave.callbacks._weight_precision import WeightPrecision
from lightning_memsave.core.technique import Technique
from lightning_memsave.errors import ConfigurationError
from lightning_memsave.techniques.activation_checkpointing import ActivationCheckpointing
from lightning_memsave.techniques.attention_kernel import AttentionKernel
from lightning_memsave.techniques.chunked_cross_entropy import ChunkedCrossEntropy
from lightning_memsave.techniques.low_bit_optimizer import LowBitOptimizer
from lightning_memsave.techniques.low_precision_weights import LowPrecisionWeights
from lightning_memsave.techniques.optimizer_in_backward import OptimizerInBackward

_BF16 = "bf16-mixed"


def _attention(arguments: Arguments) -> Setting:
    wanted = arguments["attention"]
    technique = wanted
    if isinstance(wanted, str):
        technique = AttentionKernel(wanted)
    elif wanted is not None:
        _refuse_other("attention", wanted, AttentionKernel, '"sdpa"')
    value = "None" if technique is None else repr(technique.kernel)
    return _module_technique("attention", arguments, technique, value, FusedAttention)


def _chunked_cross_entropy(arguments: Arguments) -> Setting:
    name, wanted = "chunked_cross_entropy", arguments["chunked_cross_entropy"]
    technique = wanted
    if wanted is True:
        technique = ChunkedCrossEntropy()
    elif wanted is False:
        technique = None
    elif type(wanted) is int:
        technique = ChunkedCrossEntropy(chunk_size=wanted)
    elif wanted is not None:
        _refuse_other(name, wanted, ChunkedCrossEntropy, "True or a number of rows")
    return _module_technique(name, arguments, technique, _short(wanted), LossWithoutLogits)


def _activation_checkpointing(arguments: Arguments) -> Setting:
    name = "activation_checkpointing"
    wanted, blocks = arguments[name], arguments["blocks"]
    if wanted is None or isinstance(wanted, ActivationCheckpointing):
        if blocks is not None:
            raise ConfigurationError(
                f"`blocks={blocks!r}` is not used with {as_given(arguments, name)}. Use "
                f"`{name}=ActivationCheckpointing(..., blocks=...)`, or remove `blocks`."
            )
        technique = wanted
    else:
        refuse_technique(name, wanted, ActivationCheckpointing)
        technique = ActivationCheckpointing(wanted, blocks=blocks)
    value = "None" if technique is None else repr(technique.which)
    own = is_asked(arguments, name) or blocks is not None
    return Checkpointing(name, technique, value, own)


def _early_release(arguments: Arguments) -> Setting:
    name, wanted = "early_release", arguments["early_release"]
    if wanted not in (True, False, None):
        raise ConfigurationError(
            f"`{name}={wanted!r}` is not a valid value. Use `{name}=True`, or `None`."
        )
    return EarlyReleases(wanted is True, is_asked(arguments, name))


def _optimizer(arguments: Arguments) -> Setting:
    wanted = arguments["optimizer"]
    details = {
        name: arguments[name]
        for name in ("optimizer_kwargs", "keep_32bit", "force_8bit")
        if arguments[name]
    }
    if wanted is None or isinstance(wanted, LowBitOptimizer):
        if details:
            raise ConfigurationError(
                f"{', '.join(f'`{name}`' for name in details)} is not used with "
                f"{as_given(arguments, 'optimizer')}. Pass `optimizer=LowBitOptimizer(...)` with "
                'them, or use `optimizer="8bit"`.'
            )
        technique = wanted
    else:
        refuse_technique("optimizer", wanted, LowBitOptimizer)
        technique = LowBitOptimizer(wanted, **details)
    value = "None" if technique is None else repr(technique.optimizer)
    if technique and (why := why_beyond(arguments, "optimizer", technique.exactness)):
        return OptimizerTechnique(None, "None", is_asked=False, off_reason=why)
    return OptimizerTechnique(technique, value, is_asked(arguments, "optimizer"))


def _low_precision_weights(arguments: Arguments) -> Setting:
    name, wanted = "low_precision_weights", arguments["low_precision_weights"]
    technique = LowPrecisionWeights(wanted) if isinstance(wanted, str) else wanted
    own = is_asked(arguments, name)

    def off(why: str = "") -> WeightPrecision:
        return WeightPrecision(None, "None", brings_precision=False, is_asked=own, off_reason=why)

    if technique is None:
        return off()
    _refuse_other(name, technique, LowPrecisionWeights, '"stochastic" or "kahan"')
    if why := why_beyond(arguments, name, technique.exactness):
        return off(why)
    precision = arguments["precision"]
    brings = precision == "auto" or (precision is not None and full_name(precision) == _BF16)
    what = as_given(arguments, name)
    if not brings and precision is not None and not own:
        return off(f"it computes in {_BF16}, and `precision={precision!r}` was given")
    if not brings and precision is not None:
        raise ConfigurationError(
            f"{what} computes in bfloat16 and does not go with "
            f"`precision={precision!r}`. Use `precision={_BF16!r}`, or set `{name}=None`."
        )
    return WeightPrecision(
        technique, repr(technique.rounding), brings_precision=brings, written=what, is_asked=own
    )


def _optimizer_in_backward(arguments: Arguments) -> Setting:
    name, wanted = "optimizer_in_backward", arguments["optimizer_in_backward"]
    technique = OptimizerInBackward() if wanted is True else wanted or None
    if technique is not None:
        _refuse_other(name, technique, OptimizerInBackward, "True")
        why_beyond(arguments, name, technique.exactness)
    parts = arguments["micro_batch_size"]
    return BackwardUpdates(
        technique,
        _short(wanted),
        is_asked=is_asked(arguments, name),
        halves_batches=getattr(parts, "micro_batch_size", parts) == "auto",
    )


def _module_technique(
    name: str,
    arguments: Arguments,
    technique: Any,
    value: str,
    kind: type[ModuleTechnique] = ModuleTechnique,
) -> ModuleTechnique:
    own = is_asked(arguments, name)
    if technique is not None and (why := why_beyond(arguments, name, technique.exactness)):
        return kind(name, None, "None", own, why)
    return kind(name, technique, value, own)


def _refuse_other(name: str, value: object, expected: type[Technique[Any]], choices: str) -> None:
    if not isinstance(value, expected):
        raise ConfigurationError(
            f"`{name}={value!r}` is not a choice. Use `{name}={choices}`, "
            f"`{name}={expected.__name__}(...)`, or `None`."
        )


def _short(value: object) -> str:
    return "None" if value is None or value is False else repr(value)


TECHNIQUE_MAKERS = (
    _attention,
    _chunked_cross_entropy,
    _activation_checkpointing,
    _early_release,
    # In the order in which optimizers pass through them.
    _optimizer,
    _low_precision_weights,
    _optimizer_in_backward,
)
"""In the order in which their settings are applied."""
