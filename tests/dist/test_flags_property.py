"""Random command lines of GPT pretraining: each is refused with a proper message, or trains like stock.

There is no third outcome: no traceback, no silent difference. Every command line passes through the checks of
the launch; if it is accepted, a stock and an AMPipe model train for one step on two gloo ranks.
"""

import functools
import random
import shlex
import zlib
from pathlib import Path
from typing import Any

import pytest
import torch

import megatron_ampipe
from megatron_ampipe.errors import BadInput
from megatron_ampipe.launch.ending import known_cause

pytestmark = pytest.mark.ranks(2)
NUM_LINES = 60
SOURCES = sorted(Path(megatron_ampipe.__file__).parent.rglob("*.py"))
"""The lines are those of a version of the package."""
BASE = shlex.split(
    "--hidden-size 64 --num-attention-heads 4 --seq-length 32 --max-position-embeddings 32 "
    "--micro-batch-size 2 --global-batch-size 4 --train-iters 4 --lr 1e-3 --eval-iters 0 --eval-interval 100 "
    "--tokenizer-type NullTokenizer --vocab-size 255 --mock-data --attention-dropout 0 --hidden-dropout 0 "
    "--num-experts 4 --disable-bias-linear"
)

TENSOR = "--tensor-model-parallel-size 2 --sequence-parallel"
LAYOUTS = (
    "",
    "--expert-model-parallel-size 2",
    TENSOR,
    f"{TENSOR} --expert-tensor-parallel-size 1",
    f"{TENSOR} --expert-tensor-parallel-size 1 --expert-model-parallel-size 2",
    "--context-parallel-size 2 --cp-comm-type p2p",
    "--pipeline-model-parallel-size 2",
    "--num-layers 4 --pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1",
)
FEATURES = (
    (
        "--group-query-attention --num-query-groups 2",
        "--kv-channels 8",
        "--qk-layernorm",
        "--qk-l2-norm",
        "--add-qkv-bias",
        "--window-size 8,0",
        "--window-size 8,0 --window-attn-skip-freq 2",
        "--softmax-type learnable",
        "--softmax-type off-by-one --window-size 8,0",
    ),
    (
        "--position-embedding-type rope",
        "--position-embedding-type rope --rotary-percent 0.5 --rotary-interleaved",
        "--position-embedding-type rope --no-rope-freq 2",
        "--position-embedding-type rope --use-rope-scaling",
        "--position-embedding-type yarn --yarn-original-max-position-embeddings 16 --rotary-scaling-factor 4",
        "--position-embedding-type none",
        "--position-embedding-type rope --mtp-num-layers 1",
        "--multi-latent-attention --position-embedding-type rope --qk-head-dim 16 --qk-pos-emb-head-dim 8 "
        "--v-head-dim 16 --kv-lora-rank 16 --q-lora-rank 16",
    ),
    (
        "--moe-router-topk 1 --moe-router-pre-softmax",
        "--moe-router-topk 3",
        "--moe-router-topk 4 --moe-router-num-groups 2 --moe-router-group-topk 2",
        "--moe-router-num-groups 2 --moe-router-group-topk 1",
        "--moe-router-score-function sigmoid --moe-router-enable-expert-bias",
        "--moe-router-score-function sqrtsoftplus --moe-router-topk-scaling-factor 2.5",
        "--moe-router-dtype fp64",
        "--num-experts 8 --moe-router-topk 3 --moe-router-pre-softmax",
        "--num-experts 2 --moe-router-topk 1 --moe-router-pre-softmax --moe-router-score-function sigmoid",
    ),
    (
        "--micro-batch-size 1 --global-batch-size 2",
        "--seq-length 27 --max-position-embeddings 27 --micro-batch-size 3 --global-batch-size 6",
        "--seq-length 44 --max-position-embeddings 44",
    ),
    (
        "--moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 0.1",
        "--moe-router-load-balancing-type seq_aux_loss --moe-aux-loss-coeff 0.1",
        "--moe-router-load-balancing-type global_aux_loss --moe-aux-loss-coeff 0.1",
        "--moe-router-load-balancing-type aux_loss seq_aux_loss --moe-aux-loss-coeff 0.1 0.2",
        "--moe-router-load-balancing-type none --moe-z-loss-coeff 0.1",
    ),
    ("--moe-token-dispatcher-type alltoall", "--moe-token-dispatcher-type allgather"),
    (
        "--moe-expert-capacity-factor 0.8 --moe-token-drop-policy position",
        "--moe-expert-capacity-factor 0.8 --moe-token-drop-policy position "
        "--moe-pad-expert-input-to-capacity",
        # Large enough for every token: neither a chunk nor the whole sequence drops any.
        "--moe-expert-capacity-factor 4 --ampipe-capacity-scope chunk",
    ),
    (
        "--moe-shared-expert-intermediate-size 48",
        "--moe-shared-expert-intermediate-size 48 --moe-shared-expert-gate",
    ),
    (
        "--swiglu",
        "--moe-latent-size 16",
        "--squared-relu",
        "--moe-ffn-hidden-size 48",
        "--normalization RMSNorm",
    ),
    (
        "--recompute-activations",
        "--recompute-granularity selective --recompute-modules core_attn moe",
        "--recompute-granularity selective --recompute-modules shared_experts",
        "--recompute-granularity selective --recompute-modules mla_up_proj",
        "--recompute-granularity selective --recompute-modules layernorm mlp",
        "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
        "--recompute-granularity full --recompute-method block --recompute-num-layers 1",
    ),
    (
        "--untie-embeddings-and-output-weights",
        "--moe-layer-freq 2",
        "--calculate-per-token-loss",
        "--apply-query-key-layer-scaling",
        "--use-distributed-optimizer --overlap-grad-reduce",
        "--use-cpu-initialization",
    ),
)
"""Groups of settings; at most one of each group is drawn. Some cannot be combined."""

