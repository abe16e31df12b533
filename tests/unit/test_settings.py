"""Settings from YAML files: order, sources, text values, writing them back. With a small parser, no torch."""

import argparse
import shlex
from pathlib import Path
from typing import get_args

import pytest

from megatron_ampipe.block.settings import SETTING, SHIPPED_SCHEDULES, ExchangeName, parse_iterations
from megatron_ampipe.errors import BadInput
from megatron_ampipe.files.inputs import config_names, find_config, load, shown
from megatron_ampipe.launch import config_files, flags
from megatron_ampipe.launch.config_files import resolve
from megatron_ampipe.schedule import SCHEDULE_NAMES, Exchange

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def parser() -> argparse.ArgumentParser:
    """A parser with a flag of every kind that Megatron has."""
    made = argparse.ArgumentParser(allow_abbrev=False)
    made.add_argument("--lr", type=float)
    made.add_argument("--swiglu", action="store_true")
    made.add_argument("--no-rope-fusion", action="store_false", dest="rope_fusion")
    made.add_argument("--partial", action=argparse.BooleanOptionalAction, default=False)
    made.add_argument("--onnx-safe", type=bool)
    made.add_argument("--save-interval", "--persistent-save-interval", type=int)
    made.add_argument("--data-path", nargs="*")
    made.add_argument("--rampup", nargs=3, type=int)
    for flag in ("--num-layers", "--pad-id"):
        made.add_argument(flag, type=int)
    for flag in ("--name", "--save", "--tensorboard-dir"):
        made.add_argument(flag)
    return flags.add_arguments(made)


def write(path: Path, text: str) -> str:
    path.write_text(text)
    return str(path)


def words_of(parser: argparse.ArgumentParser, tmp_path: Path, text: str, *own: str) -> list[str]:
    file = write(tmp_path / "a.yaml", text)
    return list(resolve(["--ampipe-config", file, *own], parser).words)


def test_later_files_win_and_the_command_line_wins_over_all(
    parser: argparse.ArgumentParser, tmp_path: Path
) -> None:
    model = write(tmp_path / "model.yaml", "num-layers: 2\nlr: 1e-4\nname: model\nampipe:\n  degree: 2\n")
    run = write(tmp_path / "run.yaml", "lr: 2e-4\nname: run\nampipe:\n  degree: 4\n")
    found = resolve(["--name", "mine", "--ampipe-config", model, run, "--ampipe-degree", "8"], parser)
    args = parser.parse_args(found.words)
    assert (args.num_layers, args.lr, args.name, args.ampipe_degree) == (2, 2e-4, "mine", 8)
    assert args.ampipe_config is None
    assert {setting.flag: setting.source for setting in found.settings} == {
        "--num-layers": f"{model}:1",
        "--lr": f"{run}:1",
        "--name": "command line",
        "--ampipe-degree": "command line",
    }


def test_a_switch_can_be_taken_back_and_a_value_undone(
    parser: argparse.ArgumentParser, tmp_path: Path
) -> None:
    on = write(tmp_path / "on.yaml", "swiglu: true\nno-rope-fusion: true\npartial: true\nlr: 3\n")
    off = write(tmp_path / "off.yaml", "swiglu: false\nno-rope-fusion: false\npartial: false\nlr: null\n")
    assert resolve(["--ampipe-config", on], parser).words == (
        ("--swiglu", "--no-rope-fusion", "--partial", "--lr", "3")
    )
    assert resolve(["--ampipe-config", on, off], parser).words == ("--no-partial",)
    last = resolve(["--ampipe-config", on, "--no-partial"], parser)
    assert last.words[-1] == "--no-partial" and "--partial" not in last.words
    assert last.settings[-1].flag == "--no-partial"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        *((f"name: {text}", ["--name", text]) for text in ("12:30", "2026-01-02", "yes", "010", "1e-4")),
        ('name: "true"', ["--name", "true"]),
        ("pad-id: -1", ["--pad-id=-1"]),
        ("onnx-safe: true", ["--onnx-safe", "true"]),
        ("onnx-safe: false", []),
        ("data-path: [0.3, a b, 0.7, c]", ["--data-path", "0.3", "a b", "0.7", "c"]),
        ("rampup:\n- 1\n- 2\n- 3", ["--rampup", "1", "2", "3"]),
    ],
)
def test_values_are_the_words_a_command_line_would_have(
    text: str, words: list[str], parser: argparse.ArgumentParser, tmp_path: Path
) -> None:
    assert words_of(parser, tmp_path, text) == words
    parser.parse_args(words)


def test_a_cluster_file_gives_its_flags_alone(parser: argparse.ArgumentParser, tmp_path: Path) -> None:
    cluster = "description: x\nranks_per_node: 8\nflags:\n  num-layers: 3\n  ampipe:\n    degree: 2\n"
    assert words_of(parser, tmp_path, cluster) == ["--num-layers", "3", "--ampipe-degree", "2"]
    for other in ("lr: 2", "ampipe:\n  degree: 2"):
        with pytest.raises(BadInput, match="stands outside the section 'flags:', and would not be read"):
            words_of(parser, tmp_path, f"flags:\n  num-layers: 3\n{other}\n")


