"""Training runs whose sequences consist of documents, compared with stock runs: the same digits.

A dataset has documents that are longer than a sequence, of a third of it, or of a few tokens. Every document
is a text file. ``--sft`` reads conversations; the package that Megatron reads them with is not installed with
the tests, so :mod:`.sft_worker` stands in for it.
"""

from __future__ import annotations

import json
import random
import shlex
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.megatron.launcher import REPOSITORY, TINY_GPT, TINY_MOE, Run, environment
from tests.megatron.pairs import assert_same_digits, digits, runs_of

pytestmark = pytest.mark.timeout(900)

NUM_ITERATIONS = 3
DEGREE_4 = "--ampipe-degree 4"
WORDS = ["attention", "experts", "route", "tokens", "to", "ranks", "and", "back", "in", "chunks"]

COMMON = [
    *TINY_GPT,
    *TINY_MOE,
    *shlex.split(
        f"--train-iters {NUM_ITERATIONS} --vocab-size 256 --attention-dropout 0 --hidden-dropout 0 "
        "--lr-decay-style constant --split 100,0,0 --expert-model-parallel-size 2 "
        "--position-embedding-type rope"
    ),
]
PACKED = "--dataloader-inter-document-masking"
TWO_SEQUENCES = (
    "--micro-batch-size 2 --group-query-attention --num-query-groups 2 "
    "--moe-router-load-balancing-type seq_aux_loss --moe-aux-loss-coeff 1e-1 "
    "--tensor-model-parallel-size 2 --sequence-parallel --expert-tensor-parallel-size 1"
)
DOCUMENT_BYTES = {"one": (300, 500), "three": (20, 22), "many": (2, 9)}
RUNS: dict[str, tuple[str, str, str]] = {
    "one": ("one", PACKED, DEGREE_4),
    "three": ("three", f"{PACKED} {TWO_SEQUENCES}", f"{DEGREE_4} --ampipe-stack all"),
    "many": ("many", PACKED, f"{DEGREE_4} --ampipe-backward-degree 2"),
    "mamba": (
        "three",
        f"{PACKED} --hybrid-layer-pattern M*EM*E --mamba-head-dim 16 --mamba-num-groups 2 "
        "--mamba-state-dim 16 --normalization RMSNorm --micro-batch-size 2",
        f"{DEGREE_4} --ampipe-stack all",
    ),
    "masked": (
        "three",
        "--reset-attention-mask --reset-position-ids --eod-mask-loss --micro-batch-size 2 "
        "--window-size 16,0 --window-attn-skip-freq 2",
        DEGREE_4,
    ),
}
"""For each pair of runs the dataset, the flags of both, and those of AMPipe."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Contains the datasets."""
    found = tmp_path_factory.mktemp("documents")
    for name, lengths in DOCUMENT_BYTES.items():
        _make_dataset(found, name, lengths)
    return found


def _make_dataset(folder: Path, name: str, lengths: tuple[int, int]) -> None:
    texts, numbers = folder / f"{name}_texts", random.Random(3)
    texts.mkdir()
    words = " ".join(numbers.choices(WORDS, k=400))
    total = 0
    while total < 3000:
        length, start = numbers.randint(*lengths), numbers.randrange(1000)
        (texts / f"{total:04}.txt").write_text(words[start : start + length])
        total += length
    command = [sys.executable, "-m", "megatron_ampipe.cli", "data", str(texts)]
    done = subprocess.run(
        [*command, "--output", str(folder / name), "--document-bytes", "0"],
        cwd=REPOSITORY, env=environment(), capture_output=True, text=True, timeout=180,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def runs(folder: Path) -> Mapping[str, Run]:
    """All runs by name; that of AMPipe has ``ampipe`` added to its name."""
    lines = {}
    for name, (dataset, flags, ours) in RUNS.items():
        data = ["--data-path", str(folder / dataset), "--data-cache-path", str(folder / "cache")]
        lines[name] = [*COMMON, *shlex.split(flags), *data]
        lines[f"{name} ampipe"] = [*lines[name], *shlex.split(ours)]
    lines["whole"] = [word for word in lines["many"] if word != PACKED]
    return runs_of(lines)


@pytest.mark.parametrize("name", RUNS)
def test_documents_train_like_stock(name: str, runs: Mapping[str, Run]) -> None:
    assert_same_digits(runs[name], runs[f"{name} ampipe"], iterations=NUM_ITERATIONS)
    how = "masked" if name == "masked" else "packed"
    assert f"documents {how} a token attends to its own document only" in runs[f"{name} ampipe"].table


def test_documents_matter(runs: Mapping[str, Run]) -> None:
    assert runs["many"].lm_loss != digits(runs["whole"].lm_loss)


def test_conversations_train_like_stock(tmp_path: Path) -> None:
    """``--sft`` with the tokenizer of a folder; several conversations share a line and a sequence."""
    tokenizers = pytest.importorskip("tokenizers", reason="Megatron's SFT tokenizer needs it")
    pytest.importorskip("transformers", reason="Megatron's SFT tokenizer needs it")
    vocabulary = {word: number for number, word in enumerate(["<unk>", "</s>", *sorted(set(WORDS))])}
    model = tokenizers.models.WordLevel(vocabulary, unk_token="<unk>")
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    named = {"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "<unk>", "eos_token": "</s>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(named))
    numbers, lines = random.Random(5), []
    for _ in range(16):
        messages = [
            {"role": role, "content": " ".join([*numbers.choices(WORDS, k=numbers.randint(1, 9)), ""])}
            for _ in range(numbers.randint(1, 4))
            for role in ("system", "user", "assistant")
        ]
        lines.append(json.dumps({"messages": messages}))
    (tmp_path / "lines.jsonl").write_text("\n".join(lines))
    flags = shlex.split(
        f"--sft --no-create-attention-mask-in-dataloader --tokenizer-type SFTTokenizer "
        f"--tokenizer-model {tmp_path} --sft-tokenizer-prompt-format identity "
        f"--data-path {tmp_path / 'lines.jsonl'} --micro-batch-size 2"
    )
    both = {"stock": [*COMMON, *flags], "ampipe": [*COMMON, *flags, *DEGREE_4.split()]}
    found = runs_of(both, module="tests.megatron.sft_worker")
    assert_same_digits(found["stock"], found["ampipe"], iterations=NUM_ITERATIONS)
