"""The demo on a small text: figures of `ehc pipeline`, `ehc streams` and `ehc train`, and the page in a
browser."""

import json
import re
import shutil
import subprocess
import sys

import numpy as np
import pytest
from conftest import ROOT
from engramhc.reference.files import load

DEMO = ROOT / "demo"
PSALM = """The LORD is my shepherd; I shall not want.
He maketh me to lie down in green pastures: he leadeth me beside the still waters.
He restoreth my soul: he leadeth me in the paths of righteousness for his name's sake.
Yea, though I walk through the valley of the shadow of death, I will fear no evil.
"""
CHUNK = 512


def script(name, *arguments):
    return subprocess.run([sys.executable, str(DEMO / name), *map(str, arguments)],
                          capture_output=True, text=True, timeout=120)


def succeed(result):
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("demo")


@pytest.fixture(scope="module")
def inputs(ehc, folder):
    """Ids, map and layout: real tokens, shuffled verses, so that n-grams repeat and differ."""
    source = folder / "source.txt"
    rng = np.random.default_rng(5)
    words = sorted(set(re.findall(r"\w+", PSALM)))
    lines = [PSALM] + [" ".join(rng.choice(words, 12)) + ".\n" for _ in range(220)]
    source.write_text("".join(lines), encoding="utf-8")
    succeed(script("read_text.py", folder / "text.txt", "--text", source))
    ids = succeed(script("encode_text.py", folder / "text.txt", folder)).strip()
    tokenizer = succeed(script("v4_tokenizer.py")).strip()
    paths = {"ids": ids, "map": folder / "v4.tokmap", "layout": folder / "layout.safetensors"}
    succeed(ehc.run("tokmap", "build", tokenizer, "-o", paths["map"]))
    succeed(ehc.run("layout", "show", "--preset", "demo", "--sizes", "2000,3000", "--row-width", 8,
                    "--compressed-vocab", 99092, "-o", paths["layout"]))
    return paths


def run_pipeline(ehc, folder, inputs, name, *more, threads=2, chunk=CHUNK, dense=2 * CHUNK):
    target = folder / f"{name}.json"
    succeed(ehc.run("pipeline", "--ids", inputs["ids"], "--map", inputs["map"], "--layout",
                    inputs["layout"], "--streams", 3, "--width", 72, "--chunk", chunk,
                    "--dense-tokens", dense, "--json", target, *more, threads=threads))
    return json.loads(target.read_text(encoding="utf-8"))


SAVED = CHUNK + 100


@pytest.fixture(scope="module")
def figures(ehc, folder, inputs):
    return run_pipeline(ehc, folder, inputs, "figures", "--save-streams", folder / "streams.safetensors",
                        "--saved-tokens", SAVED)


def test_addressing(figures, inputs):
    setup = figures["configuration"]
    ids = np.load(inputs["ids"])
    assert setup["tokens"] == len(ids) > 2 * CHUNK
    assert setup["dense_tokens"] == 2 * CHUNK
    assert setup["rows_per_token"] == (setup["max_ngram"] - 1) * setup["heads"] == 16
    assert figures["vocabulary"]["ids_in_text"] == len(np.unique(ids))
    assert (figures["vocabulary"]["ids"], figures["vocabulary"]["compressed_ids"]) == (129280, 99092)
    assert figures["rows_touched"] == sum(order["rows_touched"] for order in figures["orders"])


def test_ngrams_counted_twice(ehc, folder, inputs, figures):
    """Windows of the operator `engram.window`, counted by NumPy, give the same numbers."""
    table = np.frombuffer((inputs["map"]).read_bytes(), dtype="<i4", count=129280, offset=80)
    ids = np.concatenate([[table[2], table[2]], table[np.load(inputs["ids"])]])
    for order in figures["orders"]:
        k = order["order"]
        windows = np.stack([ids[2 - j : len(ids) - j] for j in range(k)], axis=1)
        distinct, counts = np.unique(windows, axis=0, return_counts=True)
        assert order["distinct_ngrams"] == len(distinct)
        assert order["occurring_once"] == np.count_nonzero(counts == 1)
        listed = [entry["count"] for entry in order["most_frequent"]["ngrams"]]
        assert listed == sorted(counts, reverse=True)[: len(listed)]
        assert order["ngram_frequency"]["counts"][0] == max(counts)