OWN = (
    *("--ampipe-schedule moe-only", "--ampipe-schedule sequential"),
    *("--ampipe-schedule lancet", "--ampipe-schedule joined"),
    *("--ampipe-stack 1", "--ampipe-stack 3", "--ampipe-chunks 0.4,0.6"),
    *("--ampipe-backward-degree 1", "--ampipe-backward-degree 2", "--ampipe-exchange ranks"),
    *("--ampipe-memory rebuild", "--ampipe-memory redispatch", "--ampipe-memory S1", "--ampipe-memory S4"),
    *("--ampipe-partner", "--ampipe-partner --ampipe-partner-degree 2"),
    "--ampipe-partner --ampipe-partner-order listed",
    "--reset-position-ids --reset-attention-mask --eod-mask-loss",
)
"""At degrees above 1, up to three of these are drawn."""

WRONG = (
    # Refused by AMPipe at a degree above 1; tests/megatron/test_refusals.py has every row.
    "--num-experts 0",
    "--ampipe-memory rebuild --recompute-granularity selective --recompute-modules moe",
    # Invalid at any degree, or on this machine.
    "--ampipe-degree 33",
    "--expert-model-parallel-size 3",
    "--moe-router-enable-expert-bias --moe-router-score-function softmax",
    "--moe-router-num-groups 3 --moe-router-group-topk 1",
    "--moe-router-topk 1",
    "--moe-no-such-flag",
    "--transformer-impl transformer_engine",
    "--apply-layernorm-1p",
    "--ampipe-exchange 2dh --ampipe-ranks-per-node 1",
    "--moe-expert-capacity-factor -1 --ampipe-capacity-scope chunk",
)


def random_line(chooser: random.Random) -> str:
    """A layout, a degree, flags of AMPipe, features, and in every third line an invalid setting."""
    wrong = chooser.choice(WRONG) if chooser.random() < 1 / 3 else ""
    # At degree 1 the table refuses nothing, and some of its settings draw random numbers.
    degree = chooser.randint(2 if wrong else 1, 8)
    layout = chooser.choice(LAYOUTS)
    own = " ".join(chooser.sample(OWN, chooser.randint(0, 3) if degree > 1 else 0))
    if "--ampipe-chunks" in own:
        degree = 2
    groups = sorted(chooser.sample(range(len(FEATURES)), chooser.randint(0, 6)))
    features = " ".join(chooser.choice(FEATURES[group]) for group in groups)
    line = f"--num-layers 2 {layout} --ampipe-degree {degree} {own} {features} {wrong}"
    # Megatron asserts the first when it builds a model, and the second in its first pass, which at degree 1
    # nobody refuses before.
    two_norms = "--qk-l2-norm" in line and "--multi-latent-attention" in line
    odd_rows = degree == 1 and "--sequence-parallel" in line and "--seq-length 27" in line
    return random_line(chooser) if two_norms or odd_rows else line


CHOOSER = random.Random(zlib.crc32(b"".join(path.read_bytes() for path in SOURCES)))
LAYOUT_LINES = [
    *(f"--num-layers 2 {layout} --ampipe-degree 3" for layout in LAYOUTS),
    # What a stage receives from the next one requires a gradient, which its first exchange once refused.
    f"{LAYOUTS[-1]} --ampipe-degree 4 --ampipe-backward-degree 2",
    # Of the second layer the host platform's attention once left out a factor.
    "--num-layers 2 --context-parallel-size 2 --cp-comm-type p2p --ampipe-degree 3 "
    "--apply-query-key-layer-scaling",
]
# By layout: new process groups take longer than a step.
LINES = sorted((random_line(CHOOSER) for _ in range(NUM_LINES)), key=lambda line: line.split("--ampipe")[0])


def last_values(line: str) -> dict[str, str]:
    """Each flag of a line with the words after it; the last one counts, as in argparse."""
    values: dict[str, str] = {}
    for part in f" {line}".split(" --")[1:]:
        flag, _, words = part.strip().partition(" ")
        values[f"--{flag}"] = words
    return values


