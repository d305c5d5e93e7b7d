"""Figures. Where none can be drawn there is a warning: no run fails because of a figure."""

import os
from collections.abc import Callable
from pathlib import Path

from common import log
from common.owner import refuse_lost


def save_figure(path: Path, plot: Callable[..., None], panels: int = 1) -> None:
    """Save a PNG whose bytes depend only on the data and on matplotlib.

    Args:
        path: of the file.
        plot: draws; called with one matplotlib Axes per panel.
        panels: side by side.
    """
    os.environ["MPLBACKEND"] = "agg"  # a notebook's own may need a package that is not here
    try:
        from matplotlib.figure import Figure
    except ImportError:
        log.warning(f"{path.name} is not drawn: matplotlib is not installed")
        return
    figure = Figure(figsize=(6.4 * panels, 4.2), layout="constrained")
    axes = figure.subplots(1, panels, squeeze=False)[0]
    for panel in axes:
        panel.grid(alpha=0.3)
    plot(*axes)
    refuse_lost(path)
    try:
        figure.savefig(path, dpi=110, metadata={"Software": None})
    except OSError as error:
        log.warning(f"{path} is not drawn: {error.strerror}")
