"""The figures of a run as a table for the terminal.

    summary.py FIGURES.json IDS.npy [--stack STACK.json] [--training TRAINING.json] [--title TEXT]
"""

from __future__ import annotations

import argparse
import pathlib

from results import Results, deviations, expected, number, visible
from terminal import bold

NGRAMS_SHOWN = 8


def heading(text: str) -> None:
    print(f"\n{bold(text)}")


def print_rows(header: list[str], rows: list[list[str]], text_columns: int = 1) -> None:
    widths = [max(map(len, column)) for column in zip(header, *rows)]
    for row in [header, *rows]:
        cells = [f"{cell:<{w}}" if i < text_columns else f"{cell:>{w}}"
                 for i, (cell, w) in enumerate(zip(row, widths))]
        print("  " + "  ".join(cells).rstrip())


def print_overview(r: Results, title: str) -> None:
    c, v = r["configuration"], r["vocabulary"]
    heading(f"{title}: {c['tokens']:,} tokens")
    print(f"  vocabulary  {v['ids']:,} -> {v['compressed_ids']:,} ids "
          f"({1 - v['compressed_ids'] / v['ids']:.1%} fewer); in this text {v['ids_in_text']:,} -> "
          f"{v['compressed_ids_in_text']:,} ({1 - v['compressed_ids_in_text'] / v['ids_in_text']:.1%})")
    print(f"  tables      layer {c['layer']}: {(c['max_ngram'] - 1) * c['heads']} of prime size, "
          f"{c['rows']:,} rows of {c['row_width']} bf16 ({c['table_bytes'] / 1e6:.0f} MB)")
    print(f"  rows        {c['rows_per_token']} per token; {r['rows_touched']:,} different ones "
          f"touched ({r['rows_touched'] / c['rows']:.1%})")
    print(f"  streams     {c['streams']} of {c['width']:,} bf16 values")


def print_times(stages: list[dict]) -> None:
    print_rows(
        ["stage", "implementation", "tokens", "seconds", "tokens/s", "GB/s", "of copy"],
        [[s["stage"], s["implementation"], f"{s['tokens']:,}", f"{s['seconds']:.3f}",
          f"{s['best_tokens_per_second']:,.0f}", f"{s['best_gb_per_second']:.2f}",
          f"{s['share_of_copy']:.2f}"] for s in stages], 2)


def print_stages(r: Results) -> None:
    heading(f"Stages, {r['configuration']['threads']} threads, chunks of "
            f"{r['configuration']['chunk']:,} tokens")
    print_times(r["stages"])
    print(f"  rates: of the fastest chunk; copying memory: {r['copy_gb_per_second']:.1f} GB/s. "
          "layer = gate + convolution + streams in one pass")


def print_ngrams(r: Results) -> None:
    heads = r["configuration"]["heads"]
    for order in r["orders"]:
        top = order["most_frequent"]
        shown = top["ngrams"][:NGRAMS_SHOWN]
        heading(f"Order {order['order']}: {order['distinct_ngrams']:,} different n-grams; the "
                f"{len(top['ngrams'])} most frequent hit {top['distinct_rows']} different rows of "
                f"{len(top['ngrams']) * heads}")
        print_rows(
            ["n-gram", "times", f"shared heads of {heads}", "other n-grams in its rows"],
            [[visible(r.ngram(e, order["order"])), f"{e['count']:,}", str(e["heads_shared"]),
              str(e["other_ngrams_in_its_rows"])] for e in shown])


def print_collisions(r: Results) -> None:
    heading("Collisions, measured (predicted)")
    rows = []
    for order in r["orders"]:
        tables, pairs = order["tables"], order["joint_collisions"]

        def total(key):
            return sum(entry[key] for entry in tables)

        ngrams = max(1, total("ngrams"))
        rows.append([
            str(order["order"]), f"{total('rows_used'):,} ({total('rows_used_predicted'):,.0f})",
            f"{max(map(deviations, tables), key=abs):+.2f}",
            f"{total('ngrams_sharing') / ngrams:.2%} ({total('ngrams_sharing_predicted') / ngrams:.2%})",
            *(f"{pairs['measured'][j]:,} ({expected(pairs['predicted'][j])})"
              for j in range(1, min(3, len(tables)) + 1))])
    header = ["order", "rows used", "worst deviation", "n-grams sharing a row",
              *(f"pairs in {j}+ heads" for j in range(1, len(rows[0]) - 3))]
    print_rows(header, rows)
    print("  worst deviation: of one table, in standard deviations of evenly random rows")


def print_stack(r: Results) -> None:
    if not r.stack:
        return
    c = r.stack["configuration"]
    heading(f"mHC: {c['sublayers']} sublayers forward and backward, {c['tokens']:,} tokens in chunks "
            f"of {c['chunk']:,}")
    print_times(r.stack["stages"] + r.stack["passes"])
    print(f"  rates: of the fastest call, of a whole pass the fastest chunk; copying memory: "
          f"{r.stack['copy_gb_per_second']:.1f} GB/s")
    for name, stacks in r.stack["gain"].items():
        ends = {kind: rows[-1] for kind, rows in stacks.items()}
        print(f"  gain        {name} maps: forward {number(ends['constrained']['composite_forward_gain'])}, "
              f"backward {number(ends['constrained']['composite_backward_gain'])}; without Sinkhorn "
              f"{number(ends['unconstrained']['composite_forward_gain'])} and "
              f"{number(ends['unconstrained']['composite_backward_gain'])}")


def print_training(r: Results) -> None:
    if not r.training:
        return
    t, last = r.training, r.training["last"]
    s = t["settings"]
    heading(f"Training: {t['steps']:,} steps of {s['tokens']:,} tokens, {s['streams']} streams of "
            f"{s['width']}, {t['configuration']['rows']:,} rows of {s['row_width']}")
    print(f"  loss        {last['loss']:.3f} nats per token over the last {last['steps']} steps; by "
          f"frequencies alone {last['unigram_loss']:.3f}")
    resumed = t["resumed_at"]
    now = f"{t['steps'] - resumed:,} steps now, {t['seconds']:.1f} s"
    print(f"  time        {now}, {t['tokens_per_second']:,.0f} tokens/s; {resumed:,} steps earlier")
    print(f"  state       {t['checksum']}")


def print_checks(r: Results) -> None:
    heading("Fast against reference")
    for check in r.checks:
        if not check["equal"]:
            print(f"  DIFFERENT: {check['op']} '{check['output']}', by up to {check['max_error']:.3g}")
    rows = sum(check["rows"] for check in r.checks)
    print(f"  {len(r.checks)} outputs of {len({c['op'] for c in r.checks})} operators, "
          f"{rows:,} rows compared: {'all equal' if r.all_equal else 'NOT equal'} within rounding")
    print(f"  XXH64 of indices {r['checksums']['indices']}, of streams {r['checksums']['streams']}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("figures", type=pathlib.Path)
    parser.add_argument("ids", type=pathlib.Path)
    parser.add_argument("--stack", type=pathlib.Path)
    parser.add_argument("--training", type=pathlib.Path)
    parser.add_argument("--title", default="a text")
    arguments = parser.parse_args()
    results = Results(arguments.figures, arguments.ids, arguments.stack, arguments.training)
    print_overview(results, arguments.title)
    print_stages(results)
    print_ngrams(results)
    print_collisions(results)
    print_stack(results)
    print_training(results)
    print_checks(results)


if __name__ == "__main__":
    main()
