"""One self-contained HTML page about a run of the pipeline and, where there were any, of the stack and
the training.

    report.py FIGURES.json IDS.npy OUTPUT.html [--stack STACK.json] [--training TRAINING.json]
        [--title TEXT]
"""

from __future__ import annotations

import argparse
import html
import math
import os
import pathlib

import figures
from results import Results, deviations, expected, number, visible
from terminal import fail

GATE_SPREAD = 0.3  # distance from 1/2 at which the colour is full
MAP_STRENGTH = 0.6  # opacity of a full cell of a map: the number on it stays readable
POST_FULL = 2
SMOOTH = 20  # steps that the bold line of the loss averages


def table(header: list[str], rows: list[list[str]], text_columns: int = 1) -> str:
    """Cells are HTML already. The first `text_columns` are text, the rest numbers."""

    def line(cells, tag):
        return "<tr>" + "".join(
            f'<{tag} class="text">{cell}</{tag}>' if i < text_columns else f"<{tag}>{cell}</{tag}>"
            for i, cell in enumerate(cells)
        ) + "</tr>"

    body = "\n".join(line(row, "td") for row in rows)
    return (f'<div class="scroll"><table><thead>{line(header, "th")}</thead>'
            f"<tbody>\n{body}\n</tbody></table></div>")


def code(text: str) -> str:
    return f"<code>{html.escape(visible(text))}</code>"


def figure(svg: str, caption: str) -> str:
    return f"<figure>{svg}<figcaption>{caption}</figcaption></figure>"


def tile(value: str, label: str) -> str:
    return f'<div class="tile"><b>{value}</b><span>{label}</span></div>'


def verdict(good: bool, yes: str, no: str) -> str:
    return f'<span class="{"good" if good else "bad"}">{yes if good else no}</span>'


def rate(value: float) -> str:
    for limit, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= limit:
            return f"{value / limit:.3g} {unit}"
    return f"{value:.3g}"


def overview(r: Results) -> str:
    c, v, layer = r["configuration"], r["vocabulary"], r.stage("layer")
    tiles = [
        tile(f"{c['tokens']:,}", "tokens of text"),
        tile(f"{v['compressed_ids']:,}",
             f"compressed ids, {1 - v['compressed_ids'] / v['ids']:.1%} fewer than {v['ids']:,}"),
        tile(f"{sum(order['distinct_ngrams'] for order in r['orders']):,}",
             f"different n-grams of orders 2 to {c['max_ngram']}"),
        tile(f"{c['rows']:,}", f"table rows of {c['row_width']} bf16 values "
                               f"({c['table_bytes'] / 1e6:.0f} MB)"),
        tile(f"{c['rows_per_token']}", "rows fetched per token"),
        tile(f"{r['rows_touched'] / c['rows']:.1%}", f"of the rows touched ({r['rows_touched']:,})"),
    ]
    if layer:
        tiles.append(tile(f"{layer['best_gb_per_second']:.1f} GB/s",
                          f"fused layer, {layer['share_of_copy']:.0%} of the copy rate"))
    if r.stack:
        gain = r.stack["gain"]["text"]["constrained"][-1]
        tiles.append(tile(number(max(gain["composite_forward_gain"], gain["composite_backward_gain"])),
                          f"largest gain of a signal through {r.stack['configuration']['sublayers']} mHC "
                          "sublayers"))
    tiles.append(tile(verdict(r.all_equal, "equal", "different"),
                      "fast kernels and reference, in all sampled chunks"))
    return '<div class="tiles">' + "".join(tiles) + "</div>"


def stage_row(stage: dict) -> list[str]:
    return [stage["stage"], f"<code>{stage['op']}</code>", f"<code>{stage['implementation']}</code>",
            f"{stage['tokens']:,}", f"{stage['seconds']:.3f}", rate(stage["best_tokens_per_second"]),
            f"{stage['bytes_per_token']:,.0f}", f"{stage['best_gb_per_second']:.2f}",
            f"{stage['share_of_copy']:.2f}"]


