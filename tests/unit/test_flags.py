"""AMPipe's own flags: that the names of settings are those of the flags, and to what they resolve."""

from __future__ import annotations

import argparse

import pytest

from megatron_ampipe.config import SETTING_NAMES, AMPipeConfig
from megatron_ampipe.errors import BadInput
from megatron_ampipe.launch import flags
from megatron_ampipe.schedule import Pipeline, parse_stack, stack_to_text


def parse(*words: str) -> AMPipeConfig:
    parser = flags.add_arguments(argparse.ArgumentParser(allow_abbrev=False))
    return flags.config_from_args(parser.parse_args(list(words)))


def test_settings_are_named_as_their_flags() -> None:
    parser = flags.add_arguments(argparse.ArgumentParser(add_help=False))
    (group,) = (group for group in parser._action_groups if group.title == "ampipe")
    named = [action.option_strings[0].removeprefix("--ampipe-") for action in group._group_actions]
    # The flag that names files cannot stand in one.
    assert sorted(named) == sorted([*SETTING_NAMES, "config"])


@pytest.mark.parametrize(
    ("words", "pipeline"),
    [
        ([], Pipeline(degree=1, backward_degree=1, stack=0)),
        (["--ampipe-degree", "4"], Pipeline(degree=4, backward_degree=4, stack=0)),
        (
            ["--ampipe-degree", "4", "--ampipe-backward-degree", "2"],
            Pipeline(degree=4, backward_degree=2, stack=0),
        ),
        (
            ["--ampipe-chunks", "0.75,0.25"],
            Pipeline(degree=2, backward_degree=2, shares=(0.75, 0.25), stack=0),
        ),
        (
            ["--ampipe-degree", "auto", "--ampipe-schedule", "moe-only"],
            Pipeline(degree=1, backward_degree=1, schedule="moe-only", stack=0),
        ),
        (["--ampipe-degree", "2", "--ampipe-stack", "all"], Pipeline(degree=2, backward_degree=2, stack=0)),
        (["--ampipe-degree", "2", "--ampipe-stack", "4"], Pipeline(degree=2, backward_degree=2, stack=4)),
        (["--ampipe-degree", "auto", "--ampipe-stack", "2"], Pipeline(degree=1, backward_degree=1, stack=2)),
    ],
)
def test_flags_resolve_to_one_pipeline(words: list[str], pipeline: Pipeline) -> None:
    config = parse(*words)
    assert config.pipeline == pipeline
    assert config.automatic == ("auto" in words)
    assert config.pipelined == bool(words)


@pytest.mark.parametrize("text", ["0", "-1", "2.5", "", "every", "ALL", "9" * 5000])
def test_a_stack_is_a_number_of_layers_or_all(text: str) -> None:
    with pytest.raises(BadInput, match=r"must be a whole number of layers, at least 1, or all\. Use"):
        parse("--ampipe-degree", "4", "--ampipe-stack", text)


@pytest.mark.parametrize("text", ["1", "7", "all"])
def test_a_stack_is_written_as_it_is_read(text: str) -> None:
    assert stack_to_text(parse_stack(text, flag="--ampipe-stack")) == text


def test_what_auto_chooses_cannot_be_given() -> None:
    for words, rule in (
        (["--ampipe-backward-degree", "2"], "--ampipe-backward-degree 2: is what --ampipe-degree auto"),
        (["--ampipe-chunks", "0.75,0.25"], r"--ampipe-chunks 0\.75,0\.25: is what --ampipe-degree auto"),
    ):
        with pytest.raises(BadInput, match=rule):
            parse("--ampipe-degree", "auto", *words)
