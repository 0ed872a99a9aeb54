"""The front of time and cost as a picture."""

from pathlib import Path

from slipstream.plan.choose import Choice


def draw_front(choice: Choice, path: Path) -> None:
    """Draw every plan that no other beats, and the chosen ones; a .png, or an .html that shows one."""
    assert path.suffix in (".png", ".html"), "the command line takes no other"
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), dpi=120, layout="tight")
    axes = figure.subplots()
    days, dollars = [plan.seconds / 86400 for plan in choice.front], [plan.cost for plan in choice.front]
    axes.plot(days, dollars, "o-", color="#9db4d0", markersize=3, label="no other is both sooner and cheaper")
    for number, plan in enumerate(choice.plans):
        place = (plan.seconds / 86400, plan.cost)
        axes.plot(*place, "o", color="#d1495b", markersize=7)
        axes.annotate(f" {chr(ord('A') + number)}: {plan.machines} × {plan.offer.machine}", place, fontsize=7)
    axes.set(xlabel="days", ylabel="dollars", xscale="log", yscale="log")
    axes.grid(alpha=0.25, which="both")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    if path.suffix == ".png":
        figure.savefig(path)
        return
    from io import StringIO

    drawn = StringIO()
    figure.savefig(drawn, format="svg")
    path.write_text(f"<!doctype html><meta charset=utf-8><title>Plans</title>{drawn.getvalue()}")