STAGE_HEADER = ["stage", "operator", "implementation", "tokens", "seconds", "tokens/s", "bytes/token",
                "GB/s", "of copy"]


def stages(r: Results) -> str:
    rows = [stage_row(stage) for stage in r["stages"]]
    projection = r.stage("projection")
    compute = ""
    if projection:
        compute = (f" The projection is the only stage bound by arithmetic: "
                   f"{projection['best_gflop_per_second']:.0f} GFLOP/s.")
    return f"""<h2 id="stages">Stages</h2>
<p>Each stage is one operator of the library, called for {r["configuration"]["chunk"]:,} tokens at a
time on {r["configuration"]["threads"]} threads. <em>Gate</em> and <em>convolution</em> are the two
halves of the layer on their own; <em>layer</em> does both and adds the result to the
streams in one pass, with one rounding, and that is what a model would call.</p>
{figure(figures.stage_times(r["stages"]), "Time per token and stage.")}
{table(STAGE_HEADER, rows, 3)}
<p class="note">Seconds are the sum over all chunks; the rates are those of the fastest chunk, with
bytes by the formulas of the operators; a plain copy of memory reached {r["copy_gb_per_second"]:.1f} GB/s (read and written) in the
same run. The ids of one chunk fit in the caches, so the first stages can be faster than a
copy.{compute}</p>"""


def vocabulary(r: Results) -> str:
    v = r["vocabulary"]
    rows = [
        ["whole tokenizer", f"{v['ids']:,}", f"{v['compressed_ids']:,}",
         f"{1 - v['compressed_ids'] / v['ids']:.1%}"],
        ["ids that occur in this text", f"{v['ids_in_text']:,}", f"{v['compressed_ids_in_text']:,}",
         f"{1 - v['compressed_ids_in_text'] / v['ids_in_text']:.1%}"],
    ]
    return f"""<h2 id="vocabulary">Vocabulary</h2>
<p>Before hashing, tokens that differ only in case, accents, compatibility forms or surrounding
white space get one id: <code>The</code>, <code>·the</code> and <code>THE</code> look up the same
memory.</p>
{table(["", "ids", "compressed", "fewer"], rows)}"""


def ngrams(r: Results) -> str:
    parts = []
    for order in r["orders"]:
        top = order["most_frequent"]
        rows = [[code(r.ngram(entry, order["order"])), f"{entry['count']:,}",
                 f"{entry['heads_shared']}", f"{entry['other_ngrams_in_its_rows']}"]
                for entry in top["ngrams"]]
        heads = r["configuration"]["heads"]
        parts.append(f"""<div><p><b>Order {order["order"]}</b>: {order["distinct_ngrams"]:,} distinct,
{order["occurring_once"]:,} of them once. The {len(rows)} most frequent hit
{top["distinct_rows"]} distinct rows ({len(rows)} × {heads} = {len(rows) * heads} if none is
shared).</p>
{table(["n-gram", "times", f"shared heads of {heads}", "other n-grams in its rows"], rows)}</div>""")
    return f"""<h2 id="ngrams">Most frequent n-grams</h2>
<p>Shown as first spelled in the text; <code>·</code> is a space, <code>↵</code> the end of a
line.</p>
<div class="columns">{"".join(parts)}</div>"""


