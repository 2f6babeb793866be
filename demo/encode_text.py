"""Token ids of a text as .npy (int32), kept under the hash of text and tokenizer.

    encode_text.py TEXT FOLDER      prints the path of the .npy file
"""

from __future__ import annotations

import hashlib
import os
import pathlib
import sys

import numpy as np
from terminal import ProgressBar
from v4_tokenizer import load_tokenizer, tokenizer_path

LINES_AT_ONCE = 512


def encode(text: str) -> np.ndarray:
    """Line by line, so that the ids of a line do not depend on its neighbours."""
    tokenizer = load_tokenizer()
    lines = text.splitlines(keepends=True)
    pieces = []
    with ProgressBar("text to token ids", len(lines)) as bar:
        for begin in range(0, len(lines), LINES_AT_ONCE):
            batch = tokenizer.encode_batch_fast(
                lines[begin : begin + LINES_AT_ONCE], add_special_tokens=False
            )
            pieces += [np.asarray(encoding.ids, dtype=np.int32) for encoding in batch]
            bar.show(begin)
    return np.concatenate(pieces)


def main() -> None:
    text_path, folder = map(pathlib.Path, sys.argv[1:3])
    text = text_path.read_bytes()
    key = hashlib.sha256(tokenizer_path().read_bytes() + text).hexdigest()[:16]
    path = folder / f"ids-{key}.npy"
    if not path.exists():
        scratch = folder / f"ids-{key}.{os.getpid()}.npy"
        np.save(scratch, encode(text.decode("utf-8")))
        scratch.rename(path)
    print(path)


if __name__ == "__main__":
    main()