def test_yaml_goes_back_to_the_same_command_line(parser: argparse.ArgumentParser, tmp_path: Path) -> None:
    words = [
        *("--lr", "1e-4", "--swiglu", "--no-rope-fusion", "--no-partial", "--onnx-safe", "yes"),
        *("--persistent-save-interval", "7", "--data-path", "0.5", "true", "null", "a # b", "--rampup"),
        *("1", "2", "3", "--name", "two\nlines: 'x'", "--pad-id", "-1", "--ampipe-degree", "4"),
        *("--ampipe-trace-dir=é: [x", "--num-layers=12"),
    ]
    found = resolve(words, parser)
    text = config_files.as_yaml(found, notes=["first note"])
    assert text.startswith("# first note\n")
    assert len(text.splitlines()) == 1 + len(found.settings) + len(["ampipe:"]), "a setting on a line"
    again = resolve(["--ampipe-config", write(tmp_path / "resolved.yaml", text)], parser)
    assert parser.parse_args(again.words) == parser.parse_args(words)
    assert config_files.as_yaml(again).partition("  #")[0] == config_files.as_yaml(found).partition("  #")[0]
    shell = config_files.as_command(found)
    assert parser.parse_args(shlex.split(shell.replace("\\\n", " "))) == parser.parse_args(words)


def test_the_record_is_in_the_folder_of_the_logs(parser: argparse.ArgumentParser, tmp_path: Path) -> None:
    def record(*words: str) -> Path | None:
        return config_files.write_record(resolve(words, parser), adjustments=[], script=None)

    board, save, trace = (str(tmp_path / name) for name in ("board", "deep/save", "trace"))
    for words in (
        ["--ampipe-trace-dir", trace],
        ["--save", save, "--ampipe-trace-dir", trace],
        ["--tensorboard-dir", board, "--save", save],
    ):
        path = record(*words, "--lr", "2")
        assert path == Path(words[1]) / "resolved.yaml"
        assert parser.parse_args(resolve(["--ampipe-config", str(path)], parser).words).lr == 2
        assert [file.name for file in path.parent.iterdir()] == ["resolved.yaml"]
    assert record("--lr", "2") is None and record("--save", "msc://bucket/run") is None
    write(tmp_path / "file", "")
    with pytest.raises(BadInput, match=r"--save .*/file: .*/file cannot be written to"):
        record("--save", str(tmp_path / "file"))


def test_names_are_found_files_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def find(text: str) -> Path:
        return find_config(text, folders=["models"], flag="--x", what="model")

    monkeypatch.chdir(tmp_path)
    assert find("tiny") == ROOT / "configs/models/tiny.yaml"
    assert shown(find("tiny")) == "configs/models/tiny.yaml"
    write(tmp_path / "tiny", "")
    assert find("tiny") == Path("tiny")
    with pytest.raises(BadInput, match=r"--x mixtral-8x7: is neither a file .*mean mixtral-8x7b\?"):
        find("mixtral-8x7")


@pytest.mark.parametrize("name", config_names("models", "runs"))
def test_our_files_mean_the_same_with_and_without_types(name: str) -> None:
    """The planner reads models with YAML's types, a launch as text: values such as 1e-4 could differ."""
    path = config_names("models", "runs")[name]
    typed = load(path, what="x", remedy="x")
    text = load(path, what="x", remedy="x", scalars_as_text=True)
    for key, value in text.items():
        if path.parent.name == "models" and isinstance(value, str) and value[0].isdigit():
            assert float(value) == typed[key]


def test_a_plan_of_the_command_line_replaces_what_files_say_of_it(
    parser: argparse.ArgumentParser, tmp_path: Path
) -> None:
    """Shipped run files name a degree."""
    file = write(tmp_path / "a.yaml", "lr: 1\nampipe:\n  degree: 4\n  stack: 1\n  trace-dir: t\n")
    found = resolve(["--ampipe-config", file, "--ampipe-plan", "p.yaml"], parser)
    assert found.words == ("--lr", "1", "--ampipe-trace-dir", "t", "--ampipe-plan", "p.yaml")
    assert "degree" not in config_files.as_yaml(found)
    # Of one place, neither is meant more than the other.
    own = ["--ampipe-plan", "p.yaml", "--ampipe-degree", "4"]
    assert resolve(own, parser).words == tuple(own)


def test_the_names_of_exchanges_are_those_that_schedules_know() -> None:
    """The flag, which no schedule may be imported for, and the format of plan files have them from here."""
    assert get_args(ExchangeName) == tuple(exchange.value for exchange in Exchange)


@pytest.mark.parametrize("text", ["50", "50-41", "0-9", "1-101", "a-b", "1-2-3", "41 - 50", "-1-5"])
def test_iterations_that_are_no_range_are_refused(text: str) -> None:
    assert parse_iterations("41-50") == (41, 50) and parse_iterations("7-7") == (7, 7)
    with pytest.raises(BadInput, match=r"--ampipe-measure .*at most 100 iterations.*--ampipe-measure 41-50"):
        parse_iterations(text)


def test_the_flag_offers_every_named_schedule() -> None:
    assert SHIPPED_SCHEDULES == SCHEDULE_NAMES
    for name in SCHEDULE_NAMES:
        assert f"`{name}`" in SETTING["schedule"].help