def collisions(r: Results) -> str:
    heads = r["configuration"]["heads"]
    tables, joint = [], []
    for order in r["orders"]:
        for entry in order["tables"]:
            tables.append([f"order {order['order']}, head {entry['head']}", f"{entry['size']:,}",
                           f"{entry['ngrams']:,}", f"{entry['rows_used']:,}",
                           f"{entry['rows_used_predicted']:,.0f}", f"{deviations(entry):+.2f}",
                           f"{entry['ngrams_sharing'] / max(1, entry['ngrams']):.2%}",
                           f"{entry['ngrams_sharing_predicted'] / max(1, entry['ngrams']):.2%}"])
        pairs = order["joint_collisions"]
        for j in range(1, min(heads, 4) + 1):
            joint.append([f"order {order['order']}", f"{j} or more", f"{pairs['ngrams']:,}",
                          f"{pairs['measured'][j]:,}", expected(pairs["predicted"][j])])
    return f"""<h2 id="collisions">Collisions</h2>
<p>A table of M rows holds far more possible n-grams than rows, so different n-grams meet. If the
hash spreads them evenly, U distinct n-grams use M·(1 − (1 − 1/M)<sup>U</sup>) rows: the birthday
formula. Bars are this text, dots the prediction.</p>
{figure(figures.row_loads(r["orders"]), "How many different n-grams a row holds.")}
<p>One shared row does little harm: an n-gram reads {heads} rows per order, from tables of different
prime sizes, so two n-grams that meet in one head are apart in the others.</p>
{figure(figures.shared_heads(r["orders"]), "In how many heads an n-gram shares its row with anybody.")}
{table(["order", "heads in which two n-grams meet", "n-grams taken", "pairs measured", "predicted"],
       joint, 2)}
{table(["table", "rows M", "n-grams U", "rows used", "predicted", "deviations",
        "n-grams sharing", "predicted"], tables)}
<p class="note">Deviations: measured minus predicted, in standard deviations of the random
model; values within ±3 are what chance gives.</p>"""


def frequency(r: Results) -> str:
    return f"""<h2 id="frequency">Row frequency</h2>
<p>Language is steep: few n-grams make up most of the traffic, and their rows with them. This is
what makes a cache in front of a large table worth having.</p>
{figure(figures.frequencies(r["orders"]), "Touches of rows (solid) and of n-grams (dashed) by rank.")}"""


def shade(alpha: float) -> str:
    strength = min(1.0, abs(alpha - 0.5) / GATE_SPREAD)
    return f"rgba(var(--{'open' if alpha > 0.5 else 'closed'}), {0.9 * strength:.2f})"


def heat_unit(text: str, alpha: list[float]) -> str:
    mean = sum(alpha) / len(alpha)
    title = html.escape("gates " + " ".join(f"{a:.2f}" for a in alpha))
    bars = "".join(f'<i style="background:{shade(a)}"></i>' for a in alpha)
    shown = html.escape(text.replace("\n", "↵") or " ")
    return (f'<span class="unit" title="{title}"><span class="token" '
            f'style="background:{shade(mean)}">{shown}</span>{bars}</span>')


def heat(r: Results, name: str, first_token: int, gates: list[list[float]]) -> str:
    units = []
    for i, alpha in enumerate(gates):
        text = r.token(first_token + i)
        units.append(heat_unit(text, alpha) + ("<br>" if "\n" in text else ""))
    return f'<div class="heat" id="{name}">{"".join(units)}</div>'


def gates(r: Results) -> str:
    gate = r["gate"]
    paragraph = gate["paragraph"]
    streams = [stream for stream in gate["streams"] if "mean" in stream]
    rows = [[f"stream {i}", f"{s['mean']:.4f}", f"{s['deviation']:.4f}", f"{s['min']:.4f}",
             f"{s['max']:.4f}"] for i, s in enumerate(streams)]
    if not paragraph["alpha"] or not rows:
        return ""
    trained = ' Trained ones are <a href="#training">below</a>.' if r.training else ""
    return f"""<h2 id="gates">Gates over a paragraph</h2>
<p>The gate α decides how much of the looked-up value each residual stream takes in. Below every
token is one bar per stream, stream 0 on top; the colour behind the text is their mean.</p>
<p class="note">Weights and table are random here, not trained: what the colours show is the
mechanism. Equal contexts give equal gates, and each stream decides for itself.{trained}</p>
<div class="scale">closed <div></div> open <span>(colourless: α = ½)</span></div>
{heat(r, "heat", paragraph["first_token"], paragraph["alpha"])}
{figure(figures.gate_histogram(streams), "Gates of all tokens. The square root in front of the "
        "sigmoid is steepest at 0, so values close to ½ are rare.")}
{table(["", "mean", "deviation", "least", "most"], rows)}"""