def test_collisions_as_predicted(figures):
    heads = figures["configuration"]["heads"]
    for order in figures["orders"]:
        used = 0
        for table in order["tables"]:
            m, u = table["size"], table["ngrams"]
            assert u == order["distinct_ngrams"]
            assert table["rows_used_predicted"] == pytest.approx(m * (1 - (1 - 1 / m) ** u))
            assert abs(table["rows_used"] - table["rows_used_predicted"]) < 5 * table["rows_used_deviation"]
            used += table["rows_used"]
        assert used == order["rows_touched"]
        loads = order["row_load"]
        sizes = sum(table["size"] for table in order["tables"])
        assert sum(loads["measured"]) == sizes
        assert sum(loads["predicted"]) == pytest.approx(sizes)
        # Every n-gram lies in one row of every head.
        assert sum(k * rows for k, rows in enumerate(loads["measured"])) == heads * order["distinct_ngrams"]
        shared = order["heads_shared"]
        assert sum(shared["measured"]) == order["distinct_ngrams"]
        assert sum(shared["predicted"]) == pytest.approx(order["distinct_ngrams"])
        assert (sum(j * n for j, n in enumerate(shared["measured"]))
                == sum(table["ngrams_sharing"] for table in order["tables"]))
        pairs = order["joint_collisions"]
        assert pairs["ngrams"] == order["distinct_ngrams"]
        for j in (1, 2):
            # Meetings of pairs are close to a Poisson process; 6 deviations and a little.
            spread = 6 * pairs["predicted"][j] ** 0.5 + 3
            assert abs(pairs["measured"][j] - pairs["predicted"][j]) < spread


def test_fast_equals_reference(figures):
    checked = {check["op"] for check in figures["checks"]}
    assert {stage["op"] for stage in figures["stages"]} <= checked
    assert all(check["equal"] and check["rows"] > 0 for check in figures["checks"])


def test_gates(figures):
    gate = figures["gate"]
    for stream in gate["streams"]:
        assert sum(stream["histogram"]) == figures["configuration"]["dense_tokens"]
        assert 0 < stream["min"] < stream["mean"] < stream["max"] < 1
    alpha = np.array(gate["paragraph"]["alpha"])
    assert alpha.shape == (160, 3)
    assert np.all((alpha > 0) & (alpha < 1)) and alpha.std() > 0.05


def test_threads_and_repetition_change_no_bit(ehc, folder, inputs, figures):
    one = run_pipeline(ehc, folder, inputs, "one-thread", threads=1)
    assert one["configuration"]["threads"] == 1 and figures["configuration"]["threads"] == 2
    assert one["checksums"] == figures["checksums"]
    assert one["orders"] == figures["orders"] and one["gate"] == figures["gate"]


