#!/usr/bin/env python3
"""The record of tools/gpu_check.sh.

    gpu_record.py OUT                    OUT/record.json and OUT/record.md from the parts in OUT
    gpu_record.py --page RECORD [PAGE]   docs/benchmarks.md, or PAGE, from a record.json
"""
import json
import pathlib
import re
import sys

HERE = pathlib.Path(__file__).resolve().parent
FIRST = re.compile(r"^(\S+) +first ([\d.]+) ms, second ([\d.]+) ms, device started in (\d+) ms")
SANITIZERS = ["memcheck", "racecheck", "initcheck", "synccheck"]
PART_ORDER = ["tests", "check", "large", "sanitize", "first", "bench"]


def peers() -> dict:
    for path in (HERE / "peers.json", HERE.parent / "benches/cuda/peers.json"):
        if path.exists():
            return json.loads(path.read_text())
    return {"peers": [], "goals": []}


def settings_of(case: str) -> dict[str, str]:
    return dict(word.split("=", 1) for word in case.split()[1:])


def find(entries: list[dict], op: str, case: str) -> dict | None:
    """The entry of this operator whose settings are all those of the case; `with` must be the same."""
    have = settings_of(case)
    for entry in entries:
        want = {key: str(value) for key, value in entry["case"].items()}
        if entry["op"] == op and want.get("with", "") == have.get("with", "") and all(
            have.get(key, "false") == value for key, value in want.items() if key != "with"
        ):
            return entry
    return None


def read_tests(path: pathlib.Path) -> dict:
    if not path.exists():
        return {}
    found = json.loads(path.read_text())
    tests = [test for suite in found["testsuites"] for test in suite["testsuite"]]
    skipped = [t for t in tests if t.get("result") == "SKIPPED"]
    failed = [t["classname"] + "." + t["name"] for t in tests if t.get("failures")]
    return {"tests": len(tests), "skipped": len(skipped), "failed_tests": failed}


def read_rows(out: pathlib.Path, pattern: str) -> list[dict]:
    """The rows of the checks whose files match; slices of an implementation are one row."""
    merged: dict[tuple[str, str], dict] = {}
    for file in sorted(out.glob(pattern)):
        if file.name.endswith(".part.json"):
            continue
        for row in json.loads(file.read_text())["rows"]:
            key = (row["op"], row["implementation"])
            whole = merged.setdefault(key, row)
            if whole is row:
                continue
            for name in ("cases", "refused", "failures"):
                whole[name] += row[name]
            for name in ("worst_error", "worst_used", "calc_diff"):  # null is NaN, the worst
                whole[name] = None if None in (whole[name], row[name]) else max(whole[name], row[name])
    return [merged[key] for key in sorted(merged)]


def read_sanitizer(out: pathlib.Path, text: str) -> dict[str, str]:
    """What each tool found, and over how much. A process that did not finish leaves no file of rows."""
    tools: dict[str, str] = {}
    for tool in SANITIZERS:
        if re.search(rf"^compute-sanitizer {tool}: REFUSED", text, re.MULTILINE):
            tools[tool] = "REFUSED"
            continue
        rows = [row for row in read_rows(out, f"sanitize.{tool}.*.json") if row["cases"] > 0]
        started = len(re.findall(rf"^\$ compute-sanitizer --tool {tool} ", text, re.MULTILINE))
        finished = len(list(out.glob(f"sanitize.{tool}.*.json")))
        stopped = re.findall(rf"^{tool}\.\d+ of sanitize FAILED with exit code (\d+)", text, re.MULTILINE)
        tools[tool] = (
            f"{len(rows)} operators, {sum(row['cases'] for row in rows)} cases, "
            f"{finished} of {started} processes finished, "
            + ("no errors" if not stopped else "FAILED with exit codes " + ", ".join(stopped))
        )
    return tools


def read_first(text: str) -> list[dict]:
    return [
        {"op": m[1], "first_ms": float(m[2]), "second_ms": float(m[3]), "start_ms": int(m[4])}
        for m in map(FIRST.match, text.splitlines())
        if m
    ]


def read_bench(path: pathlib.Path) -> dict:
    if not path.exists():
        return {}
    bench = json.loads(path.read_text())
    known = peers()
    rows = []
    for result in bench["results"]:
        op, case = result["op"], result["case"]
        row = {
            "op": op,
            "case": case,
            "us": result["median_seconds"] * 1e6,
            "bytes": result["bytes"],
            "share": result["share_of_copy"],
        }
        peer = find(known["peers"], op, case)
        if peer:
            row |= {"peer_us": peer["us"], "peer": peer["peer"], "speedup": peer["us"] / row["us"]}
        goal = find(known["goals"], op, case)
        if goal:
            row["goal"] = goal["share"]
            if goal.get("of") == "one_to_four":
                row["share"] = result["bytes_per_second"] / bench["one_to_four_bytes_per_second"]
                row["of"] = "one to four"
        rows.append(row)
    return {
        "copy": bench["copy_bytes_per_second"],
        "copy_way": bench["copy_way"],
        "read": bench.get("read_bytes_per_second", 0),
        "one_to_four": bench.get("one_to_four_bytes_per_second", 0),
        "rows": rows,
    }