def intensity(passes: list[dict]) -> str:
    """What bounds the stack; a rate of operations over one of bytes are operations per byte."""
    forward, backward = (p["best_gflop_per_second"] / p["best_gb_per_second"] for p in passes)
    return (f"Forward makes {forward:.0f} floating-point operations per byte, backward {backward:.0f}: the "
            "projection and its gradient are as much arithmetic as traffic.")


def shaded(colour: str, value: float, full: float = 1) -> str:
    """A cell of a map: the number on a colour that is full at `full`."""
    strength = MAP_STRENGTH * min(1.0, value / full)
    shown = f"{value:.2f}".removeprefix("0")
    return f'<i class="{colour}" style="background:rgba(var(--{colour}), {strength:.2f})">{shown}</i>'


def small_map(pre: list[float], post: list[float], comb: list[list[float]]) -> str:
    """comb with pre of its input streams on the left and post of its output streams below."""
    cells = []
    for i, row in enumerate(comb):
        cells.append(shaded("read", pre[i]))
        cells += [shaded("mix", value) for value in row]
    cells.append("<i></i>")
    cells += [shaded("write", value, POST_FULL) for value in post]
    return f'<div class="map" style="--n:{len(pre) + 1}">{"".join(cells)}</div>'


def maps(r: Results) -> str:
    m = r.stack["maps"]
    if not m["sublayers"] or not m["comb"][0]:
        return ""
    texts = [code(r.token(m["first_token"] + t)) for t in range(len(m["comb"][0]))]
    rows = []
    for s, sublayer in enumerate(m["sublayers"]):
        cells = "".join(f"<td>{small_map(*values)}</td>"
                        for values in zip(m["pre"][s], m["post"][s], m["comb"][s]))
        rows.append(f'<tr><th class="text">sublayer {sublayer + 1}</th>{cells}</tr>')
    header = "".join(f"<th>{text}</th>" for text in texts)
    return f"""<p>A map for every token and sublayer. Row i of <em>comb</em> is what input stream i gives
to each output stream; rows and columns sum to 1. Left of it <em>pre</em>: how much of stream i the
layer reads. Below it <em>post</em>: how much of the layer's output goes into each output stream.</p>
<div class="legend"><span><b class="read"></b>pre, 0 to 1</span><span><b class="mix"></b>comb, 0 to
1</span><span><b class="write"></b>post, 0 to {POST_FULL}</span></div>
<div class="scroll"><table class="maps"><thead><tr><th></th>{header}</tr></thead><tbody>
{"".join(rows)}</tbody></table></div>"""


