"""A plot of losses."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt


def plot_losses(curves: Mapping[str, Sequence[float]], path: Path) -> None:
    """One curve for each name, over the steps."""
    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    for i, (name, losses) in enumerate(curves.items()):
        # A dashed line over a solid one, so that both can be seen if they are equal.
        axes.plot(range(1, len(losses) + 1), losses, "--" if i % 2 else "-", label=name)
    axes.set_xlabel("step")
    axes.set_ylabel("loss, nats per byte")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=120)
    plt.close(figure)
