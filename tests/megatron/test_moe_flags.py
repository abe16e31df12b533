"""What flags of Megatron's MoE layers do in chunks, and by what that is known.

Not listed are those that a case of ``tests/dist/cases.py`` sets, that ``launch.flags.SWITCHED_OFF`` has, or
that have a row in ``launch.refusals.REFUSALS``. ``SAME`` flags do what they do in Megatron's layers. Means:

- ``PATH: TEXT``: the file with this text tests it;
- ``becomes FLAG``: Megatron turns it into another flag;
- ``outside: WHY``: no stage depends on it;
- ``reading: WHY``: nothing here runs it. It needs a GPU.

``REFUSED`` are others that are refused.
"""

import argparse

import pytest

from megatron_ampipe.launch.flags import SWITCHED_OFF
from megatron_ampipe.launch.refusals import REFUSALS
from tests.dist.cases import PARITY
from tests.megatron.launcher import REPOSITORY

pytestmark = pytest.mark.ranks(1)

_FLAGS = {
    "tests/dist/blocks.py: num_moe_experts": "--num-experts",
    "tests/megatron/trainings.py: --moe-layer-freq": "--moe-layer-freq",
    "tests/dist/test_memory.py: moe_ffn_hidden_size": "--moe-ffn-hidden-size",
    "tests/dist/blocks.py: moe_enable_routing_replay": "--moe-enable-routing-replay",
    "tests/dist/blocks.py: moe_router_pre_softmax": "--moe-router-pre-softmax",
    "tests/megatron/test_training.py: --moe-router-force-load-balancing": "--moe-router-force-load-balancing",
    "tests/dist/test_random.py: moe_input_jitter_eps": "--moe-input-jitter-eps",
    "tests/dist/test_flex_budget.py: moe_expert_rank_capacity_factor": "--moe-expert-rank-capacity-factor",
    "becomes --moe-flex-dispatcher-backend": "--moe-enable-deepep",
    "becomes --recompute-modules": "--moe-layer-recompute",
    "outside: what Megatron does with a checkpoint": "--moe-use-upcycling --moe-upcycling-granularity",
    "outside: Megatron updates the bias after a step": "--moe-router-bias-update-rate",
    "outside: Megatron prints what routers have logged": "--moe-per-layer-logging",
    "outside: inference runs Megatron's layers": (
        "--moe-pad-experts-for-cuda-graph-inference --inference-moe-disable-fused-quant-kernels "
        "--inference-moe-token-dispatcher-type --rl-inference-expert-model-parallel-size "
        "--rl-inference-expert-tensor-model-parallel-size"
    ),
    "reading: modules that a stage calls read it": (
        "--use-transformer-engine-op-fuser --use-grouped-gemm-for-shared-expert "
        "--moe-shared-expert-glu-interleave-size --moe-router-quantile-balancing-ema --moe-grouped-gemm "
        "--moe-single-grouped-weight --moe-single-grouped-bias --moe-apply-probs-on-input "
        "--moe-mlp-glu-interleave-size"
    ),
    "reading: a number for the library of the flex dispatcher, which Megatron's own code gives to it": (
        "--moe-flex-dispatcher-num-sms --moe-deepep-num-sms --moe-hybridep-num-sms "
        "--moe-hybridep-num-blocks-permute --moe-hybridep-num-blocks-unpermute "
        "--moe-hybridep-num-sms-preprocessing"
    ),
    "reading: Megatron traces routers by hooks, which a block calls once (parity cases of replay)": (
        "--moe-routing-trace-path --moe-routing-trace-max-training-iters "
        "--moe-routing-trace-capture-logits --moe-routing-trace-capture-hidden-states "
        "--moe-routing-trace-dump-weights"
    ),
}
SAME = {flag: means for means, flags in _FLAGS.items() for flag in flags.split()}
REFUSED = {
    "--moe-hybridep-pad-uneven-dispatch-inputs": "--moe-token-dispatcher-type",
    "--moe-ncclep-static-shape": "--moe-flex-dispatcher-backend",
    "--moe-ncclep-zero-copy": "--moe-flex-dispatcher-backend",
    "--moe-paged-stash-page-size": "--moe-paged-stash",
    "--moe-paged-stash-buffer-size-factor-cuda": "--moe-paged-stash",
    "--moe-paged-stash-buffer-size-factor-cpu": "--moe-paged-stash",
}
"""Each with the flag whose row it is, or without which it does nothing."""


def moe_flags() -> set[str]:
    """Megatron's; the groups of its parser hold only a few of them."""
    from megatron.training.arguments import add_megatron_arguments

    groups = add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))._action_groups
    words = ("moe", "expert", "op-fuser")
    return {
        action.option_strings[0]
        for group in groups
        for action in group._group_actions
        if action.option_strings
        and ("moe" in str(group.title).lower() or any(word in action.option_strings[0] for word in words))
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
    assert not missing, f"say above what these do in chunks: {sorted(missing)}"


@pytest.mark.parametrize("flag", SAME)
def test_the_means_exist(flag: str) -> None:
    means, _, text = SAME[flag].partition(": ")
    if means.startswith("becomes "):
        other = means.removeprefix("becomes ")
        assert is_compared(other) or other == "--recompute-modules"
    elif means not in ("outside", "reading"):
        assert text in (REPOSITORY / means).read_text()
