"""``ampipe data``: the dataset contains the bytes, and bad input and interruptions leave no broken files.

All interruptions are tested: a run is stopped at every step that changes the disk, by Ctrl-C in this process
and by SIGKILL in a forked one (forked, because importing Megatron takes seconds).
"""

from __future__ import annotations

import json
import os
import signal
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megatron_ampipe.cli import main
from megatron_ampipe.launch.dataset_manifest import VOCABULARY, DatasetPaths
from megatron_ampipe.tools import dataset_writer

FILES = {
    "b.txt": "second\n",
    "a.txt": "first \u00e9\u4e2d\U0001f600\n",
    "deep/er/c.md": "x" * 700,
    "deep/d.TXT": "upper-case suffix\n",
    "z.txt": "last",
}
LEFT_OUT = {
    "empty.txt": "",
    ".hidden.txt": "h",
    ".git/h.txt": "h",
    "other.bin": "o",
    "__pycache__/p.txt": "p",
}
EXPECTED = [FILES[name] for name in ("a.txt", "b.txt", "deep/d.TXT", "deep/er/c.md", "z.txt")]


@pytest.fixture
def source(tmp_path: Path) -> Path:
    for name, text in {**FILES, **LEFT_OUT}.items():
        path = tmp_path / "source" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return tmp_path / "source"


@pytest.fixture(autouse=True)
def no_garbage_collection(monkeypatch: pytest.MonkeyPatch) -> None:
    """Megatron collects garbage for each merged shard, which takes a third of a second with torch."""
    monkeypatch.setattr("gc.collect", lambda: 0)


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
    texts = []
    for tokens in dataset:
        assert tokens.dtype == "uint16"
        assert tokens[-1] == dataset_writer.END_OF_DOCUMENT
        assert dataset_writer.END_OF_DOCUMENT not in tokens[:-1]
        texts.append(bytes(tokens[:-1].tolist()).decode())
    return texts


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
    out = capsys.readouterr().out
    assert f"5 files, {size_bytes:,} bytes, {size_bytes + 5:,} tokens" in out
    assert f"--data-path {prefix} --tokenizer-type NullTokenizer --vocab-size 256" in out


def test_the_named_tokenizer_has_our_end_of_document() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from megatron.core.tokenizers import MegatronTokenizer

        library = {"library": "null-text"}
        tokenizer = MegatronTokenizer.from_pretrained(metadata_path=library, vocab_size=VOCABULARY)
    assert tokenizer.eod == dataset_writer.END_OF_DOCUMENT
    assert tokenizer.vocab_size == VOCABULARY