def test_chunks_change_no_bit(ehc, folder, inputs, figures):
    """Ids before a chunk and the convolution's rows are carried over."""
    other = run_pipeline(ehc, folder, inputs, "small-chunks", chunk=CHUNK // 4)
    assert other["checksums"]["indices"] == figures["checksums"]["indices"]
    assert other["orders"] == figures["orders"]
    alphas = [np.array(f["gate"]["paragraph"]["alpha"]) for f in (figures, other)]
    np.testing.assert_allclose(*alphas, atol=1e-2)
    implementations = {stage["implementation"] for stage in figures["stages"]}
    if "cpu.openblas" not in implementations:  # whose bits may depend on the number of tokens
        assert other["checksums"]["streams"] == figures["checksums"]["streams"]


def test_dense_stages_can_be_left_out(ehc, folder, inputs, figures):
    other = run_pipeline(ehc, folder, inputs, "no-dense", chunk=77, dense=0)
    assert other["checksums"]["indices"] == figures["checksums"]["indices"]
    assert other["orders"] == figures["orders"]
    assert {stage["stage"] for stage in other["stages"]} == {"map", "window", "hash"}
    assert succeed(script("summary.py", folder / "no-dense.json", inputs["ids"]))
    assert not succeed(script("report.py", folder / "no-dense.json", inputs["ids"],
                              folder / "no-dense.html"))
    assert 'class="picture"' in (folder / "no-dense.html").read_text(encoding="utf-8")


def test_seed_changes_streams_only(ehc, folder, inputs, figures):
    other = run_pipeline(ehc, folder, inputs, "seed", "--seed", 1)
    assert other["checksums"]["indices"] == figures["checksums"]["indices"]
    assert other["checksums"]["streams"] != figures["checksums"]["streams"]


def test_saved_streams(ehc, folder, inputs, figures):
    """The first tokens of those that the checksum covers, whatever their number."""
    saved = load(folder / "streams.safetensors")[0]
    assert list(saved) == ["streams"] and saved["streams"].dtype == "BF16"
    values = saved["streams"].decode()
    assert values.shape == (SAVED, 3, 72) and 0.5 < values.std() < 4
    path = folder / "all-streams.safetensors"
    other = run_pipeline(ehc, folder, inputs, "all-streams", "--save-streams", path)
    assert other["checksums"] == figures["checksums"]
    everything = load(path)[0]["streams"].decode()
    assert everything.shape == (2 * CHUNK, 3, 72)
    assert np.array_equal(everything[:SAVED], values) and everything[SAVED:].std() > 0.5


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [(["--dense-tokens", 0], 2, "--save-streams: expected --dense-tokens above 0, got 0"),
     (["--saved-tokens", 0], 2, "--saved-tokens"),
     ([], 4, "the folder does not exist")],
)
def test_streams_that_cannot_be_saved(ehc, tmp_path, inputs, arguments, code, message):
    target = tmp_path / ("missing/streams" if code == 4 else "streams")
    result = ehc.run("pipeline", "--ids", inputs["ids"], "--map", inputs["map"], "--layout",
                     inputs["layout"], "--width", 16, "--tokens", 64, "--save-streams", target, *arguments)
    assert (result.returncode, result.stdout) == (code, ""), result
    assert message in result.stderr and not target.exists()


@pytest.mark.parametrize(
    ("change", "code", "message"),
    [
        ({"ids": np.zeros(0, np.int32)}, 3, "at least one token"),
        ({"ids": np.zeros((2, 2), np.int32)}, 3, "expected I32 or I64"),
        ({"ids": np.array([5, -1], np.int32)}, 3, "got -1 at position 1"),
        ({"ids": np.array([5, 129280], np.int64)}, 3, "129280"),
        ({"ids": None}, 4, "missing.npy"),
        ({"layer": 7}, 3, "expected one of 1 15"),
        ({"vocab": 5000}, 3, "99092"),
        ({"json": "no/such/folder/x.json"}, 4, "no/such/folder"),
    ],
)
def test_errors(ehc, tmp_path, inputs, change, code, message):
    ids, layout, more = inputs["ids"], inputs["layout"], []
    if "ids" in change:
        ids = tmp_path / ("missing.npy" if change["ids"] is None else "ids.npy")
        if change["ids"] is not None:
            np.save(ids, change["ids"])
    if "layer" in change:
        more += ["--layer", change["layer"]]
    if "vocab" in change:
        layout = tmp_path / "layout.safetensors"
        succeed(ehc.run("layout", "show", "--preset", "demo", "--sizes", "50,60", "--row-width", 8,
                        "--compressed-vocab", change["vocab"], "-o", layout))
    if "json" in change:
        more += ["--json", tmp_path / change["json"]]
    result = ehc.run("pipeline", "--ids", ids, "--map", inputs["map"], "--layout", layout,
                     "--width", 16, "--tokens", 64, *more)
    assert (result.returncode, result.stdout) == (code, ""), result
    assert message in result.stderr and result.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("content", "message"),
    [(b"", "expected text, got none"), (b" \n\t\n", "expected text, got none"),
     (b"caf\xe9\n", "expected UTF-8"), (None, "cannot be read")],
)
def test_bad_texts(tmp_path, content, message):
    source = tmp_path / "source.txt"
    if content is not None:
        source.write_bytes(content)
    result = script("read_text.py", tmp_path / "text.txt", "--text", source)
    assert result.returncode != 0 and message in result.stderr
    assert not (tmp_path / "text.txt").exists()


def test_without_stack_and_training(folder, inputs, figures):
    page = folder / "no-training.html"
    succeed(script("report.py", folder / "figures.json", inputs["ids"], page))
    content = page.read_text(encoding="utf-8")
    assert 'id="training"' not in content and 'id="streams"' not in content


