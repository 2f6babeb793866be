"""`python -m engramhc bench`: what it measures is the same mathematics, and no peer can make it fail."""

import json
import sys
import types

import pytest

torch = pytest.importorskip("torch")

import engramhc.compat  # noqa: E402
from engramhc import __main__  # noqa: E402
from engramhc.bench import measure, report  # noqa: E402
from engramhc.bench.cases import CASES  # noqa: E402
from engramhc.bench.peers import PEERS, Peer  # noqa: E402

SMALL = dict(tokens=6, width=32, repeats=1, compile=False)


@pytest.mark.parametrize("name", CASES)
def test_ours_and_the_formula_agree(name):
    results, _ = measure.run([name], **SMALL)
    directions = {"forward", "backward"} if CASES[name].backward_values else {"forward"}
    assert {r.direction for r in results} == directions
    for result in results:
        assert result.variant in ("engramhc", "torch eager")
        assert result.best > 0 and result.share > 0 and result.bytes_moved > 0
        if result.variant == "engramhc":
            assert result.ratio == 1.0
            assert result.difference < 1e-4  # of bf16 roundings


@pytest.fixture
def peer_module(monkeypatch):
    """A library of streams collapsed in torch, and one that fails."""
    module = types.ModuleType("a_peer")
    module.good = lambda residual, pre: (pre.unsqueeze(-1) * residual.float()).sum(-2).to(residual.dtype)
    monkeypatch.setitem(sys.modules, "a_peer", module)

    def adapter(peer, x):
        inputs = [x["residual"], x["pre"]]
        return lambda: peer.good(*inputs), inputs

    def broken(peer, x):
        raise AssertionError("only n=3\nand more")

    peers = [
        Peer("good", "a-peer", "a_peer", {"mhc_pre_apply_mix": adapter}),
        Peer("broken", "a-peer", "a_peer", {"mhc_pre_apply_mix": broken}),
        Peer("absent", "no-peer", "no_peer", {"mhc_pre_apply_mix": adapter}),
        Peer("other", "no-peer", "no_peer", {"mhc_post": adapter}),
    ]
    monkeypatch.setattr(measure, "PEERS", peers)


def test_peers_that_work_fail_or_are_absent(peer_module):
    results, remarks = measure.run(["mhc_pre_apply_mix"], **SMALL)
    variants = {(r.direction, r.variant) for r in results}
    for direction in ("forward", "backward"):
        assert {v for d, v in variants if d == direction} == {"engramhc", "torch eager", "good"}
    assert remarks == [
        "absent (no-peer): ModuleNotFoundError: No module named 'no_peer'",
        "broken, mhc_pre_apply_mix forward: AssertionError: only n=3",
        "broken, mhc_pre_apply_mix backward: AssertionError: only n=3",
    ]


def test_our_own_compat_is_no_peer():
    engramhc.compat.install()
    try:
        tile_kernels = next(peer for peer in PEERS if peer.name == "TileKernels")
        with pytest.raises(ImportError, match="engramhc.compat"):
            tile_kernels.adapter("mhc_post")
    finally:
        engramhc.compat.uninstall()


def test_adapters_of_tile_kernels_compute_the_case(monkeypatch):
    """Its names exist in our compat: what the adapters pass must give the case's result."""
    engramhc.compat.install()
    try:
        module = sys.modules["tile_kernels"]
        peer = next(peer for peer in PEERS if peer.name == "TileKernels")
        for name, adapter in peer._adapters.items():
            case = CASES[name]
            torch.manual_seed(0)
            inputs = case.make(5, 32, torch.device("cpu"))
            function, _ = adapter(module, inputs)
            assert measure._difference(function(), case.theirs(*inputs.values())) < 1e-4, name
    finally:
        engramhc.compat.uninstall()


def test_the_command_writes_a_table_a_page_and_a_picture(tmp_path, capsys, monkeypatch):
    pytest.importorskip("matplotlib")
    argv = [
        "engramhc",
        "bench",
        "mhc_post",
        "engram_gather",
        "--device",
        "cpu",
        "--tokens",
        "6",
        "--width",
        "32",
    ]
    monkeypatch.setattr(sys, "argv", [*argv, "--repeats", "1", "--no-compile", "--out", str(tmp_path)])
    with pytest.raises(SystemExit) as end:
        __main__.main()
    assert end.value.code == 0
    printed = capsys.readouterr().out
    assert "T=6 n=4 d=32" in printed
    assert printed.count("torch eager") == 3  # two directions and one
    record = json.loads((tmp_path / "bench.json").read_text())
    assert len(record["results"]) == 6
    page = (tmp_path / "bench.html").read_text()
    assert page.count('class="bar"') == 6 and "http" not in page
    assert (tmp_path / "bench.png").read_bytes()[:4] == b"\x89PNG"


def test_an_unknown_operator_is_named(capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["engramhc", "bench", "mhc_poster"])
    with pytest.raises(SystemExit) as end:
        __main__.main()
    assert end.value.code == 2
    assert "got mhc_poster" in capsys.readouterr().err


def test_table_columns_line_up():
    rows = [
        measure.Result("a", "forward", v, 1e-3 * i, 2e-3, 10**9, 0.5, float(i), 1e-9)
        for i, v in enumerate(("engramhc", "torch eager"), 1)
    ]
    lines = report.table(rows).splitlines()
    assert len(lines) == 3
    assert {line.rindex(" ") for line in lines[1:]} == {
        lines[0].rindex("  ") + 1 + len("difference") - len("1.0e-09")
    }
    assert "2.00x" in lines[2]
