"""Values that are never valid are refused when they are parsed, with their flag."""

from __future__ import annotations

import argparse
from collections import Counter
from typing import Any

import pytest

from megatron_ampipe.errors import BadInput
from megatron_ampipe.flag_values import CONFLICTS, RANGES, refuse_values


def refusal(**given: Any) -> str:
    with pytest.raises(BadInput) as refused:
        refuse_values(argparse.Namespace(**given))
    return str(refused.value)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            {"train_iters": -5},
            "--train-iters -5: must be at least 1. Use for example 1000; to evaluate alone,",
        ),
        ({"train_iters": 0}, "--train-iters 0: must be at least 1."),
        ({"seq_length": 0}, "--seq-length 0: must be at least 1."),
        ({"num_layers": 0}, "--num-layers 0: must be at least 1."),
        ({"moe_router_topk": 0}, "--moe-router-topk 0: must be at least 1."),
        ({"lr": float("nan")}, "--lr nan: must be a number."),
        ({"lr": float("inf")}, "--lr inf: must be a number."),
        ({"hidden_dropout": 1.5}, "--hidden-dropout 1.5: must be between 0 and 1."),
        ({"save": "runs", "save_interval": None}, "--save-interval (not given): with --save, "),
        ({"wandb_project": "mine", "save": None}, "--wandb-project mine: Weights & Biases keeps its files"),
        (
            {"wandb_project": "mine", "save": "runs", "save_interval": 1, "wandb_exp_name": ""},
            "--wandb-exp-name",
        ),
        (
            {"hidden_size": 64, "num_attention_heads": 7},
            "--num-attention-heads 7 with --hidden-size 64: does not divide it",
        ),
        (
            {"seq_length": 64, "max_position_embeddings": 32},
            "--max-position-embeddings 32 with --seq-length 64: is less than",
        ),
        (
            {"cp_comm_type": ["p2p", "ring"], "context_parallel_size": 2},
            "--cp-comm-type ring: there is no such exchange of keys and values. Use one of: p2p, all_gather,",
        ),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, dict) else None,
)
def test_a_wrong_value_is_named(given: dict[str, Any], message: str) -> None:
    assert refusal(**given).startswith(message)


@pytest.mark.parametrize(
    "given",
    [
        {"train_iters": None, "train_samples": 5},
        {"num_experts": 0},
        {"eval_iters": 0, "lr_warmup_iters": 0, "clip_grad": 0.0},
        {"hidden_size": 64, "num_attention_heads": 7, "kv_channels": 16},
        {"save": "runs", "save_interval": 5, "wandb_project": "mine", "wandb_exp_name": "first"},
        {"seq_length": "a script's own", "num_layers": True},
    ],
    ids=lambda value: " ".join(value),
)
def test_what_a_run_can_have_passes(given: dict[str, Any]) -> None:
    refuse_values(argparse.Namespace(**given))


def test_tables_hold_each_flag_once_and_read_as_sentences() -> None:
    flags = Counter(flag for one in RANGES for flag in one.flags)
    assert max(flags.values()) == 1
    for row in (*RANGES, *CONFLICTS):
        assert row.remedy.endswith(".") and not row.rule.endswith(".")
