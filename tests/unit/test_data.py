"""``ampipe data``: the dataset contains the bytes, and bad input and interruptions leave no broken files."""

from __future__ import annotations

import json
import os
import signal
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megatron_ampipe.cli import main
from megatron_ampipe.tools import data_command

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


def data(source: Path | None, prefix: Path, *more: str) -> int:
    return main(["data", *([str(source)] if source else []), "--output", str(prefix), *more])


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


def test_megatron_reads_the_bytes_back(
    source: Path, prefix: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert data(source, prefix) == 0
    assert documents(prefix) == EXPECTED
    assert set(tree(prefix.parent)) == {"corpus.v1.bin", "corpus.v1.idx", "corpus.v1.json"}
    size_bytes = sum(len(text.encode()) for text in EXPECTED)
    shown = capsys.readouterr()
    assert f"5 files, {size_bytes:,} bytes, {size_bytes + 5:,} tokens in 5 documents" in shown.out
    assert f"--data-path {prefix} --tokenizer-type NullTokenizer --vocab-size 256" in shown.out
    assert "%|" not in shown.err, "no progress bar without a terminal"
    manifest = json.loads(Path(f"{prefix}.json").read_text())
    assert (manifest["source"], manifest["files"], manifest["vocabulary"]) == (str(source), 5, 256)
    # A second run writes nothing.
    before = tree(prefix.parent)
    os.utime(source / "a.txt", (1, 1))
    assert data(source, prefix) == 0
    assert "is up to date with" in capsys.readouterr().out and tree(prefix.parent) == before


def test_the_named_tokenizer_has_our_end_of_document() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from megatron.core.tokenizers import MegatronTokenizer

        library = {"library": "null-text"}
        tokenizer = MegatronTokenizer.from_pretrained(metadata_path=library, vocab_size=256)
    assert (tokenizer.eod, tokenizer.vocab_size) == (data_command.END_OF_DOCUMENT, 256)


def test_what_stands_there_needs_force(
    source: Path, prefix: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for suffix in (*PARTS, ".json"):
        write(prefix.parent, {f"corpus.v1{suffix}": "precious"})
        before = tree(prefix.parent)
        assert data(source, prefix) == 2
        assert "Add --force to replace them" in capsys.readouterr().err
        assert tree(prefix.parent) == before
        assert data(source, prefix, "--force") == 0
        for path in prefix.parent.iterdir():
            path.unlink()
    assert data(source, prefix) == 0
    # Megatron's dataset class caches what it knows of the old dataset.
    cached = prefix / "cache" / "GPTDataset_indices" / "0123-GPTDataset-train-document_index.npy"
    write(cached.parent, {cached.name: "of the old dataset"})
    (source / "a.txt").write_text("changed\n")
    assert data(source, prefix) == 2
    assert cached.exists()
    assert data(source, prefix, "--force", "--document-bytes", "0") == 0
    assert documents(prefix) == ["changed\n", *EXPECTED[1:]] and not cached.exists()
    assert data(source, prefix, "--document-bytes", "100") == 2, "another cut is another dataset"


BAD: dict[str, Callable[[Path], object]] = {
    "is not UTF-8": lambda path: path.write_bytes("\u00e9".encode()[:1]),
    "is not a regular file": os.mkfifo,
}


def test_bad_files_are_refused_before_anything_is_written(
    source: Path, prefix: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for number, spoil in enumerate([*BAD.values(), lambda path: path.symlink_to("nowhere")]):
        spoil(source / f"bad{number}.txt")
    assert data(source, prefix) == 2
    message = capsys.readouterr().err
    assert all(f"bad{number}.txt {why}" in message for number, why in enumerate(BAD))
    assert "3 cannot be" in message and "--skip-bad" in message
    assert not tree(prefix.parent)
    assert data(source, prefix, "--skip-bad") == 0
    assert documents(prefix) == EXPECTED
    assert "(3 bad files left out)" in capsys.readouterr().out
    # A second run must not skip silently because the first one was allowed to skip.
    assert data(source, prefix) == 2


@pytest.mark.parametrize(
    ("words", "rule"),
    [
        (["{here}/absent", "--output", "{here}/out/p"], "is not a directory"),
        (["{source}", "--output", "{here}/out/p", "--suffixes", ".xyz"], "holds no usable text file"),
        (["{source}", "--output", "{here}/out/p", "--suffixes", "txt"], "must begin with a dot"),
        (["{source}", "--output", "{here}"], "name the dataset: --output data/corpus"),
        (["{source}", "--output", "{here}/out/p.bin"], "name the dataset: --output data/corpus"),
        (["{source}", "--output", "{here}/out/p", "--document-bytes", "63"], "is neither 0, which cuts"),
    ],
)
def test_bad_arguments_are_refused(
    source: Path, tmp_path: Path, words: list[str], rule: str, capsys: pytest.CaptureFixture[str]
) -> None:
    before = tree(tmp_path)
    assert main(["data", *(word.format(source=source, here=tmp_path) for word in words)]) == 2
    assert rule in capsys.readouterr().err
    assert {name: part for name, part in tree(tmp_path).items() if name != "out"} == before


def test_what_cannot_be_written_ends_with_3(source: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert data(source, tmp_path / "file" / "p") == 3


def test_output_inside_the_source_is_no_source(source: Path) -> None:
    for _ in range(2):
        assert data(source, source / "own", "--suffixes", ".txt,.json") == 0
    assert len(documents(source / "own")) == 4


def test_without_a_directory_it_is_the_standard_library(
    tmp_path: Path, prefix: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = ["os.py", "json/decoder.py", "test/t.py", "lib2to3/tests/t.py", "site-packages/p.py", "x.txt"]
    write(tmp_path / "lib", {name: name for name in names})
    monkeypatch.setattr("sysconfig.get_path", lambda name: str(tmp_path / "lib"))
    assert data(None, prefix) == 0
    assert documents(prefix) == ["json/decoder.py", "os.py"]


def test_few_files_are_cut_into_enough_documents(tmp_path: Path, prefix: Path) -> None:
    source = write(tmp_path / "long", {f"{index}.txt": LONG for index in range(3)})
    assert data(source, prefix) == 0
    found = documents(prefix)
    # --split 99,1,0 gives validation a document if there are 51 or more.
    assert len(found) == 3 * -(-len(LONG.encode()) // 1024) > 51
    assert "".join(found) == LONG * 3 and all(text.endswith("\n") for text in found)
    assert max(len(text.encode()) for text in found) < 1.25 * 1024
    assert json.loads(Path(f"{prefix}.json").read_text())["documents"] == len(found)
    assert data(source, prefix, "--force", "--document-bytes", "0") == 0
    assert documents(prefix) == [LONG] * 3
    # A line without an end is cut between characters.
    text = "\U0001f600" * 100
    assert data(write(tmp_path / "one", {"line.txt": text}), tmp_path / "p", "--document-bytes", "70") == 0
    assert len(documents(tmp_path / "p")) == 6 and "".join(documents(tmp_path / "p")) == text


def stop_at(step: int, stop: Callable[[], None], monkeypatch: pytest.MonkeyPatch) -> None:
    """Call ``stop`` before the given step that changes the disk."""
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    passed = [0]

    def counting(real: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*arguments: Any, **more: Any) -> Any:
            passed[0] += 1
            if passed[0] == step:
                stop()
            return real(*arguments, **more)

        return counted

    builder = [(IndexedDatasetBuilder, name) for name in ("__init__", "add_document", "finalize")]
    for place, name in [*((os, name) for name in ("replace", "fsync", "unlink", "rmdir")), *builder]:
        monkeypatch.setattr(place, name, counting(getattr(place, name)))


def by_kill(source: Path, prefix: Path, step: int) -> bool:
    """In a forked process, because importing Megatron takes seconds."""
    with warnings.catch_warnings():
        # torch has its own threads; the child does not use anything that they may have locked.
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if not child:
        with pytest.MonkeyPatch.context() as patched:
            stop_at(step, lambda: os.kill(os.getpid(), signal.SIGKILL), patched)
            os._exit(data(source, prefix, "--force"))
    status = os.waitpid(child, 0)[1]
    assert os.WIFSIGNALED(status) or os.waitstatus_to_exitcode(status) == 0
    return os.WIFSIGNALED(status)


def test_a_failure_leaves_no_unfinished_file(
    source: Path, prefix: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    stop_at(5, interrupt, monkeypatch)
    assert data(source, prefix) == 130
    assert not tree(prefix.parent)


def test_stopped_anywhere_nothing_unfinished_shows_and_the_next_run_finishes(
    source: Path, tmp_path: Path
) -> None:
    old_source = write(tmp_path / "old", {"o.txt": "what stood there before\n"})
    whole, old = (tmp_path / "whole", tmp_path / "old_whole")
    assert data(source, whole) == data(old_source, old) == 0

    def parts(prefix: Path) -> dict[str, bytes]:
        return {s: Path(f"{prefix}{s}").read_bytes() for s in PARTS if Path(f"{prefix}{s}").exists()}

    step, was_stopped = 0, True
    while was_stopped:
        step += 1
        prefix = tmp_path / f"step{step}" / "corpus"
        assert data(old_source, prefix) == 0
        was_stopped = by_kill(source, prefix, step)
        # An index exists only together with its data; data without an index is complete as well.
        alone = [{".bin": parts(both)[".bin"]} for both in (whole, old)]
        assert parts(prefix) in [parts(whole), parts(old), *alone]
        assert data(source, prefix, *(["--force"] if parts(prefix) == parts(old) else [])) == 0
        assert parts(prefix) == parts(whole)
    assert step > 12
