"""The report's pictures: inline SVG whose colours are those of the page (light or dark)."""

from __future__ import annotations

import io
import re

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt  # noqa: E402
from matplotlib.ticker import EngFormatter  # noqa: E402

# Matplotlib wants colours now, the page decides later: stand-ins, replaced in the SVG.
INK, GRID = "#010101", "#020202"
SERIES = ["#030301", "#030302", "#030303", "#030304", "#030305", "#030306", "#030307", "#030308"]
PAGE_COLOURS = {INK: "var(--ink)", GRID: "var(--grid)"} | {
    stand_in: f"var(--series-{i + 1})" for i, stand_in in enumerate(SERIES)
}
STYLE = {
    "svg.fonttype": "none",
    "font.family": "DejaVu Sans",
    "font.size": 9,
    "axes.edgecolor": GRID,
    "axes.labelcolor": INK,
    "axes.titlesize": 10,
    "axes.titlecolor": INK,
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "text.color": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "xtick.labelcolor": INK,
    "ytick.labelcolor": INK,
    "grid.color": GRID,
    "grid.linewidth": 0.6,
    "legend.frameon": False,
    "lines.linewidth": 1.8,
}


def picture(name: str, draw, panels: int = 1, height: float = 2.9, width: float = 8.6) -> str:
    """SVG text of what draw(axes) draws; axes is one or a list of them."""
    with plt.rc_context(STYLE | {"svg.hashsalt": name}):
        figure, axes = plt.subplots(1, panels, figsize=(width, height), layout="constrained")
        draw(axes)
        buffer = io.StringIO()
        figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None})
        plt.close(figure)
    svg = buffer.getvalue()
    svg = svg[svg.index("<svg") :]
    for stand_in, colour in PAGE_COLOURS.items():
        svg = svg.replace(stand_in, colour)
    # Names inside one picture must not meet those of another on the same page.
    svg = re.sub(r'(id="|url\(#|href="#)', rf"\g<1>{name}-", svg)
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r'(<svg[^>]*?) width="[^"]*" height="[^"]*"', r"\1", svg, count=1)
    return svg.replace("<svg", f'<svg role="img" class="picture" id="picture-{name}"', 1)


def stage_times(stages: list[dict]) -> str:
    def draw(axes):
        names = [stage["stage"] for stage in stages][::-1]
        seconds = [1 / stage["best_tokens_per_second"] for stage in stages][::-1]
        engineering = EngFormatter("s", places=1)
        bars = axes.barh(names, seconds, color=SERIES[0], height=0.66)
        axes.bar_label(bars, [engineering(value) for value in seconds], padding=4)
        axes.set_xscale("log")
        axes.set_xlim(min(seconds) / 3, max(seconds) * 5)
        axes.xaxis.set_major_formatter(EngFormatter("s", places=0))
        axes.minorticks_off()
        axes.set_xlabel("time per token (fastest chunk), logarithmic")
        axes.grid(axis="x")
        axes.tick_params(axis="y", length=0)

    return picture("stages", draw, height=2.9)


def measured_and_predicted(axes, measured, predicted, labels):
    places = range(len(labels))
    axes.bar(places, measured, width=0.7, color=SERIES[0], label="measured")
    axes.plot(places, predicted, "o", color=SERIES[1], markersize=5, label="predicted")
    axes.set_xticks(places, labels)
    axes.yaxis.set_major_formatter(EngFormatter(sep=" "))
    axes.grid(axis="y")


def panels_of(axes):
    return list(axes) if hasattr(axes, "__len__") else [axes]


def row_loads(orders: list[dict]) -> str:
    def draw(axes):
        for order, panel in zip(orders, panels_of(axes)):
            measured, predicted = order["row_load"]["measured"], order["row_load"]["predicted"]
            last = max(3, max(k for k, v in enumerate(measured) if v > 0))
            labels = [str(k) for k in range(last + 1)]
            if last == len(measured) - 1:
                labels[-1] += "+"
            measured_and_predicted(panel, measured[: last + 1], predicted[: last + 1], labels)
            panel.set_title(f"order {order['order']}")
            panel.set_xlabel("different n-grams in a row")
        panels_of(axes)[0].set_ylabel("rows (all heads)")
        panels_of(axes)[-1].legend()

    return picture("row-loads", draw, len(orders))


def shared_heads(orders: list[dict]) -> str:
    def draw(axes):
        for order, panel in zip(orders, panels_of(axes)):
            measured, predicted = order["heads_shared"]["measured"], order["heads_shared"]["predicted"]
            measured_and_predicted(panel, measured, predicted, [str(k) for k in range(len(measured))])
            panel.set_title(f"order {order['order']}")
            panel.set_xlabel("heads in which an n-gram shares its row")
        panels_of(axes)[0].set_ylabel("distinct n-grams")
        panels_of(axes)[0].legend()

    return picture("shared-heads", draw, len(orders))


