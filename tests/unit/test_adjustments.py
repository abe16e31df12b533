"""The arguments that start-up changes for pipelined blocks on a GPU; launches test the others."""

import argparse

import pytest

pytest.importorskip("torch")

from megatron_ampipe.launch.adjustments import EXCHANGE_GROUPS, _let_exchanges_go_first


def test_exchanges_run_at_high_priority_and_nothing_is_taken_away() -> None:
    groups = ["dp_cp", "ep"]
    args = argparse.Namespace(high_priority_stream_groups=groups)
    (row,) = _let_exchanges_go_first(args)
    assert args.high_priority_stream_groups is groups
    assert groups == ["dp_cp", "ep", "tp_ep_mp"]
    assert row.flag == "--high-priority-stream-groups"
    assert row.value == "dp_cp ep tp_ep_mp"
    assert _let_exchanges_go_first(args) == []
    assert set(EXCHANGE_GROUPS) <= set(groups)
