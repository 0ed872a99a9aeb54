"""The curve of a run as a picture."""

from pathlib import Path

from slipstream.runs.folder import RunFolder, read_lines


def draw_curve(run: RunFolder) -> Path | None:
    """Draw training and validation loss over samples; None if there is nothing to draw yet."""
    lines = [line for line in read_lines(run.metrics) if line["loss"] is not None]
    if not lines:
        return None
    from matplotlib.figure import Figure  # not pyplot: it starts slowly, and wants to know of screens

    figure = Figure(figsize=(8, 4.5), dpi=120, layout="tight")
    axes = figure.subplots()
    samples, losses = [line["samples"] for line in lines], [line["loss"] for line in lines]
    axes.plot(samples, losses, color="#9db4d0", linewidth=0.8, label="loss, each step")
    axes.plot(samples, _smooth(losses), color="#1f4e8c", linewidth=1.8, label="loss, smoothed")
    judged = [line for line in lines if line.get("val_loss") is not None]
    if judged:
        axes.plot(
            [line["samples"] for line in judged], [line["val_loss"] for line in judged],
            color="#d1495b", marker="o", markersize=4, linewidth=1.4, label="validation loss",
        )  # fmt: skip
    axes.set(xlabel="samples", ylabel="loss", title=run.name)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    figure.savefig(run.curve)
    return run.curve


def _smooth(values: list[float], keep: float = 0.9) -> list[float]:
    """Exponential mean, corrected for its start."""
    smoothed, mean, weight = [], 0.0, 0.0
    for value in values:
        mean, weight = keep * mean + (1 - keep) * value, keep * weight + (1 - keep)
        smoothed.append(mean / weight)
    return smoothed