@pytest.mark.parametrize("shard_bytes", [1, 20, 10**9])
def test_shards_do_not_show(
    source: Path, prefix: Path, tmp_path: Path, shard_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert data(source, tmp_path / "whole") == 0
    monkeypatch.setattr(dataset_writer, "SHARD_BYTES", shard_bytes)
    assert data(source, prefix) == 0
    for suffix in (".bin", ".idx"):
        assert Path(f"{prefix}{suffix}").read_bytes() == (tmp_path / f"whole{suffix}").read_bytes()


def test_a_second_run_says_so_and_touches_nothing(
    source: Path, prefix: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert data(source, prefix) == 0
    before = tree(prefix.parent)
    monkeypatch.setattr(dataset_writer, "write_dataset", pytest.fail)
    assert data(source, prefix) == 0
    # A new modification time alone does not count: contents are compared.
    os.utime(source / "a.txt", (1, 1))
    assert data(source, prefix) == 0
    assert capsys.readouterr().out.count("is up to date with") == 2
    assert tree(prefix.parent) == before


def test_another_source_needs_force(source: Path, prefix: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert data(source, prefix) == 0
    before = tree(prefix.parent)
    (source / "a.txt").write_text("changed\n")
    assert data(source, prefix) == 2
    assert "Add --force to replace it" in capsys.readouterr().err
    assert data(source, prefix, "--suffixes", ".md") == 2
    assert tree(prefix.parent) == before
    assert data(source, prefix, "--force", "--suffixes", ".md") == 0
    assert documents(prefix) == [FILES["deep/er/c.md"]]


@pytest.mark.parametrize("suffix", [".bin", ".idx", ".json"])
def test_files_that_are_not_ours_need_force(source: Path, prefix: Path, suffix: str) -> None:
    prefix.parent.mkdir()
    Path(f"{prefix}{suffix}").write_text("precious")
    before = tree(prefix.parent)
    assert data(source, prefix) == 2
    assert tree(prefix.parent) == before
    assert data(source, prefix, "--force") == 0
    assert documents(prefix) == EXPECTED


def test_a_partial_directory_that_is_not_ours_is_refused(source: Path, prefix: Path) -> None:
    precious = Path(f"{prefix}.partial") / "precious"
    precious.parent.mkdir(parents=True)
    precious.write_text("p")
    assert data(source, prefix) == 2
    assert data(source, prefix, "--force") == 2
    assert precious.read_text() == "p"


def spoil(source: Path, kind: str) -> str:
    path = source / "bad.txt"
    if kind == "holds a NUL byte":
        path.write_bytes(b"a\0b")
    elif kind == "is not UTF-8":
        # The last character is truncated, which is visible only at the end of the file.
        path.write_bytes("\u00e9".encode()[:1])
    elif kind == "cannot be read":
        path.symlink_to("nowhere")
    else:
        os.mkfifo(path)
    return kind


BAD = ["holds a NUL byte", "is not UTF-8", "cannot be read", "is not a regular file"]


@pytest.mark.parametrize("kind", BAD)
def test_a_bad_file_is_refused_before_anything_is_written(
    source: Path, prefix: Path, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    spoil(source, kind)
    assert data(source, prefix) == 2
    message = capsys.readouterr().err
    assert f"bad.txt {kind}" in message
    assert "--skip-bad" in message
    assert not prefix.parent.exists()

    assert data(source, prefix, "--skip-bad") == 0
    assert documents(prefix) == EXPECTED
    assert "(1 bad files left out)" in capsys.readouterr().out
    # A second run must not skip silently because the first one was allowed to skip.
    assert data(source, prefix) == 2
    assert data(source, prefix, "--skip-bad") == 0


def test_of_many_bad_files_the_first_are_named(
    source: Path, prefix: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for number in range(9):
        (source / f"bad{number}.txt").write_bytes(b"\0")
    assert data(source, prefix) == 2
    message = capsys.readouterr().err
    assert "bad4.txt" in message
    assert "bad5.txt" not in message
    assert "9 cannot be used" in message
    assert "and 4 more" in message


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads every file")
def test_a_file_without_permission_is_bad(source: Path, prefix: Path) -> None:
    (source / "a.txt").chmod(0)
    assert data(source, prefix) == 2
    assert not prefix.parent.exists()


@pytest.mark.parametrize(
    ("words", "rule"),
    [
        (["{here}/absent", "--output", "{here}/out/p"], "does not exist"),
        (["{source}/a.txt", "--output", "{here}/out/p"], "is not a directory"),
        (["{source}", "--output", "{here}/out/p", "--suffixes", ".xyz"], "holds no usable text file"),
        (["{source}", "--output", "{here}/out/p", "--suffixes", "txt"], "'txt' is not a suffix"),
        (["{source}", "--output", "{here}/out/p", "--suffixes", ""], "is not a suffix"),
        (["{source}", "--output", "{here}"], "Name the files too: {here}/corpus"),
        (["{source}", "--output", "{here}/out/p.bin"], "Leave the suffix away: {here}/out/p."),
    ],
)
def test_bad_arguments_are_refused(
    source: Path, tmp_path: Path, words: list[str], rule: str, capsys: pytest.CaptureFixture[str]
) -> None:
    before = tree(tmp_path)
    places = {"source": source, "here": tmp_path}
    assert main(["data", *(word.format(**places) for word in words)]) == 2
    assert rule.format(**places) in capsys.readouterr().err
    assert tree(tmp_path) == before


def test_an_output_that_cannot_be_written_ends_with_3(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    assert data(source, tmp_path / "file" / "p") == 3
    assert "cannot be written" in capsys.readouterr().err


def test_output_inside_the_source_is_no_source(source: Path) -> None:
    for _ in range(2):
        assert data(source, source / "own", "--suffixes", ".txt,.json") == 0
    assert len(documents(source / "own")) == 4


def test_a_file_that_changes_meanwhile_is_noticed(
    source: Path, prefix: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real = dataset_writer.begin

    def change_then_begin(*arguments: Any, **more: Any) -> Any:
        (source / "z.txt").write_text("different")
        return real(*arguments, **more)

    monkeypatch.setattr(dataset_writer, "begin", change_then_begin)
    assert data(source, prefix) == 3
    assert "z.txt changed while the dataset was written" in capsys.readouterr().err
    assert set(path.name for path in prefix.parent.iterdir()) == {"corpus.v1.partial"}


def test_two_at_once_are_refused(source: Path, prefix: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with dataset_writer.partial_directory(DatasetPaths(prefix)):
        assert data(source, prefix) == 3
    assert "another ampipe data is writing" in capsys.readouterr().err
    assert data(source, prefix) == 0


def test_without_a_directory_it_is_the_standard_library(
    tmp_path: Path, prefix: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in (
        "os.py",
        "json/decoder.py",
        "test/t.py",
        "lib2to3/tests/t.py",
        "site-packages/p.py",
        "x.txt",
    ):
        path = tmp_path / "lib" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(name)
    monkeypatch.setattr("sysconfig.get_path", lambda name: str(tmp_path / "lib"))
    assert data(None, prefix) == 0
    assert documents(prefix) == ["json/decoder.py", "os.py"]


def stop_at(step: int, stop: Callable[[], None], monkeypatch: pytest.MonkeyPatch) -> None:
    """Call ``stop`` before the given step that changes the disk; the next step number is after it."""
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    passed = [0]

    def counting(real: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*arguments: Any, **more: Any) -> Any:
            passed[0] += 1
            if passed[0] == step:
                stop()
            return real(*arguments, **more)

        return counted

    for place, name in (
        (os, "replace"),
        (os, "fsync"),
        (os, "unlink"),
        (os, "rmdir"),
        (os, "mkdir"),
        (IndexedDatasetBuilder, "add_document"),
        (IndexedDatasetBuilder, "add_index"),
        (IndexedDatasetBuilder, "finalize"),
        (IndexedDatasetBuilder, "__init__"),
    ):
        monkeypatch.setattr(place, name, counting(getattr(place, name)))


def interrupt() -> None:
    raise KeyboardInterrupt


def by_ctrl_c(source: Path, prefix: Path, step: int, force: list[str]) -> bool:
    with pytest.MonkeyPatch.context() as patched:
        stop_at(step, interrupt, patched)
        code = data(source, prefix, *force)
    assert code in (0, 130)
    return code == 130


def by_kill(source: Path, prefix: Path, step: int, force: list[str]) -> bool:
    with warnings.catch_warnings():
        # torch has its own threads; the child does not use anything that they may have locked.
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if not child:
        with pytest.MonkeyPatch.context() as patched:
            stop_at(step, lambda: os.kill(os.getpid(), signal.SIGKILL), patched)
            os._exit(data(source, prefix, *force))
    status = os.waitpid(child, 0)[1]
    assert os.WIFSIGNALED(status) or os.waitstatus_to_exitcode(status) == 0
    return os.WIFSIGNALED(status)


@pytest.mark.parametrize("stopped", [by_ctrl_c, by_kill])
@pytest.mark.parametrize("force", [False, True])
def test_stopped_anywhere_nothing_unfinished_shows_and_the_next_run_finishes(
    source: Path,
    tmp_path: Path,
    stopped: Callable[[Path, Path, int, list[str]], bool],
    force: bool,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(dataset_writer, "SHARD_BYTES", 40)
    old_source = tmp_path / "old"
    old_source.mkdir()
    (old_source / "o.txt").write_text("what stood there before\n")
    assert data(source, tmp_path / "whole") == 0
    assert data(old_source, tmp_path / "old_whole") == 0
    whole, old = (
        {s: (tmp_path / f"{n}{s}").read_bytes() for s in (".bin", ".idx")} for n in ("whole", "old_whole")
    )
    step, resumed = 0, 0
    while True:
        step += 1
        prefix = tmp_path / f"step{step}" / "corpus"
        if force:
            assert data(old_source, prefix) == 0
        was_stopped = stopped(source, prefix, step, ["--force"] * force)

        present = {
            s: Path(f"{prefix}{s}").read_bytes() for s in (".bin", ".idx") if Path(f"{prefix}{s}").exists()
        }
        # An index exists only together with its data; data without an index is complete as well.
        assert present in ([whole, old, {".bin": old[".bin"]}] if force else [whole, {}]) or present == {
            ".bin": whole[".bin"]
        }
        capsys.readouterr()
        assert data(source, prefix, *(["--force"] if present == old else [])) == 0
        resumed += "resuming" in capsys.readouterr().out
        assert {s: Path(f"{prefix}{s}").read_bytes() for s in whole} == whole
        assert data(source, prefix) == 0
        assert not list(prefix.parent.glob("*.new"))
        if not was_stopped:
            break
    assert step > 40
    assert resumed > 20


def test_finished_shards_are_not_written_again(
    source: Path, prefix: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    monkeypatch.setattr(dataset_writer, "SHARD_BYTES", 1)
    real = IndexedDatasetBuilder.add_document
    added: list[int] = []

    def third_stops(self: Any, tokens: Any, lengths: list[int]) -> None:
        if len(added) == 2 and not prefix.with_name("go").exists():
            raise KeyboardInterrupt
        added.append(len(tokens))
        real(self, tokens, lengths)

    monkeypatch.setattr(IndexedDatasetBuilder, "add_document", third_stops)
    assert data(source, prefix) == 130
    prefix.with_name("go").touch()
    assert data(source, prefix) == 0
    assert added == [len(text.encode()) + 1 for text in EXPECTED]


def test_unfinished_work_of_another_source_is_discarded(
    source: Path, prefix: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(dataset_writer, "SHARD_BYTES", 1)
    # Late enough that some shards are complete.
    assert by_ctrl_c(source, prefix, 20, [])
    assert list(Path(f"{prefix}.partial").glob("shard-*.idx"))
    (source / "a.txt").write_text("changed")
    assert data(source, prefix) == 0
    assert "discarded unfinished work" in capsys.readouterr().out
    assert documents(prefix) == ["changed", *EXPECTED[1:]]
    assert set(path.name for path in prefix.parent.iterdir()) == {
        f"{prefix.name}{s}" for s in (".bin", ".idx", ".json")
    }


def test_the_manifest_says_what_is_in_the_dataset(source: Path, prefix: Path) -> None:
    assert data(source, prefix, "--suffixes", ".txt") == 0
    manifest = json.loads(Path(f"{prefix}.json").read_text())
    assert manifest["source"] == str(source)
    assert manifest["suffixes"] == [".txt"]
    assert (manifest["files"], manifest["tokens"]) == (4, manifest["size_bytes"] + 4)


def test_no_bar_without_a_terminal(source: Path, prefix: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "tqdm" not in sys.modules or not sys.stderr.isatty()
    assert data(source, prefix) == 0
    assert "%|" not in capsys.readouterr().err


LONG = "".join(f"line {number} of a long file, \u00e9\u4e2d\n" for number in range(700))


def long_files(folder: Path, number: int = 3) -> Path:
    folder.mkdir()
    for index in range(number):
        (folder / f"{index}.txt").write_text(LONG, encoding="utf-8")
    return folder


def test_three_files_give_enough_documents(
    tmp_path: Path, prefix: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = long_files(tmp_path / "long")
    assert data(source, prefix) == 0
    found = documents(prefix)
    size_bytes = len(LONG.encode())
    # --split 99,1,0 gives validation a document if there are 51 or more.
    assert 3 * size_bytes > 51 * 1024
    assert len(found) == 3 * -(-size_bytes // 1024) > 51
    assert "".join(found) == LONG * 3
    assert all(text.endswith("\n") for text in found)
    assert max(len(text.encode()) for text in found) < 1.25 * 1024
    manifest = json.loads(Path(f"{prefix}.json").read_text())
    assert (manifest["files"], manifest["documents"], manifest["vocabulary"]) == (3, len(found), 256)
    assert manifest["tokens"] == manifest["size_bytes"] + len(found)
    assert f"in {len(found)} documents" in capsys.readouterr().out
    assert data(source, prefix) == 0
    assert "is up to date" in capsys.readouterr().out


def test_document_bytes_are_chosen_by_hand(tmp_path: Path, prefix: Path) -> None:
    source = long_files(tmp_path / "long", 1)
    assert data(source, prefix, "--document-bytes", "0") == 0
    assert documents(prefix) == [LONG]
    # A different split into documents is a different dataset, although the files are the same.
    assert data(source, prefix, "--document-bytes", "5000") == 2
    assert data(source, prefix, "--document-bytes", "5000", "--force") == 0
    assert len(documents(prefix)) == -(-len(LONG.encode()) // 5000)


def test_a_line_without_end_is_cut_between_characters(tmp_path: Path, prefix: Path) -> None:
    (tmp_path / "one").mkdir()
    text = "\U0001f600" * 100
    (tmp_path / "one" / "line.txt").write_text(text, encoding="utf-8")
    assert data(tmp_path / "one", prefix, "--document-bytes", "70") == 0
    found = documents(prefix)
    assert len(found) == 6 and "".join(found) == text


@pytest.mark.parametrize("value", ["-1", "5", "63"])
def test_a_document_of_a_few_bytes_is_refused(
    source: Path, prefix: Path, value: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert data(source, prefix, "--document-bytes", value) == 2
    assert f"--document-bytes {value}: is neither 0" in capsys.readouterr().err
    assert not prefix.parent.exists()


def test_a_dataset_of_the_first_versions_is_up_to_date(
    source: Path, prefix: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert data(source, prefix, "--document-bytes", "0") == 0
    manifest = json.loads(Path(f"{prefix}.json").read_text())
    for name in ("documents", "document_bytes", "vocabulary"):
        del manifest[name]
    Path(f"{prefix}.json").write_text(json.dumps(manifest))
    assert data(source, prefix, "--document-bytes", "0") == 0
    assert "is up to date" in capsys.readouterr().out


def train_on(prefix: Path) -> list[Path]:
    """The files that Megatron's dataset class leaves in a folder with the name of the dataset."""
    folder = prefix / "cache" / "GPTDataset_indices"
    folder.mkdir(parents=True)
    names = ("description.txt", "document_index.npy", "sample_index.npy", "shuffle_index.npy")
    files = [folder / f"0123-GPTDataset-train-{name}" for name in names]
    for file in files:
        file.write_text("of the old dataset")
    return files


def test_a_dataset_that_was_trained_on_is_rebuilt_without_its_cache(
    source: Path, prefix: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert data(source, prefix) == 0
    cached = train_on(prefix)
    assert data(source, prefix) == 0
    assert "is up to date" in capsys.readouterr().out
    assert all(file.exists() for file in cached), "it is a cache of this dataset"
    (source / "a.txt").write_text("changed\n")
    assert data(source, prefix) == 2
    assert data(source, prefix, "--force") == 0
    assert documents(prefix) == ["changed\n", *EXPECTED[1:]]
    assert not prefix.exists()


def test_what_is_not_megatrons_stays_in_the_folder(source: Path, prefix: Path) -> None:
    assert data(source, prefix) == 0
    cached = train_on(prefix)
    mine = prefix / "cache" / "notes.txt"
    mine.write_text("precious")
    assert data(source, prefix, "--force") == 0
    assert mine.read_text() == "precious" and not cached[0].exists()
    (prefix / "other").mkdir()
    assert data(source, prefix, "--force") == 2