def stock_refuses(line: str) -> bool:
    """Whether Megatron refuses the line without AMPipe's flags."""
    from tests.dist.command_lines import launched

    words = [f"{flag} {value}" for flag, value in last_values(line).items() if "--ampipe" not in flag]
    try:
        with launched([*BASE, *shlex.split(" ".join(words))]):
            return False
    except Exception as raised:
        assert known_cause(raised) or isinstance(raised, BadInput), raised
        return True


def due_refusals(line: str) -> set[str]:
    """The flags that a refusal of this line may name, written apart from the package; none if it must train.

    Only what :func:`random_line` draws is considered.
    """
    given = {"--seq-length": "32", "--num-experts": "4", "--moe-router-topk": "2"} | last_values(line)
    degree = int(given["--ampipe-degree"])
    experts, ranks = int(given["--num-experts"]), int(given.get("--expert-model-parallel-size", 1))
    rows = int(given["--seq-length"])
    has_partner = "--ampipe-partner" in given
    due: set[str] = set()

    def if_(condition: bool, flag: str) -> None:
        if condition:
            due.add(flag)

    if stock_refuses(line):
        # In Megatron's words, or as the flag that AMPipe's launch has found first.
        due |= {"argument", "arguments", "--apply-layernorm-1p", "--transformer-impl", "--seq-length"}
        due.add("--expert-model-parallel-size")
    if_("--tensor-model-parallel-size" in given and rows % 2 == 1, "--seq-length")
    shards = max(int(given.get(f"--{kind}-parallel-size", 1)) for kind in ("tensor-model", "context"))
    if_(degree > rows // shards, "--ampipe-degree")
    if_("--ampipe-chunks" in given and degree != 2, "--ampipe-degree")
    if_(experts == 0 and degree > 1, "--num-experts")
    # Experts are split over as many ranks as attention, unless the line says otherwise.
    tensor_ranks = given.get("--tensor-model-parallel-size", "1")
    sharing = ranks * int(given.get("--expert-tensor-parallel-size", tensor_ranks))
    several = sharing > 1 and experts // ranks > 1 and int(given["--moe-router-topk"]) > 1
    # Megatron's default dispatcher is allgather.
    several = several and given.get("--moe-token-dispatcher-type") == "alltoall"
    if_(given.get("--ampipe-exchange") == "ranks" and not several, "--ampipe-exchange")
    if_(given.get("--ampipe-exchange") == "2dh", "--ampipe-exchange")
    for flag in ("--ampipe-backward-degree", "--ampipe-partner-degree"):
        other = int(given.get(flag, degree))
        if_(other % degree != 0 and degree % other != 0, flag)
    has_capacity = float(given.get("--moe-expert-capacity-factor", -1)) > 0
    by_chunk = "--ampipe-capacity-scope" in given
    if_(by_chunk and (not has_capacity or has_partner or degree == 1), "--ampipe-capacity-scope")
    recomputed = given.get("--recompute-modules", "").split()
    recomputes_experts = given.get("--recompute-granularity") == "full" or "moe" in recomputed
    if_("--ampipe-memory" in given and recomputes_experts, "--ampipe-memory")
    pipelined = "--pipeline-model-parallel-size" in given
    virtual = "--num-layers-per-virtual-pipeline-stage" in given
    if_(has_partner and pipelined and not virtual, "--ampipe-partner")
    return due


@functools.cache
def outcome(line: str) -> str:
    """``refused`` or ``trained``, whichever is due; anything else fails."""
    from tests.dist.command_lines import compare, launched

    ended = "trained"
    try:
        with launched([*BASE, *shlex.split(line)]) as (args, config):
            compare(args, config, pipelined="--ampipe-degree 1" not in line)
    except Exception as raised:
        # What Megatron refuses is translated where a launch ends.
        error = known_cause(raised) or raised
        if not isinstance(error, BadInput):
            raise
        ended = "refused"
        assert error.exit_code == 2
        # In what a parser says, the value is part of the rule.
        assert error.name and error.rule and error.remedy, error
        given = f"{error.name} {error.value}".removesuffix(" ")
        assert str(error) == f"{given}: {error.rule}. {error.remedy}"
        assert "\n" not in f"{error.name}{error.value}"
        assert error.name in due_refusals(line), f"refused without need: {error}"
    else:
        assert not due_refusals(line), "trained, where a refusal was due"
    of_ranks: list[Any] = [None, None]
    torch.distributed.all_gather_object(of_ranks, ended)
    assert of_ranks == [ended] * 2, "the ranks disagree"
    return ended


@pytest.mark.parametrize("line", LINES)
def test_every_command_line_is_refused_or_trains_like_stock(line: str) -> None:
    outcome(line)


def test_lines_are_refused_and_trained() -> None:
    refused = [outcome(line) for line in LINES].count("refused")
    assert NUM_LINES // 5 <= refused <= NUM_LINES * 4 // 5


@pytest.mark.parametrize("line", LAYOUT_LINES)
def test_every_layout_trains(line: str) -> None:
    """Otherwise random command lines could be refused because of their layout only."""
    assert outcome(line) == "trained"
