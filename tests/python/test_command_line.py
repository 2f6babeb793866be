"""What the commands refuse before they begin to work."""

import pytest

CASE = "engram.offsets L=1 Nmax=2 Kh=1\n"


@pytest.fixture
def cases(tmp_path):
    path = tmp_path / "cases.txt"
    path.write_text(CASE)
    return path


@pytest.mark.parametrize("seconds", ["nan", "0", "-1", "inf", "3601", "soon"])
def test_bench_wants_a_positive_time(ehc, cases, seconds):
    done = ehc.run("bench", "--cases", cases, f"--seconds={seconds}")
    assert done.returncode == 2
    assert "seconds" in done.stderr
    assert done.stdout == ""


@pytest.mark.parametrize("command", ["bench", "pipeline", "streams", "train"])
def test_results_that_cannot_be_written_are_told_at_once(ehc, cases, tmp_path, command):
    target = tmp_path / "missing" / "out.json"
    inputs = {
        "bench": ["--cases", cases],
        "pipeline": ["--ids", "none", "--map", "none", "--layout", "none"],
        "streams": ["--in", "none"],
        "train": ["--ids", "none", "--map", "none", "--layout", "none"],
    }
    done = ehc.run(command, *inputs[command], "--json", target)
    assert done.returncode == 4
    assert done.stderr == f"ehc: {target}: the folder does not exist\n"
    assert done.stdout == ""


def test_a_case_has_every_key_once(ehc, cases):
    cases.write_text("engram.offsets L=1 Nmax=2 Kh=1 L=2\n")
    done = ehc.run("check", "--cases", cases)
    assert done.returncode == 3
    assert done.stderr == f"ehc: {cases}:1: expected every key once, got 'L' twice\n"
