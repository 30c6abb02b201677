"""Line charts of benchmarks, drawn with matplotlib as one SVG file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

Points = Sequence[tuple[float, float]]


@dataclass(frozen=True, slots=True)
class Panel:
    """One chart: a line per name, and in `limits` a dashed line of the same colour for some of them."""

    title: str
    x_label: str
    y_label: str
    lines: Mapping[str, Points]
    limits: Mapping[str, Points] = field(default_factory=dict)
    is_logarithmic: bool = False


def save_plot(path: Path, panels: Sequence[Panel]) -> None:
    """Write the panels side by side. Raises ImportError without matplotlib."""
    import matplotlib as mpl

    mpl.use("svg")
    from matplotlib import pyplot

    figure, all_axes = pyplot.subplots(1, len(panels), figsize=(5.5 * len(panels), 4), squeeze=False, layout="tight")
    for panel, axes in zip(panels, all_axes[0], strict=True):
        for name, points in panel.lines.items():
            (line,) = axes.plot(*zip(*points, strict=True), marker="o", markersize=3, label=name)
            if limit := panel.limits.get(name):
                axes.plot(*zip(*limit, strict=True), linestyle="--", linewidth=1, color=line.get_color())
        axes.set(title=panel.title, xlabel=panel.x_label, ylabel=panel.y_label)
        if panel.is_logarithmic:
            axes.set_xscale("log", base=2)
            axes.set_yscale("log")
        else:
            axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
        axes.legend(fontsize="small")
    figure.savefig(path, format="svg", metadata={"Date": None})
    pyplot.close(figure)
