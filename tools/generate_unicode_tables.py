#!/usr/bin/env python3
"""Generates src/text/unicode_tables_9_0.inc, the table behind the token map's normaliser.

The rule NFKC -> NFD -> drop marks -> lowercase is, code point for code point, a plain map:
  - NFD(NFKC(text)) is NFKD(text), since composing loses nothing that decomposing does not restore;
  - NFKD(xy) is NFKD(x) NFKD(y) with code points of non-zero combining class reordered, and every
    such code point is a mark, which the next step drops;
  - dropping and lowercasing look at one code point at a time.
So the table holds lowercase(drop_marks(NFKD(c))) for every code point c, as the normalizers of the
`tokenizers` wheel answer it, and no combining classes or compositions are needed. The script checks
each of these statements on the wheel over all scalar values before it writes a line.
Hangul syllables follow their arithmetic and are left out; that is checked too.

Needs: pip install tokenizers==0.23.3.  Usage:
  generate_unicode_tables.py            rewrite the table
  generate_unicode_tables.py --check    exit 1 when the committed table differs
"""

import argparse
import pathlib
import sys

import tokenizers
from tokenizers import normalizers

WHEEL_VERSION = "0.23.3"
OUTPUT = pathlib.Path(__file__).resolve().parent.parent / "src/text/unicode_tables_9_0.inc"
BLOCK = 128
MARKS_9_0 = 2097
# Code points whose lowercase mapping, or whose absence of one, tells the Unicode version of the
# Rust standard library inside the wheel: U+1C89 is new in 16.0, U+A7CE in 17.0.
LOWERCASE_VERSION_PROBES = {"16.0": 0x1C89, "17.0": 0xA7CE}


def scalar_values():
    for code_point in range(0x110000):
        if not 0xD800 <= code_point < 0xE000:
            yield code_point


