"""Refuse what nothing can be predicted for."""

from typing import Any

from lightning_memsave.errors import ConfigurationError
from lightning_memsave.measure.storages import tensors_in


def check_arguments(device: str, time_limit_s: float | None) -> None:
    """Refuse a device or a time that there is not.

    Args:
        device: ``"cuda"`` or ``"cpu"``.
        time_limit_s: Seconds, or ``None``.

    Raises:
        ConfigurationError: If one of them is something else.
    """
    if device not in ("cuda", "cpu"):
        raise ConfigurationError(
            f'`device={device!r}` is not known here. Use `"cuda"` or `"cpu"`; for one GPU in '
            'particular: `device="cuda", gpu="T4"`.'
        )
    if time_limit_s is not None and not time_limit_s > 0:
        raise ConfigurationError(
            f"`time_limit_s={time_limit_s!r}` is no time to predict in. Use seconds, such as "
            "`time_limit_s=60`, or `None` for no limit."
        )


def check_batch(batch: Any) -> None:
    """Refuse a batch with which nothing would be trained.

    Args:
        batch: Tensors in any nesting.

    Raises:
        ConfigurationError: If there is none, or no sample in it.
    """
    if batch is None:
        raise ConfigurationError(
            "`batch=None` is no batch. Pass one that `training_step` takes, on any device: for "
            "example `next(iter(train_dataloader))`."
        )
    sizes = {tensor.shape[0] for tensor in tensors_in(batch) if tensor.ndim}
    if sizes == {0}:
        raise ConfigurationError(
            "The batch has no samples: the first size of its tensors is 0. Pass one of the size "
            "that is trained with."
        )