def frequencies(orders: list[dict]) -> str:
    def draw(axes):
        for i, order in enumerate(orders):
            colour = SERIES[i % len(SERIES)]
            rows, ngrams = order["row_frequency"], order["ngram_frequency"]
            axes.loglog(rows["ranks"], rows["counts"], color=colour,
                        label=f"rows, order {order['order']}")
            axes.loglog(ngrams["ranks"], ngrams["counts"], color=colour, linestyle=(0, (2, 2)),
                        linewidth=1.2, label=f"n-grams, order {order['order']}")
        axes.set_xlabel("rank, most frequent first")
        axes.set_ylabel("times touched")
        axes.grid()
        axes.legend()

    return picture("frequencies", draw, height=3.4)


def gate_histogram(streams: list[dict]) -> str:
    def draw(axes):
        for i, stream in enumerate(streams):
            counts = stream["histogram"]
            total = max(1, sum(counts))
            edges = [k / len(counts) for k in range(len(counts) + 1)]
            axes.stairs([len(counts) * c / total for c in counts], edges,
                        color=SERIES[i % len(SERIES)], linewidth=1.5, label=f"stream {i}")
        axes.set_xlim(0, 1)
        axes.set_xlabel("gate α")
        axes.set_ylabel("density")
        axes.grid()
        axes.legend(ncols=2)

    return picture("gates", draw, height=2.6)


SUM_FLOOR = 1e-8  # below it a sum of fp32 numbers is 1


def sinkhorn_curves(curves: list[dict], used: int) -> str:
    """Distance of the sums of rows and columns from 1, by the number of rounds."""
    def draw(axes):
        for panel, line in zip(axes, ("row", "column")):
            for i, curve in enumerate(curves):
                label = ("maps of this text" if curve["logits"] == "text"
                         else f"random logits, deviation {curve['logits']}")
                for kind, style in (("worst", "-"), ("median", (0, (2, 2)))):
                    panel.plot(curve["repeat"], [max(SUM_FLOOR, x) for x in curve[f"{line}_{kind}"]],
                               color=SERIES[i % len(SERIES)], linestyle=style,
                               linewidth=1.8 if kind == "worst" else 1.2,
                               label=label if kind == "worst" else None)
            panel.axvline(used, color=INK, linewidth=0.8, linestyle=(0, (1, 3)))
            panel.set_yscale("log")
            panel.set_ylim(3e-7, 4)
            panel.set_xlim(0, max(curves[0]["repeat"]))
            panel.set_title(f"{line}s")
            panel.set_xlabel("rounds R")
            panel.grid()
        axes[0].set_ylabel("defect: largest |sum − 1| of a map")
        axes[1].text(used + 1, 2, f"R = {used} here", verticalalignment="top")
        axes[1].legend(loc="center right")

    return picture("sinkhorn", draw, 2, height=3.6)


def gain_curves(gain: dict) -> str:
    """Gain of the product of all maps so far, by depth; beyond fp32 there is no line."""
    looks = {  # random maps with Sinkhorn lie on those of the text, hence dots
        ("text", "unconstrained"): {"color": SERIES[0], "linestyle": (0, (3, 2))},
        ("random", "unconstrained"): {"color": SERIES[1], "linestyle": (0, (3, 2))},
        ("text", "constrained"): {"color": SERIES[0]},
        ("random", "constrained"): {"color": SERIES[1], "linestyle": "none", "marker": "o", "markersize": 3.5},
    }

    def draw(axes):
        top = 10.0
        for panel, direction in zip(axes, ("forward", "backward")):
            for (name, kind), look in looks.items():
                values = [row[f"composite_{direction}_gain"] for row in gain[name][kind]]
                values = [float("nan") if value is None else value for value in values]
                top = max([top, *(value for value in values if value == value)])
                with_or_without = "with" if kind == "constrained" else "without"
                panel.plot(range(1, len(values) + 1), values, **look,
                           label=f"maps of this text, {with_or_without} Sinkhorn"
                           if name == "text" else f"random maps, {with_or_without}")
            panel.set_yscale("log")
            panel.set_xlim(0, len(values) + 1)
            panel.set_title(direction)
            panel.set_xlabel("depth (sublayers)")
            panel.grid()
        for panel in axes:
            panel.set_ylim(0.2, 5 * top)
        axes[0].set_ylabel("largest gain of any token (factor)")
        axes[0].legend()

    return picture("gain", draw, 2, height=3.4)


def moving_mean(values: list[float], count: int) -> list[float]:
    """Mean of each value and up to count - 1 before it."""
    sums = [0.0]
    for value in values:
        sums.append(sums[-1] + value)
    return [(sums[i] - sums[max(0, i - count)]) / min(i, count) for i in range(1, len(sums))]


def loss_curve(losses: list[float], unigram_losses: list[float], smooth: int) -> str:
    def draw(axes):
        steps = range(1, len(losses) + 1)
        axes.plot(steps, losses, color=SERIES[0], linewidth=0.8, alpha=0.4)
        axes.plot(steps, moving_mean(losses, smooth), color=SERIES[0],
                  label=f"layer and softmax, mean of {smooth} steps")
        axes.plot(steps, moving_mean(unigram_losses, smooth), color=SERIES[1],
                  linestyle=(0, (3, 2)), label="frequencies of the classes alone, likewise")
        axes.set_xlim(1, max(2, len(losses)))
        axes.set_xlabel("step")
        axes.set_ylabel("loss (nats per token)")
        axes.grid()
        axes.legend()

    return picture("loss", draw, height=3.2)
