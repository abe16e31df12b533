"""The arguments that start-up changes for pipelined blocks on a GPU; launches test the others."""

import argparse
from typing import Any

import pytest

pytest.importorskip("torch")

from megatron_ampipe.launch.attach import (
    _drop_attention_mask,
    _prioritize_exchanges,
    _unfuse_rotary,
)


def test_exchanges_run_at_high_priority_and_nothing_is_taken_away() -> None:
    groups = ["dp_cp", "ep"]
    args = argparse.Namespace(
        high_priority_stream_groups=groups,
        context_parallel_size=1,
        moe_token_dispatcher_type="alltoall",
        expert_model_parallel_size=2,
        expert_tensor_parallel_size=1,
    )
    row = _prioritize_exchanges(args)
    assert row is not None
    assert args.high_priority_stream_groups is groups
    assert groups == ["dp_cp", "ep", "tp_ep_mp"]
    assert row.flag == "--high-priority-stream-groups"
    assert row.value == "dp_cp ep tp_ep_mp"
    assert _prioritize_exchanges(args) is None
    args.context_parallel_size, args.attention_dropout, args.window_size = 2, 0.0, None
    _prioritize_exchanges(args)
    assert groups == ["dp_cp", "ep", "tp_ep_mp", "cp"], "a ring"
    args.expert_tensor_parallel_size = 2
    _prioritize_exchanges(args)
    assert groups == ["dp_cp", "ep", "tp_ep_mp", "cp", "ep_tp"], "ranks that share an expert"


@pytest.mark.parametrize(
    ("changed", "reads"),
    [
        ({}, True),
        ({"window_size": (8, 0), "window_attn_skip_freq": 2}, True),
        ({"window_size": (8, 0)}, False),
        ({"transformer_impl": "transformer_engine"}, False),
        ({"multi_latent_attention": True}, False),
        ({"context_parallel_size": 2}, False),
    ],
    ids=str,
)
def test_a_mask_that_no_stock_layer_reads_is_not_built(changed: dict[str, Any], reads: bool) -> None:
    args = argparse.Namespace(
        create_attention_mask_in_dataloader=True,
        reset_attention_mask=True,
        transformer_impl="local",
        multi_latent_attention=False,
        context_parallel_size=1,
        window_size=None,
        window_attn_skip_freq=None,
    )
    vars(args).update(changed)
    row = _drop_attention_mask(args)
    assert args.create_attention_mask_in_dataloader is reads
    assert row is None if reads else "in a stock run neither" in row.reason


def test_latent_attention_of_several_packed_sequences_is_rotated_without_its_fused_kernel() -> None:
    def adjusted(**changed: Any) -> bool:
        args = argparse.Namespace(
            sft=True, micro_batch_size=2, multi_latent_attention=True, apply_rope_fusion=True
        )
        vars(args).update(changed)
        before = args.apply_rope_fusion
        changed_it = _unfuse_rotary(args) is not None
        assert changed_it is (before and not args.apply_rope_fusion)
        return changed_it

    assert adjusted()
    assert adjusted(sft=False, dataloader_inter_document_masking=True)
    for one in ({"sft": False}, {"micro_batch_size": 1}, {"multi_latent_attention": False}):
        assert not adjusted(**one)
    assert not adjusted(apply_rope_fusion=False)
