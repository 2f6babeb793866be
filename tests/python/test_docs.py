"""What the docs take from the operator tables is up to date, and the programs of the README run."""

import os
import pathlib
import re
import subprocess
import sys

import pytest
from conftest import BUILD

ROOT = pathlib.Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_tables_are_up_to_date():
    told = subprocess.run([sys.executable, ROOT / "tools" / "update_docs.py", "--check"], capture_output=True, text=True)
    assert told.returncode == 0, told.stdout + told.stderr


@pytest.mark.parametrize(("program", "printed"), re.findall(r"```cpp\n(.*?)```\nIt prints (\S+)\. ", README, re.DOTALL))
def test_programs_of_the_readme(tmp_path, program, printed):
    source, target = tmp_path / "main.cc", tmp_path / "main"
    source.write_text(program)
    library = BUILD / "lib"
    built = subprocess.run([os.environ.get("CXX", "c++"), "-std=c++20", "-Wall", "-Wextra", "-Werror", source,
                            f"-I{ROOT / 'include'}", f"-L{library}", "-lehc", f"-Wl,-rpath,{library}", "-o", target],
                           capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
    ran = subprocess.run([target], capture_output=True, text=True)
    assert (ran.returncode, ran.stdout) == (0, printed + "\n")


def test_every_program_of_the_readme_is_tried():
    assert README.count("```cpp") == len(re.findall(r"```cpp\n.*?```\nIt prints \S+\. ", README, re.DOTALL)) == 2


def test_pictures_of_the_readme_are_there():
    for path in re.findall(r"!\[[^]]*\]\(([^)]+)\)", README):
        assert (ROOT / path).is_file(), path
