"""Results as a table, a page and a picture."""

from __future__ import annotations

import html
import itertools
from collections.abc import Iterator
from pathlib import Path

from .measure import OURS, Result

_COLORS = {
    OURS: "#1b6ca8",
    "torch eager": "#b0b0b0",
    "torch.compile": "#787878",
    "TileKernels": "#d98032",
    "Liger": "#6a9f58",
    "TransformerEngine": "#9467bd",
}
_HEADER = ("operator", "variant", "best us", "median us", "GB/s", "of copy", "to ours", "difference")


def groups(results: list[Result]) -> Iterator[tuple[str, list[Result]]]:
    """ "mhc_post forward" and its variants."""
    for (operator, direction), rows in itertools.groupby(results, lambda r: (r.operator, r.direction)):
        yield f"{operator} {direction}", list(rows)


def cells(result: Result) -> tuple[str, ...]:
    return (
        result.variant,
        f"{result.best * 1e6:.1f}",
        f"{result.median * 1e6:.1f}",
        f"{result.bytes_moved / result.best / 1e9:.1f}",
        f"{result.share:.2f}",
        f"{result.ratio:.2f}x",
        "" if result.difference is None else f"{result.difference:.1e}",
    )


def table(results: list[Result]) -> str:
    lines = [_HEADER]
    for title, rows in groups(results):
        lines += [(title if i == 0 else "", *cells(row)) for i, row in enumerate(rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(_HEADER))]

    def text(line: tuple[str, ...]) -> str:
        left = [cell.ljust(width) for cell, width in zip(line[:2], widths)]
        return "  ".join(left + [cell.rjust(width) for cell, width in zip(line[2:], widths[2:])]).rstrip()

    return "\n".join(map(text, lines))


def page(results: list[Result], remarks: list[str], title: str) -> str:
    """One HTML file without anything from elsewhere; bars are times relative to ours."""
    body = []
    for name, rows in groups(results):
        slowest = max(row.ratio for row in rows)
        body.append(f'<tr class="group"><th colspan="8">{html.escape(name)}</th></tr>')
        for row in rows:
            bar = (
                f'<div class="bar" style="width:{100 * row.ratio / slowest:.1f}%;'
                f'background:{_COLORS.get(row.variant, "#444")}"></div>'
            )
            numbers = "".join(f"<td>{html.escape(cell)}</td>" for cell in cells(row))
            body.append(f'<tr>{numbers}<td class="bars">{bar}</td></tr>')
    heads = "".join(f"<th>{head}</th>" for head in (*_HEADER[1:], "time"))
    notes = "".join(f"<li>{html.escape(remark)}</li>" for remark in remarks)
    return f"""<!doctype html>
<meta charset="utf-8">
<title>{html.escape(title)}</title>
<style>
body {{ font: 14px/1.4 system-ui, sans-serif; max-width: 70em; margin: 2em auto; padding: 0 1em }}
table {{ border-collapse: collapse; width: 100% }}
td, th {{ padding: .15em .6em; text-align: right; white-space: nowrap }}
td:first-child, th:first-child {{ text-align: left }}
.group th {{ text-align: left; padding-top: 1em; border-bottom: 1px solid #ccc }}
.bars {{ width: 40% }}
.bar {{ height: .9em }}
</style>
<h1>{html.escape(title)}</h1>
<p>Best of several turns; "of copy" is the share of the rate of a copy in the same run, "to ours" the time
relative to ours, "difference" the squares of differences from the eager formula over the squares.</p>
<table><tr>{heads}</tr>{"".join(body)}</table>
<ul>{notes}</ul>
"""


def picture(results: list[Result], title: str, path: Path) -> None:
    """Bars of all variants, times relative to ours. Needs matplotlib."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    named = list(groups(results))
    variants = list(dict.fromkeys(row.variant for row in results))
    figure, axes = plt.subplots(figsize=(9, 1.2 + 0.18 * len(results) + 0.12 * len(named)))
    at, ticks = 0.0, []
    for name, rows in named:
        ticks.append((at + (len(rows) - 1) / 2, name))
        for row in rows:
            axes.barh(at, row.ratio, color=_COLORS.get(row.variant, "#444"), height=0.9)
            axes.text(row.ratio, at, f" {row.ratio:.1f}x  {row.best * 1e6:.0f} us", va="center", fontsize=6)
            at += 1
        at += 1
    axes.set_yticks([y for y, _ in ticks], [name for _, name in ticks], fontsize=7)
    axes.invert_yaxis()
    axes.set_xscale("log")
    axes.axvline(1.0, color="black", linewidth=0.6)
    axes.set_xlabel("time relative to engramhc (log scale; right of the line engramhc is faster)")
    axes.set_title(title, fontsize=9)
    handles = [plt.Rectangle((0, 0), 1, 1, color=_COLORS.get(v, "#444")) for v in variants]
    axes.legend(handles, variants, fontsize=7, loc="lower right")
    axes.set_xlim(right=4 * max(row.ratio for row in results))
    figure.tight_layout()
    figure.savefig(path, dpi=150)
    plt.close(figure)
