"""Shared fixtures: the NumPy reference on the path, and the program `ehc` under test.

EHC_BUILD names the build folder (default build/cpu); the program is its bin/ehc.
"""

import json
import os
import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
BUILD = ROOT / os.environ.get("EHC_BUILD", "build/cpu")
if "ENGRAMHC_INSTALLED" not in os.environ:  # then the installed package is under test
    sys.path.insert(0, str(ROOT / "python"))

from engramhc.reference.files import load, save  # noqa: E402


def set_arguments(attrs):
    """Attributes as `--set` arguments."""

    def text(value):
        if isinstance(value, bool):
            return "true" if value else "false"
        if isinstance(value, (list, tuple)):
            return ",".join(map(str, value))
        return repr(value) if isinstance(value, float) else str(value)

    return [word for name, value in attrs.items() for word in ("--set", f"{name}={text(value)}")]


class Refused(Exception):
    """A named implementation does not run on this processor."""


class Program:
    """Runs `ehc`; every call gets a fresh pair of file names in one scratch folder."""

    # What depends on the processor. Everything else must run everywhere.
    refusable = ("cpu.openblas", "cpu.avx2", "cpu.avx512", "cpu.avx512bf16", "cpu.amx")

    def __init__(self, path, folder):
        self.path, self.folder, self.count = path, folder, 0
        listing = self.run("op", "--list", "--json")
        assert listing.returncode == 0, listing.stderr
        self.table = {entry["name"]: entry for entry in json.loads(listing.stdout)}

    def run(self, *arguments, threads=None):
        environment = dict(os.environ)
        if threads is not None:
            environment["EHC_THREADS"] = str(threads)
        return subprocess.run(
            [str(self.path), *map(str, arguments)],
            capture_output=True,
            text=True,
            timeout=120,
            env=environment,
        )

    def implementations(self, name):
        return self.table[name]["impls"]["cpu"]

    def scratch(self):
        self.count += 1
        return self.folder / f"{self.count}.in", self.folder / f"{self.count}.out"

    def op(self, name, inputs, attrs, impl=None, threads=None, in_metadata=False):
        """Outputs of one operator; the call must succeed and stay silent."""
        source, target = self.scratch()
        metadata = {"ehc": json.dumps({"op": name, "set": attrs})} if in_metadata else None
        save(source, inputs, metadata)
        result = self.run(
            "op",
            name,
            "--in",
            source,
            "--out",
            target,
            *([] if in_metadata else set_arguments(attrs)),
            *([] if impl is None else ["--impl", impl]),
            threads=threads,
        )
        source.unlink()
        if impl in self.refusable and result.returncode == 5 and "refused" in result.stderr:
            raise Refused(result.stderr)
        assert (result.returncode, result.stderr) == (0, ""), f"{result.returncode} {result.stderr}"
        outputs, _ = load(target)
        target.unlink()
        return outputs


@pytest.fixture(scope="session")
def ehc(tmp_path_factory):
    path = BUILD / "bin" / "ehc"
    if not path.exists():
        pytest.fail(f"{path} is missing: build it, or name another build folder in EHC_BUILD")
    return Program(path, tmp_path_factory.mktemp("ehc"))
