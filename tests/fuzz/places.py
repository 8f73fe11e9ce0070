"""Places in a training program where a user can write a line, by name."""

# Of a block inside of its submodule, of the block, and of the whole network; with the name of the
# activations there.
ACTIVATIONS = {
    "sub.before": "x",
    "sub.after": "x",
    "block.before": "x",
    "block.after": "y",
    "net.before": "h",
    "net.after": "h",
}
FORWARD = tuple(ACTIVATIONS)
START_OF_FORWARD = {"sub": "sub.before", "block": "block.before", "net": "net.before"}
STEP = ("step.before", "step.after")

HOOKS = {
    **dict.fromkeys(("on_fit_start", "on_train_start", "on_train_end"), ""),
    **dict.fromkeys(("on_train_epoch_start", "on_train_epoch_end"), ""),
    **dict.fromkeys(("on_validation_start", "on_validation_end"), ""),
    **dict.fromkeys(("on_validation_epoch_start", "on_validation_epoch_end"), ""),
    "on_train_batch_start": "batch, batch_idx",
    "on_train_batch_end": "outputs, batch, batch_idx",
    "on_validation_batch_start": "batch, batch_idx, dataloader_idx=0",
    "on_before_zero_grad": "optimizer",
    "on_validation_batch_end": "outputs, batch, batch_idx, dataloader_idx=0",
    "on_before_optimizer_step": "optimizer",
    "on_before_backward": "loss",
    "on_after_backward": "",
    "on_save_checkpoint": "checkpoint",
}
"""Hooks of the LightningModule (`lit:`) and of a callback (`cb:`), with their arguments."""
OVERRIDES = {
    "optimizer_step": (
        "epoch, batch_idx, optimizer, optimizer_closure=None",
        "optimizer.step(closure=optimizer_closure)",
    ),
    "optimizer_zero_grad": ("epoch, batch_idx, optimizer", "optimizer.zero_grad()"),
    "lr_scheduler_step": ("scheduler, metric", "scheduler.step()"),
    "configure_gradient_clipping": (
        "optimizer, gradient_clip_val=None, gradient_clip_algorithm=None",
        "self.clip_gradients(optimizer, gradient_clip_val, gradient_clip_algorithm)",
    ),
    "backward": ("loss, *args, **kwargs", "loss.backward(*args, **kwargs)"),
    "on_after_batch_transfer": ("batch, dataloader_idx", "return batch"),
    "on_validation_model_eval": ("", "super().on_validation_model_eval()"),
    "on_validation_model_train": ("", "super().on_validation_model_train()"),
}
"""Methods of the LightningModule, with their arguments and what they do anyway."""
MODULE_HOOKS = {
    "block_pre": ("{block}.register_forward_pre_hook", "module, args"),
    "block_fwd": ("{block}.register_forward_hook", "module, args, output"),
    "block_bwd": ("{block}.register_full_backward_hook", "module, into, out"),
    "block_bwd_pre": ("{block}.register_full_backward_pre_hook", "module, out"),
    "sub_fwd": ("{block}.sub.register_forward_hook", "module, args, output"),
    "net_fwd": ("self.net.register_forward_hook", "module, args, output"),
    "head_bwd": ("self.net.head.register_full_backward_hook", "module, into, out"),
    "param": ("{block}.sub.up.weight.register_hook", "grad"),
    "post_acc": ("{block}.sub.up.weight.register_post_accumulate_grad_hook", "param"),
    "act": ("self.net.hooks.append", "grad"),
}
"""Hooks of modules and tensors: how to register one, and its arguments."""
OPTIMIZER_HOOKS = {
    name: (f"optimizer.register_step_{name}_hook", "optimizer, args, kwargs")
    for name in ("pre", "post")
}

OUTER = (
    *(f"{owner}:{hook}" for owner in ("lit", "cb") for hook in HOOKS),
    *(f"lit:{name}" for name in OVERRIDES),
    *("lit:optimizer_step.closure", "lit:optimizer_step.after", "lit:backward.after"),
    *("lit:optimizer_zero_grad.after", "lit:lr_scheduler_step.after"),
    *("lit:configure_gradient_clipping.after", "lit:validation_step"),
    *(f"hook:{hook}" for hook in MODULE_HOOKS),
    *("opt:pre", "opt:post", "wrap:before", "wrap:after", "loader"),
)
"""All places outside of `forward` and of `training_step`."""

AFTER_STEP = (
    *("lit:on_train_batch_end", "cb:on_train_batch_end", "lit:on_before_zero_grad", "opt:post"),
    *("wrap:after", "lit:optimizer_zero_grad", "lit:optimizer_step.after"),
    *("lit:lr_scheduler_step.after", "cb:on_train_epoch_end"),
)
AFTER_BACKWARD = (
    *("lit:on_after_backward", "lit:on_before_optimizer_step"),
    *("cb:on_after_backward", "cb:on_before_optimizer_step"),
    *("hook:param", "hook:post_acc", "lit:backward.after", "lit:configure_gradient_clipping"),
    *("lit:optimizer_step.closure", "opt:pre"),
)
AROUND_VALIDATION = (
    *(
        (f"{owner}:on_validation_{part}start", f"{owner}:on_validation_{part}end")
        for owner in ("lit", "cb")
        for part in ("", "epoch_", "batch_")
    ),
    ("lit:on_validation_model_eval", "lit:on_validation_model_train"),
    ("lit:validation_step", "lit:on_validation_batch_end"),
)
"""Pairs of places between which weights may be replaced."""

PER_MICRO_BATCH = (
    *("step.", "net.", "hook:", "val.", "lit:validation_step", "lit:on_before_backward"),
    *("cb:on_before_backward", "loader", "lit:on_after_backward", "cb:on_after_backward"),
    *("lit:backward", "lit:on_after_batch", "lit:optimizer_step.closure"),
)
"""Beginnings of the names of places that may run once per micro-batch."""


def owned_by(place: str) -> str:
    """Return what the LightningModule is called there."""
    if place.startswith("lit") or place in STEP:
        return "self"
    return "pl_module" if place.startswith("cb") else "lit"
