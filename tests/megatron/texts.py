"""Datasets of real text that trainings of the tests read, made with ``ampipe data``."""

from __future__ import annotations

import email
import random
import shutil
from pathlib import Path

from megatron_ampipe.cli import main

WORDS = ["attention", "experts", "route", "tokens", "to", "ranks", "and", "back", "in", "chunks"]


def write(folder: Path, dataset: str) -> None:
    """Write ``folder/dataset.bin`` and ``.idx``: each text file is a document.

    ``text`` has the sources of a Python package, ``documents`` texts of 20 to 22 bytes.
    """
    texts = folder / f"texts of {dataset}"
    texts.mkdir()
    if dataset == "documents":
        numbers, total = random.Random(3), 0
        words = " ".join(numbers.choices(WORDS, k=400))
        while total < 3000:
            length, start = numbers.randint(20, 22), numbers.randrange(1000)
            (texts / f"{total:04}.txt").write_text(words[start : start + length])
            total += length
    else:
        for source in Path(email.__file__).parent.glob("*.py"):
            shutil.copy(source, texts)
    assert main(["data", str(texts), "--output", str(folder / dataset), "--document-bytes", "0"]) == 0
