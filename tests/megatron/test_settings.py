"""Checks configuration files with Megatron's parser, and trains from them.

One process imports Megatron and tests all inputs; the training runs are real launches.
"""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from megatron_ampipe.files.inputs import config_names
from tests.megatron.launcher import REPOSITORY, environment, pretrain
from tests.megatron.settings_worker import LAUNCHES

pytestmark = pytest.mark.timeout(900)

TINY_BY_FLAGS = shlex.split(
    "--num-layers 4 --hidden-size 128 --num-attention-heads 4 --ffn-hidden-size 256 --seq-length 2048 "
    "--max-position-embeddings 2048 --position-embedding-type rope --normalization RMSNorm --swiglu "
    "--disable-bias-linear --untie-embeddings-and-output-weights --attention-dropout 0 --hidden-dropout 0 "
    "--num-experts 4 --moe-router-topk 2 --moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 1e-2 "
    "--moe-token-dispatcher-type alltoall --expert-model-parallel-size 2 --tokenizer-type NullTokenizer "
    "--vocab-size 256 --split 99,1,0 --micro-batch-size 1 --global-batch-size 2 --lr 5e-4 --adam-eps 1e-5 "
    "--lr-decay-style constant --clip-grad 1.0 --seed 1234 --log-interval 1 --eval-interval 1000 "
    "--eval-iters 0"
)
ONE_RANK = ["--expert-model-parallel-size", "1"]
SHORT_SEQUENCE = ["--seq-length", "512"]
SHORT = ["--mock-data", "--train-iters", "3", "--lr-warmup-iters", "1", *SHORT_SEQUENCE]


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The report of one process."""
    folder = tmp_path_factory.mktemp("settings")
    done = subprocess.run(
        [sys.executable, "-m", "tests.megatron.settings_worker", str(folder)],
        cwd=REPOSITORY,
        env=environment() | {"AMPIPE_TEST_REPORT": str(folder / "report.json")},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout[-4000:]
    found: dict[str, Any] = json.loads((folder / "report.json").read_text())
    return found | {"folder": folder}


@pytest.mark.parametrize("model", LAUNCHES)
def test_built_in_models_and_runs_pass_megatrons_checks(model: str, report: dict[str, Any]) -> None:
    found = report["launches"][model]
    assert found["code"] == 0, found["err"]
    assert report["back"][model] == []


def test_every_built_in_model_and_run_is_checked() -> None:
    assert LAUNCHES.keys() == config_names("models").keys()
    assert {run for run, _, _ in LAUNCHES.values()} == config_names("runs").keys()


def test_every_flag_of_megatron_can_be_set_in_a_file(report: dict[str, Any]) -> None:
    assert report["num_flags"] > 1000
    assert report["every_flag"] == []


def test_help_lists_every_flag(report: dict[str, Any]) -> None:
    """Megatron 0.19.2 itself fails: argparse raises an error for a percent sign in one of its help texts."""
    assert "--ampipe-degree" in report["help"] and "--num-layers" in report["help"]


def test_every_example_of_config_does_what_it_shows(report: dict[str, Any]) -> None:
    assert len(report["examples"]) == 3
    for words, found in report["examples"].items():
        assert found["code"] == 0, f"ampipe {words}\n{found['err']}"
        assert "num-layers" in found["out"]


def test_config_shows_the_source_of_each_value(report: dict[str, Any]) -> None:
    lines = report["as_yaml"]["out"].splitlines()
    assert report["as_yaml"]["code"] == 0
    assert "num-layers: 4  # configs/models/tiny.yaml:3" in lines
    assert "lr: 0.5  # command line" in lines
    assert lines[-2:] == ["ampipe:", "  degree: 4  # command line"]


def test_config_prints_a_command_line(report: dict[str, Any]) -> None:
    words = shlex.split(report["as_command"]["out"].replace("\\\n", " "))
    assert words[:2] == ["--num-layers", "4"]
    assert words[-2:] == ["--lr", "0.5"]
    assert words.count("--lr") == 1


def test_config_ends_with_2_on_a_wrong_flag_and_on_what_a_launch_would_refuse(report: dict[str, Any]) -> None:
    assert report["refused"]["code"] == report["refused_launch"]["code"] == 2
    assert report["refused"]["err"].startswith("ampipe: --num-layers: invalid int value: 'two'.")
    assert "(refused by Megatron): " in report["refused_launch"]["err"]
    assert "global_batch_size (3)" in report["refused_launch"]["err"]


def test_yaml_trains_like_the_same_flags_and_resolved_yaml_repeats_the_run(tmp_path: Path) -> None:
    by_flags = pretrain(*TINY_BY_FLAGS, *SHORT, *ONE_RANK, num_ranks=1)
    mine = tmp_path / "mine.yaml"
    mine.write_text(
        f"mock-data: true\ntrain-iters: 9\nlr-warmup-iters: 1\ntensorboard-dir: {tmp_path}/board\n"
    )
    files = ["--ampipe-config", "tiny", "quickstart", str(mine)]
    by_files = pretrain(*files, "--train-iters", "3", *SHORT_SEQUENCE, *ONE_RANK, num_ranks=1)
    record = tmp_path / "board" / "resolved.yaml"
    lines = record.read_text().splitlines()
    assert "train-iters: 3  # command line" in lines
    assert "num-layers: 4  # configs/models/tiny.yaml:3" in lines
    assert "# Added: --distributed-backend gloo (NCCL needs GPUs)" in lines
    repeated = pretrain("--ampipe-config", str(record), num_ranks=1)
    for run in (by_flags, by_files, repeated):
        assert run.exit_code == 0, run.output[-4000:]
        assert run.iterations == [1, 2, 3]
        assert run.lm_loss == by_flags.lm_loss
        assert run.load_balancing_loss == by_flags.load_balancing_loss
        assert run.grad_norm == by_flags.grad_norm
