"""The private names of torch, Lightning and transformers that are used here, checked at setup."""

import functools
import importlib.metadata
import re
import sys
from collections.abc import Collection
from pathlib import Path
from typing import Any, NamedTuple

from lightning_memsave.errors import Problem
from lightning_memsave.trainer.trainer import PACKAGES, package_of

TESTED = {
    "torch": "2.13.0",
    "lightning": "2.6.6",
    "pytorch-lightning": "2.6.6",
    "transformers": "5.24.0",
    "peft": "0.21.2",
    "torchmetrics": "1.9.0",
}
"""The version of each package whose names are known to mean what is made of them."""
COMMANDS = "memsave"


class Names(NamedTuple):
    """Names of a module, of what is in it, or of what hangs on the Trainer."""

    owner: str
    """``module``, ``module:path`` or ``Trainer.path``."""
    names: str
    argument: str = ""
    """The only argument of the callback that needs them; `COMMANDS` for none."""


_AUTOMATIC = "Trainer.fit_loop.epoch_loop.automatic_optimization"
_PRECISION = "_precision_flag _precision_plugin_flag _check_and_init_precision"
_FSDP2 = "torch.distributed.fsdp._fully_shard"
_CLOSURES = "lightning.pytorch.loops.optimization.automatic"
NAMES = (
    # The loop of automatic optimization is replaced, and its closure runs micro-batches.
    Names("Trainer.fit_loop", "_should_accumulate _combined_loader _data_source"),
    Names("Trainer.fit_loop._data_source", "dataloader is_module"),
    Names(
        "Trainer.fit_loop.epoch_loop",
        "_batches_that_stepped _num_ready_batches_reached batch_progress",
    ),
    Names("Trainer.fit_loop.epoch_loop._results", "update_metrics"),
    Names(_AUTOMATIC, "_make_closure _optimizer_step _skip_backward _training_step"),
    Names(f"{_CLOSURES}:Closure", "_step_fn _backward_fn _zero_grad_fn closure warning_cache"),
    Names(f"{_CLOSURES}:ClosureResult", "closure_loss extra"),
    Names("torchmetrics:Metric", "_forward_cache"),
    # The first batch is looked at before a fit, precision is set, and a fit runs inside a fit.
    Names(
        "lightning.pytorch.trainer.connectors.data_connector",
        "_request_dataloader _process_dataloader _resolve_overfit_batches",
    ),
    Names("Trainer._accelerator_connector", _PRECISION),
    Names("Trainer._signal_connector", "register_signal_handlers"),
    Names("Trainer.strategy", "precision_plugin load_optimizer_state_dict setup broadcast"),
    Names("Trainer", "_accelerator_connector _signal_connector _results fit_loop strategy"),
    Names("lightning.pytorch:LightningModule", "_metric_attributes _compiler_ctx"),
    Names("lightning.pytorch:LightningModule", "_trainer", "predict"),  # `trainer` may raise
    Names("lightning.pytorch.strategies:DDPStrategy", "_ddp_comm_hook _layer_sync"),
    Names("lightning.pytorch.strategies:DeepSpeedStrategy", "_config_initialized"),
    Names("lightning.pytorch.strategies:FSDPStrategy", "_activation_checkpointing_kwargs"),
    Names("torch.nn.parallel:DistributedDataParallel", "_sync_buffers"),
    Names("torch.nn:MultiheadAttention", "_reset_parameters"),
    # The dispatcher, fake tensors and pytrees, of which torch's own tools are made.
    Names("torch", "_C _functorch"),
    Names("torch", "_ops _subclasses", "predict"),
    # FSDP2 frees and reduces what is outside of blocks at the end of backward, without a choice.
    Names("torch.distributed.fsdp", "_fully_shard"),
    Names("torch.distributed.fsdp:FSDPModule", "_get_fsdp_state"),
    Names(_FSDP2, "_fsdp_common"),
    Names(f"{_FSDP2}._fsdp_state:FSDPState", "_fsdp_param_group"),
    Names(f"{_FSDP2}._fsdp_param_group:FSDPParamGroup", "_training_state _sharded_state"),
    Names(f"{_FSDP2}._fsdp_param:FSDPParam", "_module_info _setattr_on_modules _unsharded_param"),
    Names("torch.testing", "_internal", "predict"),  # the process group without processes
    Names(
        "torch.distributed.distributed_c10d", "_World _unregister_process_group _world", "predict"
    ),
    Names("torch.distributed.tensor.debug", "_clear_sharding_prop_cache", "predict"),
    Names("torch.utils", "_foreach_utils _python_dispatch _pytree"),
    Names(
        "torch.utils._python_dispatch", "_disable_current_modes _get_current_dispatch_mode_stack"
    ),
    Names("torch.utils._python_dispatch", "_push_mode _pop_mode", "offload"),
    Names("torch.utils._foreach_utils", "_foreach_supported_types", "predict"),
    Names("torch.utils._foreach_utils", "_has_foreach_support", "optimizer_in_backward"),
    Names("torch._ops:OpOverload", "_schema"),
    Names("torch.library:Library", "_destroy", "predict"),
    Names(
        "torch._C",
        "_DisableTorchDispatch _ExcludeDispatchKeyGuard _dispatch_has_kernel_for_dispatch_key"
        " _dispatch_get_registrations_for_dispatch_key _dispatch_keyset_full_after"
        " _set_warn_deprecated_on_mutable_data_ptr",
        "predict",
    ),
    Names("torch._C", "_DisableFuncTorch _are_functorch_transforms_active _functorch"),
    Names("torch._C", "_get_tracing_state _nn", "chunked_cross_entropy"),
    Names("torch._C:_nn", "_parse_to", "chunked_cross_entropy"),  # how `Module.to` reads arguments
    Names("torch.autograd.forward_ad", "_current_level", "chunked_cross_entropy"),
    Names("torch:Tensor", "_make_wrapper_subclass"),
    Names("torch:Tensor", "_make_subclass", "predict"),
    # Operators that have no other name.
    Names("torch:ops.aten", "_to_copy"),
    Names(
        "torch:ops.aten",
        "_grouped_mm _local_scalar_dense _pack_padded_sequence _sparse_coo_tensor_unsafe _unique2"
        " _scaled_dot_product_attention_math _scaled_dot_product_cudnn_attention"
        " _scaled_dot_product_efficient_attention _scaled_dot_product_flash_attention",
        "predict",
    ),
    Names("torch", "_foreach_copy_", "offload"),
    Names("torch", "_foreach_mul_ _foreach_norm", "optimizer_in_backward"),
    # A storage or a version has no public identity, and hooks of a tensor only it knows.
    Names("torch:UntypedStorage", "_cdata"),
    Names("torch._C", "_storage_Use_Count"),
    Names("torch:Tensor", "_version _indices _values"),
    Names("torch:Tensor", "_nnz", "predict"),
    Names("torch:Tensor", "_base _backward_hooks _post_accumulate_grad_hooks", "offload"),
    # Which backward pass runs, and what it will still come to.
    Names("torch._C", "_autograd _current_autograd_node _current_graph_task_id"),
    Names("torch._C", "_will_engine_execute_node"),
    Names("torch._C:_autograd", "_top_saved_tensors_default_hooks"),
    Names("torch._C:_autograd", "_unsafe_set_version_counter", "activation_checkpointing"),
    Names("torch._C:_autograd", "_get_sequence_nr", "predict"),
    # In torch 2.10 of the class of each kind of node, not of `Node`.
    Names("torch._C:_functions.AccumulateGrad", "_sequence_nr"),
    Names("torch.autograd:Variable", "_execution_engine"),
    Names("torch.autograd", "_engine_run_backward", "offload"),
    Names("torch.autograd:Variable._execution_engine", "queue_callback"),
    # A base class, table or mark of a module without another name.
    Names("torch.nn:Module", "_compiled_call_impl _parameters _buffers"),
    Names("torch.nn:Module", "_non_persistent_buffers_set", "micro_batch_size"),
    Names("torch.nn:Module", "_forward_pre_hooks", "low_precision_weights"),
    Names("torch.nn.modules.batchnorm", "_BatchNorm"),
    Names("torch.nn.modules.conv", "_ConvNd"),
    # The feed-forward layers have no module of their own.
    Names("torch.nn:TransformerEncoderLayer", "_ff_block", "activation_checkpointing"),
    Names("torch.nn:TransformerDecoderLayer", "_ff_block", "activation_checkpointing"),
    Names("torch._dynamo.eval_frame:OptimizedModule", "_orig_mod"),
    # The mark of schedulers, the state before the first step, and where a scale is waited for.
    Names("torch.optim.lr_scheduler:LRScheduler", "_wrapped_by_lr_sched"),
    Names("torch.optim:AdamW", "_init_group"),
    Names("torch.overrides", "_get_current_function_mode_stack _pop_mode _push_mode", "offload"),
    Names("torch.optim.optimizer", "_global_optimizer_post_hooks _global_optimizer_pre_hooks"),
    Names("torch.amp:GradScaler", "_unscale_grads_", "offload"),
    # The allocator's history, which torch documents under these names.
    Names("torch.cuda.memory", "_record_memory_history _snapshot"),
    Names("torch.utils.checkpoint", "_CheckpointFrame _StopRecomputationError"),
    # Written so in their own documentation, or without a public form.
    Names(
        "transformers.configuration_utils:PretrainedConfig",
        "_attn_implementation _attn_implementation_internal",
    ),
    Names("transformers.modeling_utils:PreTrainedModel", "_from_config", COMMANDS),
    Names("transformers.models.auto.auto_factory:_BaseAutoModelClass", "_model_mapping", COMMANDS),
    Names("peft.tuners.tuners_utils:BaseTunerLayer", "_cast_input_dtype", "chunked_cross_entropy"),
)