def hangul_jamo(code_point):
    index = code_point - 0xAC00
    trailing = index % 28
    jamo = [0x1100 + index // 588, 0x1161 + index % 588 // 28]
    return "".join(map(chr, jamo + ([0x11A7 + trailing] if trailing else [])))


def check_premises():
    """Everything that makes a map of single code points enough."""
    nfkc, nfd, nfkd = normalizers.NFKC(), normalizers.NFD(), normalizers.NFKD()
    strip_marks, lowercase = normalizers.StripAccents(), normalizers.Lowercase()
    marks = 0
    for code_point in scalar_values():
        char = chr(code_point)
        decomposed = nfkd.normalize_str(char)
        if decomposed != nfd.normalize_str(nfkc.normalize_str(char)):
            sys.exit(f"U+{code_point:04X}: NFD(NFKC) is not NFKD")
        if strip_marks.normalize_str(char) == "":
            marks += 1
        elif decomposed == char:
            # A class in 1..239 lets it pass before U+0345 (240), one in 2..254 behind U+0334 (1).
            for pair in ("\u0345" + char, char + "\u0334"):
                if nfd.normalize_str(pair) != pair:
                    sys.exit(f"U+{code_point:04X} is reordered but is not a mark")
    if marks != MARKS_9_0:
        sys.exit(f"expected {MARKS_9_0} marks, got {marks}")
    if lowercase.normalize_str("\u0391\u03a3") != "\u03b1\u03c3":
        sys.exit("lowercase looks at the context of sigma")


def lowercase_version():
    known = [
        version
        for version, code_point in LOWERCASE_VERSION_PROBES.items()
        if normalizers.Lowercase().normalize_str(chr(code_point)) != chr(code_point)
    ]
    return known[-1] if known else "15.0"


def collect_mapping():
    pipeline = normalizers.Sequence(
        [
            normalizers.NFKC(),
            normalizers.NFD(),
            normalizers.StripAccents(),
            normalizers.Lowercase(),
        ]
    )
    mapping = {}
    for code_point in scalar_values():
        mapped = pipeline.normalize_str(chr(code_point))
        if 0xAC00 <= code_point <= 0xD7A3:
            if mapped != hangul_jamo(code_point):
                sys.exit(f"U+{code_point:04X} does not follow the Hangul arithmetic")
        elif mapped != chr(code_point):
            mapping[code_point] = mapped
    return mapping


def white_space_ranges():
    strip = normalizers.Strip()
    ranges, count = [], 0
    for code_point in scalar_values():
        if strip.normalize_str(chr(code_point)) == "":
            count += 1
            if ranges and ranges[-1][1] == code_point - 1:
                ranges[-1][1] = code_point
            else:
                ranges.append([code_point, code_point])
    return ranges, count


def wrap(items):
    lines, line = [], ""
    for item in items:
        if len(line) + len(item) + 1 > 100:
            lines.append(line)
            line = ""
        line += item + ","
    return "\n".join(lines + [line])


def render():
    check_premises()
    mapping = collect_mapping()
    spaces, space_count = white_space_ranges()

    # Replacements as a length byte and UTF-8; offsets 0 and 1 mean "itself" and "nothing".
    pool, offset_of = bytearray(2), {"": 1}
    for replacement in mapping.values():
        if replacement not in offset_of:
            encoded = replacement.encode()
            offset_of[replacement] = len(pool)
            pool += bytes([len(encoded)]) + encoded
    if len(pool) > 0xFFFF:
        sys.exit("the replacements no longer fit 16-bit offsets")

    limit = (max(mapping) // BLOCK + 1) * BLOCK
    blocks, index = {}, []
    for start in range(0, limit, BLOCK):
        block = tuple(
            offset_of[mapping[c]] if c in mapping else 0 for c in range(start, start + BLOCK)
        )
        index.append(blocks.setdefault(block, len(blocks)))
    if len(blocks) > 256:
        sys.exit("the block numbers no longer fit 8 bits")

    lower = lowercase_version()
    return f"""\
// Generated by tools/generate_unicode_tables.py; do not edit.
// Source: the normalizers of tokenizers=={tokenizers.__version__}, asked for every Unicode scalar value.
//   decompositions and marks (general category M): Unicode 9.0, {MARKS_9_0} marks
//   lowercase of single code points: Unicode {lower} (the wheel's Rust)
//   white space: {space_count} code points
// {len(mapping)} code points change; Hangul syllables are computed and not listed.
// clang-format off
inline constexpr std::string_view kUnicodeTableVersion = "unicode-9.0-lower-{lower}";
inline constexpr char32_t kMappingLimit = {limit:#x};
inline constexpr int kMappingBlock = {BLOCK};
inline constexpr std::array<std::array<char32_t, 2>, {len(spaces)}> kWhiteSpaceRanges = {{{{
{wrap(f"{{{{{first:#x}, {last:#x}}}}}" for first, last in spaces)}
}}}};
// Block number of code point c: kMappingIndex[c / kMappingBlock].
inline constexpr std::array<uint8_t, {len(index)}> kMappingIndex = {{
{wrap(map(str, index))}
}};
// 0: the code point itself, 1: nothing, else an offset into kReplacements.
inline constexpr std::array<uint16_t, {len(blocks) * BLOCK}> kMappingBlocks = {{
{wrap(str(value) for block in blocks for value in block)}
}};
// At each offset a length byte, then so many bytes of UTF-8.
inline constexpr std::array<uint8_t, {len(pool)}> kReplacements = {{
{wrap(map(str, pool))}
}};
// clang-format on
"""


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="compare, do not write")
    arguments = parser.parse_args()
    if tokenizers.__version__ != WHEEL_VERSION:
        sys.exit(f"needs tokenizers=={WHEEL_VERSION}, got {tokenizers.__version__}")
    text = render()
    if arguments.check:
        if OUTPUT.read_text(encoding="utf-8") != text:
            sys.exit(f"{OUTPUT.name} differs from what the wheel says")
    else:
        OUTPUT.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
