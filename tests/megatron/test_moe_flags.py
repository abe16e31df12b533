"""``tests/moe_flags.py`` names every flag of MoE layers that no parity case sets, and what it says is so."""

import argparse

import pytest

from megatron_ampipe.launch.flags import SWITCHED_OFF
from megatron_ampipe.launch.refusals import REFUSALS
from tests.dist.cases import PARITY
from tests.megatron.launcher import REPOSITORY
from tests.moe_flags import REFUSED, SAME

pytestmark = pytest.mark.ranks(1)


def moe_flags() -> dict[str, argparse.Action]:
    """By name; the groups of Megatron's parser hold only a few of them."""
    from megatron.training.arguments import add_megatron_arguments

    parser = add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))
    return {
        action.option_strings[0]: action
        for group in parser._action_groups
        for action in group._group_actions
        if action.option_strings
        and (
            "moe" in (group.title or "").lower()
            or any(word in action.option_strings[0] for word in ("moe", "expert", "op-fuser"))
        )
    }


def is_compared(flag: str) -> bool:
    """Whether a parity case sets it, by the name of its field."""
    field = flag.removeprefix("--").replace("-", "_")
    return any(field in case.model or field in case.parallel for case in PARITY)


def test_every_flag_is_compared_switched_off_refused_or_listed() -> None:
    rows = {row.setting for row in REFUSALS}
    assert not SAME.keys() & {*SWITCHED_OFF, *REFUSED}
    assert set(REFUSED.values()) <= rows
    known = {*SAME, *SWITCHED_OFF, *rows, *REFUSED}
    missing = {flag for flag in moe_flags() if flag not in known and not is_compared(flag)}
    assert not missing, f"say in tests/moe_flags.py what these do in chunks: {sorted(missing)}"


@pytest.mark.parametrize("flag", SAME)
def test_the_means_exist(flag: str) -> None:
    means, _, text = SAME[flag].partition(": ")
    if means.startswith("becomes "):
        other = means.removeprefix("becomes ")
        assert is_compared(other) or other == "--recompute-modules"
    elif means not in ("outside", "reading"):
        assert text in (REPOSITORY / means).read_text()
    else:
        assert text