def check_names(trainer: Any, arguments: Collection[str]) -> list[Problem]:
    """Return a problem for each name that is missing and used beside these arguments."""
    package = package_of(trainer).__name__
    return [
        _problem(f"{owner}.{name}".replace(":", "."), package, argument)
        for owner, names, argument in NAMES
        if not argument or argument in arguments
        for owner in (owner.replace(PACKAGES[0], package),)
        for name in names.split()
        if not _has(trainer, owner, name)
    ]


# What is not loaded cannot be in use.
def _has(trainer: Any, owner: str, name: str) -> bool:
    module, _, path = owner.partition("." if owner.startswith("Trainer") else ":")
    found = trainer if module == "Trainer" else sys.modules.get(module)
    if found is None:
        return True
    try:
        for part in filter(None, path.split(".")):
            found = getattr(found, part)
    except AttributeError:
        return False
    return hasattr(found, name) or (isinstance(found, type) and _is_set_by(found, name))


# What objects have, and their class has not: its source sets it.
@functools.cache
def _is_set_by(cls: type[Any], name: str) -> bool:
    files = {getattr(sys.modules[base.__module__], "__file__", None) or "" for base in cls.__mro__}
    try:
        texts = [Path(file).read_text("utf-8") for file in files if file.endswith(".py")]
    except OSError:  # packed without sources: it cannot be told
        return True
    is_set = re.compile(rf"(^ +|\.){name}(:| =) |[\"']{name}[\"']", re.MULTILINE)
    is_packed = not texts and any(files)  # else it is of C, and its instances have what it has
    return is_packed or any(map(is_set.search, texts))


def _problem(path: str, package: str, argument: str) -> Problem:
    first = path.partition(".")[0].replace("Trainer", package.partition(".")[0])
    distribution = first.replace("_", "-")
    version = importlib.metadata.version(distribution)
    off = {"": "", "predict": ", or set `predict=False`"}.get(
        argument, f", or set `{argument}=None`"
    )
    why = f"{distribution} {version} has no such name"
    return Problem(
        f"`{path}`",
        f"{why}, which `{argument}` needs" if argument else why,
        f'Type `pip install "{distribution}=={TESTED[distribution]}"`, which was tested{off}.',
    )
