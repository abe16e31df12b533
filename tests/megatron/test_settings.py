"""Checks configuration files with Megatron's parser and validation, and trains from them."""

import argparse
import contextlib
import fnmatch
import logging
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from megatron_ampipe import cli
from megatron_ampipe.files.inputs import config_names
from megatron_ampipe.launch import config_files, flags
from megatron_ampipe.launch import pretrain as pretrain_launch
from megatron_ampipe.launch.run import Run
from megatron_ampipe.plan.plan_file import Plan
from megatron_ampipe.schedule import BlockFeatures, Exchange, Pipeline, build
from tests.forked import completed
from tests.megatron.launcher import pretrain
from tests.megatron.test_plan_recipe import RECIPE
from tests.unit.test_docs import help_examples

pytestmark = pytest.mark.timeout(900)

LAUNCHES = {
    "tiny": ("quickstart", 2, ["--train-iters", "30"]),
    "gpt-moe-base": ("one-node", 8, []),
    "gpt-moe-medium": ("one-node", 8, []),
    "gpt-moe-large": ("one-node", 8, []),
    "gpt-moe-xl": ("one-node", 8, []),
    "mixtral-8x7b": ("one-node", 8, []),
    "mixtral-8x22b": ("one-node", 8, []),
    "deepseek-v2-lite": ("one-node", 8, []),
    "deepseek-v3-like": ("one-node", 64, []),
    "qwen3-30b-a3b-like": ("many-nodes", 64, []),
}
"""For every model: a run for it, the number of ranks, and further words."""


def every_flag(parser: argparse.ArgumentParser) -> list[str]:
    """A command line with all flags of the parser that set a value, each with a valid value."""
    words: list[str] = []
    for action in parser._actions:
        flag = action.option_strings[-1]
        if flag not in ("--help", config_files.CONFIG_FLAG):
            words.append(flag)
            if action.nargs != 0:
                several = {None: 1, "+": 2, "*": 2}.get(action.nargs, action.nargs)
                words += [accepted_value(action)] * several
    return words


def accepted_value(action: argparse.Action) -> str:
    """A valid value of the flag, as text."""
    choices = [getattr(choice, "name", str(choice)) for choice in action.choices or ()]
    for text in (*choices[-1:], "3", "0.5", "attn", "some text: # 1"):
        with contextlib.suppress(Exception):
            value = (action.type or str)(text)
            if action.choices is None or value in action.choices:
                return text
    raise AssertionError(f"no value for {action.option_strings}")


@pytest.fixture(scope="module")
def parser() -> argparse.ArgumentParser:
    return flags.full_parser()


def changed(words: Sequence[str], parser: argparse.ArgumentParser, folder: Path) -> list[list[str]]:
    """Flags whose values change in a round trip through resolved.yaml."""
    resolved = config_files.resolve(words, parser)
    path = folder / "resolved.yaml"
    path.write_text(config_files.as_yaml(resolved))
    again = config_files.resolve(["--ampipe-config", str(path)], parser)
    before, after = vars(parser.parse_args(resolved.words)), vars(parser.parse_args(again.words))
    return [[name, str(before[name]), str(after[name])] for name in before if before[name] != after[name]]