def stack(r: Results) -> str:
    if not r.stack:
        return ""
    c, gain = r.stack["configuration"], r.stack["gain"]
    rows = []
    for stage in r.stack["stages"] + r.stack["passes"]:
        row = stage_row(stage)
        if not stage["op"]:
            row[1] = "tanh" if stage["stage"].startswith("layer") else "all of these operators"
        gflops = stage["best_gflop_per_second"]
        rows.append([*row, f"{gflops:.1f}" if gflops else ""])
    text = {kind: stacks[-1] for kind, stacks in gain["text"].items()}
    counts = {curve["maps"] for curve in r.stack["sinkhorn"] if curve["logits"] != "text"}
    return f"""<h2 id="streams">Streams through mHC sublayers</h2>
<p>The streams of the first {c["tokens"]:,} tokens, as Engram left them, go through {c["sublayers"]}
mHC sublayers and their gradients all the way back. At the entry of a sublayer the token's own streams
say how they are to be read, mixed and written: a projection of all of them gives the numbers
<em>pre</em>, <em>comb</em> and <em>post</em>. A <em>seam</em> is the exit of one sublayer and the entry of the next one in one
operator.</p>
<p class="note">Weights are random here too, and a tanh stands for attention and feed-forward. The
gradient starts as random numbers on the last streams.</p>
{table([*STAGE_HEADER, "GFLOP/s"], rows, 3)}
<p class="note">Tokens count once for every sublayer; the last two rows are the whole stack, per token
of text and without the layers, at the rate of the fastest chunk of {c["chunk"]:,}. Bytes: every input
and every output once; those of a chunk may still lie in a cache, which is faster than a copy of memory
({r.stack["copy_gb_per_second"]:.1f} GB/s in the same run).
{intensity(r.stack["passes"])}</p>
<h3 id="sinkhorn">How fast Sinkhorn converges</h3>
<p>Sinkhorn makes a map doubly stochastic by dividing rows and columns by their sums in turn. The last
step is one of columns, so columns are exact up to eps = {c["eps"]:g}; rows come as close as the rounds R
bring them, and that depends on how far apart the logits are. No R is safe for all.</p>
{figure(figures.sinkhorn_curves(r.stack["sinkhorn"], c["repeat"]), "Worst (solid) and median (dashed) of "
        f"{max(counts):,} random maps each, and of the {c['tokens'] * c['sublayers']:,} maps of this text: "
        f"logits of deviation {c['spread']:g} and 1 more on the diagonal.")}
<h3 id="maps">What a token does to its streams</h3>
{maps(r)}
<h3 id="gain">What the constraint is for</h3>
<p>How much larger can a signal become on its way through all maps? Forwards that is the largest sum
of a column of their product, backwards that of a row. Maps that Sinkhorn made keep both at 1, however
deep: {number(text["constrained"]["composite_forward_gain"])} and
{number(text["constrained"]["composite_backward_gain"])} after {c["sublayers"]} sublayers of this text. The same logits
taken as maps enlarge it {number(text["unconstrained"]["composite_forward_gain"])} and
{number(text["unconstrained"]["composite_backward_gain"])} times.</p>
{figure(figures.gain_curves(gain), "Gain of the product of the maps up to a depth, worst token. Random maps: "
        "without Sinkhorn, normal numbers of the same deviation.")}"""


def training(r: Results) -> str:
    if not r.training:
        return ""
    t, last, gate = r.training, r.training["last"], r.training["gate"]
    c, s = t["configuration"], t["settings"]
    seen = t["steps"] * s["tokens"]
    passes = t["steps"] / c["steps_per_pass"]
    fresh = ("Every token is new when it is predicted" if passes <= 1
             else f"The text is read {passes:.1f} times")
    heats = ""
    if gate["before"]:
        first = gate["first_token"]
        heats = f"""<p>Gates of this small layer over the same paragraph:</p>
<div class="scale">closed <div></div> open <span>(colourless: α = ½)</span></div>
<div class="columns"><div><p><b>Before training</b></p>{heat(r, "heat-before", first, gate["before"])}</div>
<div><p><b>After {t["steps"]:,} steps</b></p>{heat(r, "heat-after", first, gate["after"])}</div></div>"""
    return f"""<h2 id="training">Training</h2>
<p>The same path, small enough to learn in seconds: {c["rows"]:,} rows of {c["row_width"]} fp32 values,
{s["streams"]} streams of {s["width"]}. From what the layer added to the streams, a softmax predicts the
next token: one of the {s["classes"] - 1} most frequent compressed ids, or any other. It sees nothing
else, so what it knows beyond the frequencies of these classes came out of the table.</p>
{figure(figures.loss_curve(t["losses"], t["unigram_losses"], SMOOTH),
        "Cross entropy of each step, before the step is made.")}
<div class="tiles">
{tile(f"{last['loss']:.3f}", f"nats per token over the last {last['steps']} steps, perplexity {math.exp(last['loss']):.1f}")}
{tile(f"{last['unigram_loss']:.3f}", f"by frequencies alone, perplexity {math.exp(last['unigram_loss']):.1f}")}
{tile(f"{seen:,}", f"tokens in {t['steps']:,} steps of {s['tokens']:,}")}
</div>
<p>{fresh}. The rows learn by the optimizer of the tables (momentum, then rows and columns scaled to
equal norms in turn), all else by momentum and a plain step. The incoming streams are fixed random
vectors, one for each id. A run that is stopped goes on from its checkpoint to the same bits, on any
number of threads: state <code>{t["checksum"]}</code>.</p>
{heats}"""


