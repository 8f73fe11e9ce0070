"""Which hooks belong to the user, and not to Lightning or this package."""

from typing import Any

from lightning_memsave import host

_OURS = ("lightning_memsave.", *(f"{package}." for package in host.PACKAGES))


def has_foreign(one: Any, hook: str) -> bool:
    """Say whether a module or a callback has a hook that is not Lightning's or this package's.

    Args:
        one: A LightningModule or a callback.
        hook: Name of the method.

    Returns:
        True if its class overrides the hook, or the object itself does, as ``LambdaCallback``.
    """
    method = getattr(type(one), hook, None)
    is_inherited = method is None or getattr(method, "__module__", "").startswith(_OURS)
    return hook in vars(one) or not is_inherited


def owners_of(trainer: Any, pl_module: Any, hook: str) -> list[str]:
    """Find out who has a hook of their own.

    Args:
        trainer: The Trainer.
        pl_module: Its LightningModule.
        hook: Name of a method of modules and callbacks.

    Returns:
        Their classes and the hook, each once, such as ``"Lit.on_after_backward"``.
    """
    owners = [one for one in (pl_module, *trainer.callbacks) if has_foreign(one, hook)]
    return list(dict.fromkeys(f"{type(one).__name__}.{hook}" for one in owners))


def owner_of(trainer: Any, pl_module: Any, hook: str) -> str:
    """Find out who is the first to have a hook of their own.

    Args:
        trainer: The Trainer.
        pl_module: Its LightningModule.
        hook: Name of a method of modules and callbacks.

    Returns:
        The class and the hook; an empty string if nobody has.
    """
    return next(iter(owners_of(trainer, pl_module, hook)), "")


def who_zeroes(trainer: Any, pl_module: Any) -> str:
    """Find who looks at old gradients where Lightning zeroes them, or zeroes in a way of its own.

    Args:
        trainer: The Trainer.
        pl_module: Its LightningModule.

    Returns:
        Class and hook; an empty string if nobody does.
    """
    hooks = ("on_before_zero_grad", "optimizer_zero_grad")
    return next(filter(None, (owner_of(trainer, pl_module, hook) for hook in hooks)), "")