def collect(out: pathlib.Path) -> dict:
    record: dict = {"parts": []}
    for name in PART_ORDER:
        head = out / f"{name}.part.json"
        if not head.exists():
            continue
        part = json.loads(head.read_text())
        record |= {key: part.pop(key) for key in ("commit", "device", "driver")}
        text = (out / f"{name}.txt").read_text(errors="replace")
        part["commands"] = [line[2:] for line in text.splitlines() if line.startswith("$ ")]
        data = out / f"{name}.json"
        if name == "tests":
            part |= read_tests(data)
        elif name in ("check", "large"):
            part["rows"] = read_rows(out, f"{name}.*.json")
        elif name == "sanitize":
            part["tools"] = read_sanitizer(out, text)
        elif name == "first":
            part["calls"] = read_first(text)
        elif name == "bench":
            part |= read_bench(data)
        record["parts"].append(part)
    return record


def short(command: str) -> str:
    """Without the folders of the machine, and lists of operators cut short."""
    words = [word.rsplit("/", 1)[-1] if word.startswith("/") else word for word in command.split()]
    names = [i for i, word in enumerate(words) if re.fullmatch(r"(engram|mhc)\.\w+", word)]
    if len(names) > 3:
        words[names[2] :] = [f"... ({len(names)} operators)"]
    return " ".join(words)


def bench_table(part: dict) -> list[str]:
    lines = [
        f"Copy {part['copy'] / 1e9:.0f} GB/s read and written ({part['copy_way']}), read {part['read'] / 1e9:.0f} GB/s, "
        f"read once and written four times {part['one_to_four'] / 1e9:.0f} GB/s, in the same run. A time is the median "
        "replay of a graph of many calls over rotating inputs, divided by the calls.",
        "",
        "| case | us | share | goal | best peer, us | times as fast |",
        "|---|---|---|---|---|---|",
    ]
    for row in part.get("rows", []):
        share = f"{row['share']:.3f}" + (f" ({row['of']})" if "of" in row else "")
        goal = f"{row['goal']:.2f}" if "goal" in row else "-"
        peer = f"{row['peer_us']:.2f} ({row['peer']})" if "peer_us" in row else "-"
        speedup = f"{row['speedup']:.2f}" if "speedup" in row else "-"
        lines.append(f"| `{row['case']}` | {row['us']:.2f} | {share} | {goal} | {peer} | {speedup} |")
    return lines


def body(record: dict) -> list[str]:
    lines = []
    for part in record["parts"]:
        verdict = "FAILED" if part["failed"] else "ok"
        lines += [f"## {part['part']}: {verdict}, {part['seconds']} s", ""]
        commands = [short(command) for command in part["commands"]]
        if commands:
            more = f" (and {len(commands) - 1} more)" if len(commands) > 1 else ""
            lines += [f"`{commands[0]}`{more}", ""]
        if "tests" in part:
            lines += [f"{part['tests']} tests, {part['skipped']} skipped, {len(part['failed_tests'])} failed.", ""]
        if "rows" in part and part["part"] != "bench":
            checked = [row for row in part["rows"] if row["cases"] > 0]
            lines += [f"{sum(row['cases'] for row in checked)} cases of {len(checked)} implementations.", ""]
            lines += ["| operator | implementation | cases | refused | worst error | of allowed | different |", "|---|---|---|---|---|---|---|"]
            for row in part["rows"]:
                if row["cases"] + row["refused"] + row["failures"] == 0:
                    continue
                error, used = (row[key] if row[key] is not None else float("nan") for key in ("worst_error", "worst_used"))
                lines.append(
                    f"| {row['op']} | {row['implementation']} | {row['cases']} | {row['refused']} | "
                    f"{error:.2e} | {used:.3f} | {row['failures']} |"
                )
            lines.append("")
        for tool, result in part.get("tools", {}).items():
            lines.append(f"- {tool}: {result}")
        if "tools" in part:
            lines.append("")
        if "calls" in part:
            lines += ["| operator | first call, ms | second, ms |", "|---|---|---|"]
            lines += [f"| {c['op']} | {c['first_ms']:.2f} | {c['second_ms']:.3f} |" for c in part["calls"]]
            lines.append("")
        if part["part"] == "bench" and "copy" in part:
            lines += bench_table(part) + [""]
    return lines


def head(record: dict) -> str:
    return f"Commit {record['commit']}, {record['device']}, driver {record['driver']}."


def main(arguments: list[str]) -> int:
    if arguments[:1] == ["--page"] and len(arguments) in (2, 3):
        record = json.loads(pathlib.Path(arguments[1]).read_text())
        page = pathlib.Path(arguments[2]) if len(arguments) == 3 else HERE.parent / "docs/benchmarks.md"
        text = [
            "# The CUDA backend, checked and measured",
            "",
            head(record) + " Made by `tools/gpu_check.sh all OUT` and `tools/gpu_record.py --page OUT/record.json`; not edited by hand.",
            "Peers were measured on the same kind of GPU with the same protocol (`benches/cuda/peers.json`).",
            "",
            *body(record),
        ]
        page.write_text("\n".join(text).rstrip() + "\n")
        return 0
    if len(arguments) != 1:
        print(__doc__, file=sys.stderr)
        return 2
    out = pathlib.Path(arguments[0])
    record = collect(out)
    if not record["parts"]:
        print(f"gpu_record: expected parts in {out}, got none", file=sys.stderr)
        return 1
    (out / "record.json").write_text(json.dumps(record, indent=1) + "\n")
    (out / "record.md").write_text("\n".join(["# Record", "", head(record), "", *body(record)]).rstrip() + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
