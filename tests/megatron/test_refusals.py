"""Every row of ``refusals.REFUSALS``, with Megatron's parser; one of them in a launch."""

from __future__ import annotations

import argparse
import itertools

import pytest

from megatron_ampipe.errors import BadInput
from megatron_ampipe.launch import ending, flags
from megatron_ampipe.launch.refusals import REFUSALS, Refusal, refuse_unsupported
from megatron_ampipe.schedule import Pipeline
from megatron_ampipe.schedule.pipeline import AMPipeConfig
from tests.megatron.launcher import launch
from tests.megatron.refusal_flags import ACCEPTED, ALONE, COMPANIONS, VALUES


@pytest.fixture(scope="module")
def parser() -> argparse.ArgumentParser:
    """Megatron's, with the flags of AMPipe."""
    from megatron.core.extensions import kitchen
    from megatron.training.arguments import add_megatron_arguments

    # Megatron has the flags of this library only if it is installed; it is internal to NVIDIA.
    kitchen.HAVE_KITCHEN = True
    made: argparse.ArgumentParser = add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))
    ending.report_parser_errors(made)
    flags.add_arguments(made)
    return made


def values_of(action: argparse.Action) -> list[list[str]]:
    """Values of a flag that its row should refuse."""
    if action.nargs == 0:
        return [[]]
    choices = [[str(choice)] for choice in action.choices or () if choice != action.default]
    return choices or [["2"]]


@pytest.mark.ranks(1)
@pytest.mark.parametrize("row", REFUSALS, ids=lambda row: row.setting.strip("-"))
def test_a_row_applies_to_the_parsed_value_of_its_flag(row: Refusal, parser: argparse.ArgumentParser) -> None:
    actions = {flag: action for action in parser._actions for flag in action.option_strings}
    alone = ALONE.get(row.setting)
    tried = VALUES.get(row.setting) or values_of(actions[row.setting])
    for values in [[]] if alone is not None else tried:
        words = (
            alone
            if alone is not None
            else [*ACCEPTED, row.setting, *values, *COMPANIONS.get(row.setting, [])]
        )
        with pytest.raises(BadInput) as refused:
            refuse_unsupported(AMPipeConfig(pipeline=Pipeline.of(4)), parser.parse_args(words))
        error = refused.value
        assert error.name == row.setting
        assert error.exit_code == 2
        rule = f"with --ampipe-degree 4, {row.rule}"
        assert str(error) == str(BadInput(row.setting, error.value, rule=rule, remedy=row.remedy))
        given = list(itertools.takewhile(lambda word: not word.startswith("--"), values))
        assert not given or any(word.split(",")[0] in str(error.value) for word in given)


def test_rows_have_the_right_form_and_none_applies_twice_or_at_degree_1() -> None:
    settings = [row.setting for row in REFUSALS]
    assert len(settings) == len(set(settings))
    refuse_unsupported(AMPipeConfig(), argparse.Namespace(seq_length=64, window_size=(8, 0)))
    for row in REFUSALS:
        assert not row.rule.endswith(".")
        assert row.remedy.endswith(".") and not row.remedy.endswith("..")
        assert "--" in row.remedy or "Leave it out" in row.remedy or "Use " in row.remedy


def test_under_torchrun_the_message_is_printed_once() -> None:
    run = launch(*ACCEPTED, "--mlp-chunks-for-training", "2")
    expected = "--mlp-chunks-for-training 2: with --ampipe-degree 4, "
    # Not Run.error: both ranks write to one stream, and their lines can be interleaved.
    shown = f"traceback : error: {expected}"
    assert run.output.count(expected) - run.output.count(shown) == 1, run.output[-4000:]
    assert run.output.count("exitcode  : 2") == 2, "both ranks"
    # torchrun's last block contains the error of both ranks.
    assert run.output.count(shown) == 2
    assert run.output.count("Traceback (most recent call last)") == 1, "only torchrun's own"
    assert "initializing torch distributed" not in run.output
