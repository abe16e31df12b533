"""Values that are never valid are refused when they are parsed, with their flag."""

from __future__ import annotations

import argparse
from typing import Any

import pytest

from megatron_ampipe.errors import BadInput
from megatron_ampipe.launch.flag_values import check_required, refuse_values


def refusal(**given: Any) -> str:
    with pytest.raises(BadInput) as refused:
        refuse_values(argparse.Namespace(**given))
    return str(refused.value)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"train_iters": -5}, "--train-iters -5: must be at least 1. Use 1 or more, or leave it out."),
        ({"lr": float("nan")}, "--lr nan: must be at least 0."),
        ({"lr": float("inf")}, "--lr inf: must be at least 0."),
        ({"hidden_dropout": 1.5}, "--hidden-dropout 1.5: must be between 0 and 1. Use for example 0.1."),
        (
            {"load": ""},
            "--load (empty): is empty, so that a run would start from the beginning. Name a",
        ),
        ({"save": "runs", "save_interval": None}, "--save-interval (not given): with --save, "),
        ({"wandb_project": "mine", "save": None}, "--wandb-project mine: Weights & Biases keeps its files"),
        (
            {"wandb_project": "mine", "save": "runs", "save_interval": 1, "wandb_exp_name": ""},
            "--wandb-exp-name",
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


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            {"train_iters": None},
            "--train-iters (not given): training needs it. Give it, for example",
        ),
        ({"lr": None}, "--lr (not given): training needs it. Give it, for example --lr 0.0001."),
        (
            {"lr_warmup_iters": 20},
            "--lr-warmup-iters 20: is not less than the 10 iterations over which the learning rate changes.",
        ),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, dict) else None,
)
def test_what_training_needs_is_required(given: dict[str, Any], message: str) -> None:
    args = {"train_iters": 10, "train_samples": None, "eval_interval": 1, "lr": 0.1, "lr_decay_iters": None}
    args |= {"skip_train": False, "lr_warmup_fraction": None, "lr_warmup_iters": 1}
    check_required(argparse.Namespace(**args))
    with pytest.raises(BadInput) as refused:
        check_required(argparse.Namespace(**args | given))
    assert str(refused.value).startswith(message)
    check_required(argparse.Namespace(**args | given | {"skip_train": True}))
