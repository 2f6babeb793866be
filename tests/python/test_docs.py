"""What the docs take from the operator tables is up to date."""

import pathlib
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parents[2]


def test_tables_are_up_to_date():
    told = subprocess.run([sys.executable, ROOT / "tools" / "update_docs.py", "--check"], capture_output=True, text=True)
    assert told.returncode == 0, told.stdout + told.stderr
