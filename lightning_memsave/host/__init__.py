"""The one place with private access to Lightning: which package, hooks, loops, precision.

Everything is resolved from the Trainer at run time, so that one callback class serves Trainers of
``lightning.pytorch`` and of ``pytorch_lightning``. Written against 2.6.6; ``check_host`` says which
names are missing in another release before anything is changed.
"""

from lightning_memsave.host.batch_parts import BatchParts
from lightning_memsave.host.evaluation import split_evaluation_batches
from lightning_memsave.host.inner_backward import GradientMarks
from lightning_memsave.host.logged_values import LoggedValues, combined
from lightning_memsave.host.parallel import (
    alone,
    average_gradients,
    has_static_graph,
    meets_in_forward,
    share_buffers,
    shares_gradients_its_own_way,
    smallest,
    without_sync,
)
from lightning_memsave.host.precision import (
    PrecisionState,
    gradient_scaler,
    half_precision_on_cpu,
    precision_state,
    set_precision,
)
from lightning_memsave.host.quiet import forget_metric_names, quiet, silent_logger
from lightning_memsave.host.signals import leave_signals
from lightning_memsave.host.trainer import (
    PACKAGES,
    SHARDED,
    averages_weights,
    builds_model_late,
    check_host,
    checkpoints_activations_itself,
    convert_loaded_optimizer_states,
    first_of,
    has_configure_optimizers,
    is_strategy,
    leave_device,
    logged_step,
    package_of,
    prunes_weights,
    put_first,
    unfreezes_later,
)
from lightning_memsave.host.training_loop import (
    adjust_losses,
    around_backward,
    around_step,
    has_open_window,
    may_split_batches,
    pass_batches,
    release_early,
    will_step,
)

__all__ = [
    "PACKAGES",
    "SHARDED",
    "BatchParts",
    "GradientMarks",
    "LoggedValues",
    "PrecisionState",
    "adjust_losses",
    "alone",
    "around_backward",
    "around_step",
    "average_gradients",
    "averages_weights",
    "builds_model_late",
    "check_host",
    "checkpoints_activations_itself",
    "combined",
    "convert_loaded_optimizer_states",
    "first_of",
    "forget_metric_names",
    "gradient_scaler",
    "half_precision_on_cpu",
    "has_configure_optimizers",
    "has_open_window",
    "has_static_graph",
    "is_strategy",
    "leave_device",
    "leave_signals",
    "logged_step",
    "may_split_batches",
    "meets_in_forward",
    "package_of",
    "pass_batches",
    "precision_state",
    "prunes_weights",
    "put_first",
    "quiet",
    "release_early",
    "set_precision",
    "share_buffers",
    "shares_gradients_its_own_way",
    "silent_logger",
    "smallest",
    "split_evaluation_batches",
    "unfreezes_later",
    "will_step",
    "without_sync",
]