def test_help_names_every_option():
    program = (ROOT / "demo.sh").read_text(encoding="utf-8")
    shown = succeed(subprocess.run([str(ROOT / "demo.sh"), "--help"], capture_output=True, text=True))
    accepted = re.search(r"^    (--text\|.*)\)$", program, re.MULTILINE).group(1).split("|")
    assert accepted and all(option in shown for option in accepted)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [(["--txt", "x"], "unknown option '--txt'"), (["--text"], "expected a value"),
     (["--text", "/nonexistent"], "not a file"), (["--out", "/dev/null/x"], "cannot be written"),
     (["--train-steps", "x"], "expected a number of steps, got 'x'"),
     (["--sublayers", "-1"], "expected a number of sublayers, got '-1'"),
     (["--stack-tokens", "1e3"], "expected a number of tokens, got '1e3'")],
)
def test_demo_script_refuses(arguments, message):
    result = subprocess.run([str(ROOT / "demo.sh"), *arguments], capture_output=True, text=True)
    assert result.returncode == 2 and message in result.stderr and result.stdout == ""


@pytest.fixture(scope="module")
def training(ehc, folder, inputs):
    target = folder / "training.json"
    succeed(ehc.run("train", "--ids", inputs["ids"], "--map", inputs["map"], "--layout",
                    inputs["layout"], "--tokens", 256, "--width", 32, "--steps", 60, "--json", target))
    return json.loads(target.read_text(encoding="utf-8"))


def test_training_learns(training):
    assert len(training["losses"]) == len(training["unigram_losses"]) == 60
    assert training["last"]["loss"] < training["last"]["unigram_loss"]
    before, after = (np.array(training["gate"][moment]) for moment in ("before", "after"))
    assert before.shape == after.shape == (160, 4)
    assert not np.array_equal(before, after)


