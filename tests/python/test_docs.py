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


def headings(family):
    """Of the page of a family: (names, numbers) of each `### a, b (1.3, 1.4)`; 1.12b-d is three numbers."""
    page = (ROOT / "docs" / "ops" / f"{family}.md").read_text(encoding="utf-8")
    for names, numbers in re.findall(r"^### (.+) \(([^()]+)\)$", page, re.MULTILINE):
        spelled = set()
        for number in numbers.split(", "):
            letters = re.fullmatch(r"(.*\d)([a-z])-([a-z])", number)
            if letters:
                stem, first, last = letters.groups()
                spelled |= {stem + chr(code) for code in range(ord(first), ord(last) + 1)}
            else:
                spelled.add(number)
        yield set(names.split(", ")), spelled


def test_every_operator_stands_under_the_number_of_its_section(ehc):
    """In one heading: the number, and the operator by its name or without what tells its directions apart."""
    pages = {family: list(headings(family)) for family in {name.split(".")[0] for name in ehc.table}}
    missing = []
    for name, entry in ehc.table.items():
        family, operator = name.split(".")
        names = {operator, re.sub(r"_(fwd|bwd)$", "", operator)}
        under = [numbers for titles, numbers in pages[family] if names & titles]
        if entry["section"] != "-" and not any(entry["section"] in numbers for numbers in under):
            missing.append((name, entry["section"]))
    assert not missing
