"""The flags ``--memsave.*`` for a LightningCLI of either package."""

from typing import TYPE_CHECKING, Any

from lightning_memsave.callbacks.memsave import MemSaveCallback
from lightning_memsave.callbacks.settings.names import advise_in_parsers
from lightning_memsave.errors import ConfigurationError
from lightning_memsave.trainer.precision import full_name

if TYPE_CHECKING:
    from lightning.pytorch.cli import LightningCLI as _Base
else:
    _Base = object


class MemSaveCLIMixin(_Base):
    """Every argument of `MemSaveCallback` as a flag, for your own subclass of LightningCLI.

    Write it before the ``LightningCLI`` of either package. ``--memsave.enabled=false`` trains
    without the callback. ``--memsave.precision`` is passed to the Trainer; without it
    ``--trainer.precision`` is kept, also ``32-true``. ``--memsave.accumulate_grad_batches`` is
    handled by the callback, which divides the last, shorter window of an epoch by its real length.

    Example:
        >>> from lightning.pytorch.cli import LightningCLI
        >>> class MyCLI(MemSaveCLIMixin, LightningCLI):
        ...     def add_arguments_to_parser(self, parser):
        ...         parser.set_defaults({"memsave.optimizer": "lion_8bit"})
    """

    def add_core_arguments_to_parser(self, parser: Any) -> None:
        """Add the flags ``--memsave.*`` to those of Trainer, model and data.

        Args:
            parser: The parser of a subcommand, or of the whole command line.
        """
        super().add_core_arguments_to_parser(parser)
        advise_in_parsers(MemSaveCallback)
        # Not instantiated by the parser, which would pass `enabled` on.
        parser.add_class_arguments(
            MemSaveCallback, "memsave", instantiate=False, fail_untyped=False, sub_configs=True
        )
        parser.groups["memsave"].add_argument(
            "--memsave.enabled", type=bool, default=True, help="Whether to use the callback."
        )

    def instantiate_classes(self) -> None:
        """Set the precision, and create model, data and Trainer; wrong settings exit with 2."""
        parser = self._parser(self.subcommand)
        try:
            self._share_precision()
            super().instantiate_classes()
        except ConfigurationError as error:
            parser.error(str(error), error)

    def instantiate_trainer(self, **kwargs: Any) -> Any:
        """Create the Trainer, with `MemSaveCallback` after the user's own callbacks.

        Args:
            kwargs: Arguments of the Trainer that override the configuration.

        Returns:
            The Trainer.
        """
        config = self._own(self.config_init)
        arguments = dict(config.memsave)
        # Where a Trainer class takes no callbacks, LightningCLI says so.
        if arguments.pop("enabled") and "callbacks" in config.trainer:
            given = kwargs.get("callbacks", config.trainer.callbacks) or []
            callbacks = given if isinstance(given, list) else [given]
            kwargs["callbacks"] = [*callbacks, MemSaveCallback(**arguments)]
        return super().instantiate_trainer(**kwargs)

    def _own(self, config: Any) -> Any:
        return config if self.subcommand is None else config[self.subcommand]

    def _share_precision(self) -> None:
        config = self._own(self.config)
        memsave, trainer = config.memsave, config.trainer
        if not memsave.enabled or memsave.precision is None or "precision" not in trainer:
            return
        if memsave.precision == "auto":
            if trainer.precision is not None:
                memsave.precision = None
            return
        wanted = full_name(memsave.precision)
        if trainer.precision is None:
            trainer.precision = wanted
        elif full_name(trainer.precision) != wanted:
            raise ConfigurationError(
                f"--memsave.precision={memsave.precision} and --trainer.precision="
                f"{trainer.precision} disagree. Remove one of the two."
            )