@pytest.fixture(scope="module")
def stack(ehc, folder, figures):
    target = folder / "stack.json"
    succeed(ehc.run("streams", "--in", folder / "streams.safetensors", "--sublayers", 6, "--chunk", 256,
                    "--map-begin", 4, "--map-tokens", 5, "--map-sublayers", 3, "--json", target))
    return json.loads(target.read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def report(folder, inputs, figures, stack, training):
    path = folder / "report.html"
    succeed(script("report.py", folder / "figures.json", inputs["ids"], path, "--title", "A <test>",
                   "--stack", folder / "stack.json", "--training", folder / "training.json"))
    return path


def test_terminal_table(folder, inputs, figures, stack, training):
    shown = succeed(script("summary.py", folder / "figures.json", inputs["ids"], "--title", "Psalm",
                           "--stack", folder / "stack.json", "--training", folder / "training.json"))
    assert training["checksum"] in shown and f"{training['last']['loss']:.3f}" in shown
    for stage in figures["stages"] + stack["stages"] + stack["passes"]:
        assert stage["stage"] in shown and stage["implementation"] in shown
    gain = stack["gain"]["text"]["unconstrained"][-1]["composite_backward_gain"]
    assert f"{gain:.2g}" in shown
    assert "all equal" in shown and figures["checksums"]["streams"] in shown
    assert max(map(len, shown.splitlines())) <= 140


def test_report_is_self_contained(report):
    page = report.read_text(encoding="utf-8")
    assert "A &lt;test&gt;" in page
    assert not re.search(r"(?:src|href)=\"(?!#)", page)
    assert "url(http" not in page and "@import" not in page and "<script" not in page
    names = re.findall(r'\bid="([^"]+)"', page)
    assert len(names) == len(set(names))
    assert set(re.findall(r"url\(#([^)]+)\)|href=\"#([^\"]+)\"", page)) and all(
        (a or b) in names for a, b in re.findall(r"url\(#([^)]+)\)|href=\"#([^\"]+)\"", page))


@pytest.fixture(scope="module")
def browser():
    program = shutil.which("chromium") or shutil.which("chromium-browser")
    if program is None:
        pytest.skip("no chromium")
    return [program, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"]


def test_report_in_a_browser(browser, report, figures, stack, training):
    dom = succeed(subprocess.run([*browser, "--dump-dom", f"file://{report}"],
                                 capture_output=True, text=True, timeout=120))
    for section in ("stages", "vocabulary", "ngrams", "collisions", "frequency", "gates", "streams",
                    "training", "checks"):
        assert f'<h2 id="{section}">' in dom
    # Gates of the pipeline, and of the trained layer before and after.
    assert dom.count('class="picture"') == 8 and dom.count('class="unit"') == 3 * 160
    assert f"{training['last']['loss']:.3f}" in dom and training["checksum"] in dom
    assert f"{figures['configuration']['tokens']:,}" in dom


def cells_of(part, name):
    return [float(number) for number in re.findall(rf'<i class="{name}"[^>]*>([\d.]+)</i>', part)]


def test_report_of_the_stack(report, stack, inputs):
    """Convergence, maps and gain, with the numbers of the figures and the words of the text."""
    page = report.read_text(encoding="utf-8")
    part = page[page.index('<h2 id="streams">') : page.index('<h2 id="training">')]
    assert re.findall(r'<h3 id="(\w+)">', part) == ["sinkhorn", "maps", "gain"]
    for stage in stack["stages"]:
        assert f"<td>{stage['bytes_per_token']:,.0f}</td>" in part

    curves = part[part.index('id="picture-sinkhorn"') : part.index('<h3 id="maps">')]
    for words in ("rows", "columns", "rounds R", "defect: largest |sum − 1| of a map", "maps of this text",
                  *(f"random logits, deviation {spread}" for spread in (1, 2, 4))):
        assert f">{words}<" in curves, words
    # Worst and median of four kinds of logits, for rows and columns, in the colours of the page.
    lines = re.findall(r'<path d="[^"]+" clip-path="[^"]+" style="fill: none; (?:[^"]* )?stroke: var\(--series-(\d)\)', curves)
    assert sorted(lines) == sorted("1234" * 4)

    maps, values = part[part.index('<h3 id="maps">') : part.index('<h3 id="gain">')], stack["maps"]
    assert maps.count('class="map"') == 3 * 5
    for colour, name in (("read", "pre"), ("write", "post"), ("mix", "comb")):
        expected = np.array(values[name]).ravel()
        np.testing.assert_allclose(cells_of(maps, colour), expected, atol=0.0051)
    assert [f"sublayer {i + 1}<" in maps for i in values["sublayers"]] == [True] * 3
    words = re.findall(r"<th><code>([^<]*)</code></th>", maps)
    text = PSALM.replace("\n", "↵").replace(" ", "·")
    assert len(words) == 5 and "".join(words) in text

    gain = part[part.index('id="picture-gain"') :]
    for words in ("forward", "backward", "depth (sublayers)", "largest gain of any token (factor)"):
        assert f">{words}<" in gain, words
    last = stack["gain"]["text"]
    assert f"{last['constrained'][-1]['composite_backward_gain']:.4f}" in part
    assert f"{last['unconstrained'][-1]['composite_forward_gain']:.2g}" in part


def test_gains_beyond_fp32_are_shown_as_such(ehc, folder, inputs, figures):
    target = folder / "wide.json"
    succeed(ehc.run("streams", "--in", folder / "streams.safetensors", "--tokens", 8, "--sublayers", 40,
                    "--spread", 60, "--map-tokens", 0, "--json", target))
    page = folder / "wide.html"
    assert not succeed(script("report.py", folder / "figures.json", inputs["ids"], page, "--stack", target))
    content = page.read_text(encoding="utf-8")
    assert "beyond fp32" in content and 'class="map"' not in content


@pytest.mark.parametrize("dark", [False, True])
def test_report_screenshot(browser, report, tmp_path, dark):
    import matplotlib.image

    picture = tmp_path / "report.png"
    theme = ["--blink-settings=preferredColorScheme=0"] if dark else ["--blink-settings=preferredColorScheme=1"]
    succeed(subprocess.run([*browser, *theme, "--window-size=1200,3000", f"--screenshot={picture}",
                            f"file://{report}"], capture_output=True, text=True, timeout=120))
    pixels = matplotlib.image.imread(picture)[..., :3]
    assert pixels.shape == (3000, 1200, 3)
    background = pixels[0, 0].mean()
    assert background < 0.2 if dark else background > 0.9
    # Something is drawn at every height, and in colour where the bars of the first picture are.
    bands = pixels.reshape(30, 100, 1200, 3)
    assert all(band.std() > 0.01 for band in bands)
    colourful = (pixels.max(axis=-1) - pixels.min(axis=-1)) > 0.25
    assert colourful.mean() > 0.005