def checks(r: Results) -> str:
    rows = [[f"<code>{c['op']}</code>", f"<code>{c['output']}</code>", f"{c['rows']:,}",
             f"{c['max_error']:.3g}", f"{c['max_ulp']:.3g}", f"{c['calc_diff']:.2g}",
             verdict(c["equal"], "equal", "DIFFERENT")] for c in r.checks]
    c = r["configuration"]
    settings = ", ".join(f"{key.replace('_', ' ')} {value:,}" if isinstance(value, int) else f"{key} {value}"
                         for key, value in c.items())
    return f"""<h2 id="checks">Checks</h2>
<p>Sampled chunks were computed again by the plain reference loops (double accumulation) from the
same inputs. Integers must be the same; bf16 results may differ by one unit in the last place in at
most 1&nbsp;% of the values. The operators of mHC round inside, and what follows from such a value
differs with it: there calc_diff, the share of the energy in the difference, is at most 10<sup>−6</sup>.</p>
{table(["operator", "output", "rows compared", "max error", "max ulp", "calc_diff", "verdict"],
       rows, 2)}
<footer><p>Rerun with the same settings, on any number of threads: the same bits. XXH64 of all
indices <code>{r["checksums"]["indices"]}</code>, of all streams
<code>{r["checksums"]["streams"]}</code>.</p>
<p>Settings: {html.escape(settings)}. EngramHC {html.escape(r["version"])}.</p></footer>"""


def page(r: Results, title: str) -> str:
    css = (pathlib.Path(__file__).parent / "report.css").read_text(encoding="utf-8")
    steps = ["text", "token ids", "compressed ids", "n-gram windows", "rows", "keys and value",
             "gates", "convolution", "streams"]
    if r.stack:
        steps.append("mHC sublayers")
    path = "".join(f"<li><span>{step}</span></li>" for step in steps)
    sections = [overview, stages, vocabulary, ngrams, collisions, frequency, gates, stack, training,
                checks]
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>EngramHC: {html.escape(title)}</title>
<style>
{css}</style>
</head>
<body>
<main>
<h1>From text to updated streams</h1>
<p class="lead">{html.escape(title)}, through layer {r["configuration"]["layer"]} of an Engram
model with {r["configuration"]["streams"]} streams of {r["configuration"]["width"]:,} values.</p>
<ol class="path">{path}</ol>
{"".join(section(r) for section in sections)}
</main>
</body>
</html>
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("figures", type=pathlib.Path)
    parser.add_argument("ids", type=pathlib.Path)
    parser.add_argument("output", type=pathlib.Path)
    parser.add_argument("--stack", type=pathlib.Path)
    parser.add_argument("--training", type=pathlib.Path)
    parser.add_argument("--title", default="a text")
    arguments = parser.parse_args()
    results = Results(arguments.figures, arguments.ids, arguments.stack, arguments.training)
    content = page(results, arguments.title)
    scratch = arguments.output.with_suffix(f".{os.getpid()}.tmp")
    try:
        scratch.write_text(content, encoding="utf-8")
        scratch.replace(arguments.output)
    except OSError as error:
        fail(f"{arguments.output}: cannot be written: {error.strerror}")


if __name__ == "__main__":
    main()