@pytest.mark.ranks(1)
@pytest.mark.parametrize("model", LAUNCHES)
def test_built_in_models_and_runs_pass_megatrons_checks(
    model: str, parser: argparse.ArgumentParser, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, ranks, words = LAUNCHES[model]
    common = ["--ampipe-config", model, run, "--tokenizer-type", "NullTokenizer", "--mock-data", *words]
    assert cli.main(["config", "--ranks", str(ranks), *common]) == 0, capsys.readouterr().err
    assert changed(["--ampipe-config", model], parser, tmp_path) == []


TINY = ["--ampipe-config", "tiny", "quickstart", "--mock-data", "--train-iters", "30"]


@pytest.mark.ranks(1)
@pytest.mark.parametrize(
    ("words", "decided"),
    [
        ("", ["degree: 1: Megatron's own layers (default)"]),
        (
            "--ampipe-degree 2 --ampipe-schedule moe-only",
            [
                "degree: 2 (--ampipe-degree)",
                "schedule: moe-only (--ampipe-schedule)",
                "exchange: rows (default)",
            ],
        ),
        ("--ampipe-chunks 0.75,0.25", ["degree: 2 (--ampipe-chunks)", "exchange: rows (default)"]),
        (
            "--ampipe-degree auto --ampipe-exchange auto --ranks 2",
            [
                "degree: auto: the first iterations try 1, 2, 4, 8, 16, the fastest stays",
                "exchange: rows or ranks (the first iterations)",
                "layers per schedule: all (default)",
            ],
        ),
        (
            "--ampipe-degree 2 --ranks 2",
            [
                "chunk boundaries: 0 1024 2048 of the 2048 rows of a rank (default)",
                "degree: 2 (--ampipe-degree)",
            ],
        ),
        (
            "--ampipe-config mixtral-8x7b one-node --tokenizer-type NullTokenizer --mock-data --ranks 8 "
            "--ampipe-degree auto --ampipe-cluster a800x8-20gbps",
            ["degree: * (the planner)", "why: planned from a800x8-20gbps: *"],
        ),
        ("--ampipe-plan {plan}", ["degree: 2 (the plan)", "exchange: ranks (the plan)"]),
    ],
)
def test_config_prints_the_run_and_what_decides_it(
    words: str, decided: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    order = build("ampipe", degree=2, features=BlockFeatures(chunked_qkv=True))
    pipeline = Pipeline.of(2, order=order, shares=(0.5, 0.5), exchange=Exchange.RANKS)
    Plan(pipeline=pipeline, reason="a test").write(tmp_path / "plan.yaml", head="a test")
    flags_of_case = shlex.split(words.format(plan=tmp_path / "plan.yaml"))
    model = [] if "--ampipe-config" in flags_of_case else TINY
    code, shown = cli.main(["config", *model, *flags_of_case]), capsys.readouterr()
    assert code == 0, shown.err
    lines = [line.removeprefix("#   ") for line in shown.out.splitlines()]
    for pattern in decided:
        assert fnmatch.filter(lines, pattern), shown.out


def test_every_built_in_model_and_run_is_checked() -> None:
    assert LAUNCHES.keys() == config_names("models").keys()
    assert {run for run, _, _ in LAUNCHES.values()} == config_names("runs").keys()


@pytest.mark.ranks(1)
def test_every_flag_of_megatron_can_be_set_in_a_file(parser: argparse.ArgumentParser, tmp_path: Path) -> None:
    words = every_flag(parser)
    assert len(words) > 1000
    assert changed(words, parser, tmp_path) == []


@pytest.mark.ranks(1)
def test_every_example_of_config_does_what_it_shows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With a user's file if the example has one."""
    (tmp_path / "my").mkdir()
    (tmp_path / "my" / "run.yaml").write_text("mock-data: true\ntrain-iters: 100\n")
    examples = help_examples("config")
    assert len(examples) == 5
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bf16_32GPU_TP1PP1EP8.yaml").write_text(RECIPE)
    for words in examples:
        code, shown = cli.main(words), capsys.readouterr()
        assert code == 0, f"ampipe {words}\n{shown.err}"
        assert "num-layers" in shown.out


@pytest.mark.ranks(1)
def test_what_libraries_log_does_not_stand_above_the_answer(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Importing Megatron's training lets every library log for information."""
    written: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: written.append(record.getMessage())  # type: ignore[method-assign]
    monkeypatch.setattr(logging.root, "handlers", [handler])
    monkeypatch.setattr(logging.root, "level", logging.INFO)

    def check(words: Sequence[str]) -> Run:
        logging.getLogger("megatron.core").info("something")
        logging.getLogger("megatron.core").warning("important")
        return Run()

    monkeypatch.setattr(pretrain_launch, "check_launch", check)
    assert cli.main(["config", "--ranks", "2", "--ampipe-config", "tiny"]) == 0
    assert written == ["important"]
    logging.getLogger("megatron.core").info("after it")
    assert written[1:] == ["after it"]


def test_yaml_trains_like_the_same_flags_and_resolved_yaml_repeats_the_run(tmp_path: Path) -> None:
    """The flags are those that ``ampipe config --format command`` prints."""
    mine = tmp_path / "mine.yaml"
    mine.write_text(
        f"mock-data: true\ntrain-iters: 9\nlr-warmup-iters: 1\ntensorboard-dir: {tmp_path}/board\n"
    )
    short = shlex.split("--train-iters 3 --seq-length 512 --expert-model-parallel-size 1")
    files = ["--ampipe-config", "tiny", "quickstart", str(mine), *short]
    config = (sys.executable, "-m", "megatron_ampipe.cli", "config", "--format", "command")
    words = shlex.split(completed(*config, *files).stdout.replace("\\\n", " "))
    assert words[:2] == ["--num-layers", "4"] and words.count("--train-iters") == 1
    by_flags, by_files = (pretrain(*run, num_ranks=1) for run in (words, files))
    record = tmp_path / "board" / "resolved.yaml"
    lines = record.read_text().splitlines()
    assert "train-iters: 3  # command line" in lines
    assert "num-layers: 4  # configs/models/tiny.yaml:3" in lines
    assert "# Added: --distributed-backend gloo (NCCL needs GPUs)" in lines
    repeated = pretrain("--ampipe-config", str(record), num_ranks=1)
    for run in (by_flags, by_files, repeated):
        assert run.exit_code == 0, run.output[-4000:]
        assert run.iterations == [1, 2, 3]
        assert run.logged == by_flags.logged
