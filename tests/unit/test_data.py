"""``ampipe data``: the dataset contains the bytes, and bad input and interruptions leave no broken files."""

import os
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megatron_ampipe.cli import main
from tests.conftest import Command

FILES = {
    "a.txt": "first \u00e9\u4e2d\U0001f600\n",
    "b.txt": "second\n",
    "deep/d.TXT": "upper-case suffix\n",
    "deep/er/c.md": "x" * 700,
    "z.txt": "last",
}
LEFT_OUT = {
    "empty.txt": "",
    ".hidden.txt": "h",
    ".git/h.txt": "h",
    "other.bin": "o",
    "__pycache__/p.txt": "p",
}
EXPECTED = list(FILES.values())
LONG = "".join(f"line {number} of a long file, \u00e9\u4e2d\n" for number in range(700))
PARTS = (".bin", ".idx")


def write(folder: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text, encoding="utf-8")
    return folder


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write(tmp_path / "source", FILES | LEFT_OUT)


@pytest.fixture
def prefix(tmp_path: Path) -> Path:
    return tmp_path / "out" / "corpus.v1"


@pytest.fixture
def data(ampipe: Command) -> Command:
    """``ampipe data`` of a folder, to a prefix."""
    return lambda source, prefix, *more, code=0: ampipe("data", source, "--output", prefix, *more, code=code)


def documents(prefix: Path) -> list[str]:
    """The dataset as read by Megatron; each document without its last token, which must be the end token."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from megatron.core.datasets.indexed_dataset import IndexedDataset

        dataset = IndexedDataset(str(prefix))
    assert list(dataset.document_indices) == list(range(len(dataset) + 1))
    assert all(tokens.dtype == "uint16" and list(tokens).index(255) == len(tokens) - 1 for tokens in dataset)
    return [bytes(tokens[:-1].tolist()).decode() for tokens in dataset]


def tree(directory: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(directory)): path.read_bytes() if path.is_file() else b"directory"
        for path in directory.rglob("*")
    }


def test_megatron_reads_the_bytes_back(source: Path, prefix: Path, data: Command) -> None:
    shown = data(source, prefix)
    assert documents(prefix) == EXPECTED
    assert set(tree(prefix.parent)) == {"corpus.v1.bin", "corpus.v1.idx"}
    size_bytes = sum(len(text.encode()) for text in EXPECTED)
    assert f"5 files, {size_bytes:,} bytes, {size_bytes + 5:,} tokens in 5 documents" in shown.out
    assert f"--data-path {prefix} --tokenizer-type NullTokenizer --vocab-size 256" in shown.out
    assert "%|" not in shown.err, "no progress bar without a terminal"


def test_what_stands_there_needs_force(source: Path, prefix: Path, data: Command) -> None:
    for suffix in PARTS:
        write(prefix.parent, {f"corpus.v1{suffix}": "precious"})
        before = tree(prefix.parent)
        assert "Add --force to replace it" in data(source, prefix, code=2).err
        assert tree(prefix.parent) == before
        data(source, prefix, "--force")
        assert documents(prefix) == EXPECTED
        for path in prefix.parent.iterdir():
            path.unlink()
    # Megatron's dataset class caches what it knows of the old dataset.
    cached = prefix / "cache" / "GPTDataset_indices" / "0123-GPTDataset-train-document_index.npy"
    write(cached.parent, {cached.name: "of the old dataset"})
    data(source, prefix, "--force")
    assert not cached.exists()


def test_files_that_are_no_text_are_left_out_and_named(source: Path, prefix: Path, data: Command) -> None:
    (source / "bad.txt").write_bytes("\u00e9".encode()[:1])
    (source / "broken.txt").symlink_to("nowhere")
    os.mkfifo(source / "pipe.txt")
    said = data(source, prefix).out
    assert documents(prefix) == EXPECTED
    assert f"left out 1 files that are no readable UTF-8 text: {source / 'bad.txt'}" in said
    said = data(source, prefix, "--force", "--suffixes", "bad.txt", code=3).err
    assert "none of 1 files is readable UTF-8 text" in said
    assert documents(prefix) == EXPECTED


@pytest.mark.parametrize(
    ("words", "rule"),
    [
        (["{here}/absent", "--output", "{here}/out/p"], "there is no text file with the suffix .txt or .md"),
        (["{source}", "--output", "{here}/out/p", "--suffixes", ".xyz"], "no text file with the suffix .xyz"),
        (["{source}", "--output", "."], "is no name to which"),
        (["{source}", "--output", "{here}/out/p.bin"], "is no name to which"),
        (["{source}", "--output", "{here}/file/p"], "cannot be written to"),
        (["{source}", "--output", "{here}/p", "--document-bytes", "-1"], "not a whole number of at least 0"),
    ],
)
def test_bad_arguments_are_refused(
    source: Path, tmp_path: Path, words: list[str], rule: str, ampipe: Command
) -> None:
    (tmp_path / "file").touch()
    before = tree(tmp_path)
    said = ampipe("data", *(word.format(source=source, here=tmp_path) for word in words), code=2)
    assert rule in " ".join(said.err.split())
    assert tree(tmp_path) == before


def test_few_files_are_cut_into_enough_documents(tmp_path: Path, prefix: Path, data: Command) -> None:
    source = write(tmp_path / "long", {f"{index}.txt": LONG for index in range(3)})
    data(source, prefix)
    found = documents(prefix)
    # --split 99,1,0 gives validation a document if there are 51 or more.
    assert len(found) > 51
    assert "".join(found) == LONG * 3 and all(text.endswith("\n") for text in found)
    assert max(len(text.encode()) for text in found) < 1.25 * 1024
    data(source, prefix, "--force", "--document-bytes", "0")
    assert documents(prefix) == [LONG] * 3


def stop_at(step: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Interrupt before the given step that changes the disk."""
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    passed = [0]

    def counting(real: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*arguments: Any, **more: Any) -> Any:
            passed[0] += 1
            if passed[0] == step:
                raise KeyboardInterrupt
            return real(*arguments, **more)

        return counted

    builder = [(IndexedDatasetBuilder, name) for name in ("__init__", "add_document", "finalize")]
    for place, name in [*((os, name) for name in ("replace", "fsync", "unlink", "rmdir")), *builder]:
        monkeypatch.setattr(place, name, counting(getattr(place, name)))


def test_stopped_anywhere_nothing_unfinished_shows_and_the_next_run_finishes(
    source: Path, tmp_path: Path, data: Command
) -> None:
    old_source = write(tmp_path / "old", {"o.txt": "what stood there before\n"})
    whole, old = (tmp_path / "whole", tmp_path / "old_whole")
    data(source, whole)
    data(old_source, old)

    def parts(prefix: Path) -> dict[str, bytes]:
        return {s: Path(f"{prefix}{s}").read_bytes() for s in PARTS if Path(f"{prefix}{s}").exists()}

    step, code = 0, 130
    while code == 130:
        step += 1
        prefix = tmp_path / f"step{step}" / "corpus"
        data(old_source, prefix)
        with pytest.MonkeyPatch.context() as patched:
            stop_at(step, patched)
            code = main(["data", str(source), "--output", str(prefix), "--force"])
        # An index exists only together with its data; data without an index is complete as well.
        alone = [{".bin": parts(both)[".bin"]} for both in (whole, old)]
        assert parts(prefix) in [parts(whole), parts(old), *alone]
        data(source, prefix, "--force")
        assert parts(prefix) == parts(whole)
    assert code == 0 and step > 12
