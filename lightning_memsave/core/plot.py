"""Axes to plot memory on, if matplotlib is installed."""

from typing import Any

from lightning_memsave.errors import ConfigurationError, MissingDependencyError
from lightning_memsave.units import format_bytes


def memory_axes(owner: str, ax: Any) -> tuple[Any, Any]:
    """Return a figure and axes for bytes."""
    try:
        from matplotlib import pyplot  # noqa: PLC0415
        from matplotlib.axes import Axes  # noqa: PLC0415
    except ImportError as error:
        raise MissingDependencyError(
            f"`{owner}.plot()` needs matplotlib, which is not installed. Run `pip install "
            "matplotlib`."
        ) from error
    if ax is not None and not isinstance(ax, Axes):
        raise ConfigurationError(
            f"`ax={ax!r}` is not an `Axes` of matplotlib. Write for example `fig, ax = "
            "plt.subplots()` and `plot(ax)`, or leave it out."
        )
    fig, ax = pyplot.subplots(layout="constrained") if ax is None else (ax.get_figure(), ax)
    ax.yaxis.set_major_formatter(lambda num_bytes, _: format_bytes(int(num_bytes)))
    return fig, ax
