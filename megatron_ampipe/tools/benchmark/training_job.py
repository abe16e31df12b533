"""A training run of the end-to-end comparison: its Megatron flags, and the job of its ranks. No torch.

The flags of a case are those of its block; in addition the model has an embedding, an output layer and Adam,
small compared with the blocks. Called by :mod:`.training`, and by :mod:`.training_worker` in the ranks.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import ClassVar

from megatron_ampipe.schedule import Exchange
from megatron_ampipe.tools.measuring.grid import Case
from megatron_ampipe.tools.measuring.variant import Variant

MICRO_BATCHES = 2
"""Of each rank in an iteration: few, which is where the package is meant to help."""

_VOCABULARY = 256
# A learning rate and an epsilon that do not amplify rounding: see docs/log.
_OPTIMIZER = "--lr 5e-4 --adam-eps 1e-5 --lr-decay-style constant --lr-warmup-iters 0 --clip-grad 1.0"
# Routed in fp32, as the blocks of ``ampipe bench`` are.
_ROUTER = ("--moe-router-dtype", "fp32")
_PRECISION = {"fp32": (), "bf16": ("--bf16", *_ROUTER), "fp16": ("--fp16", *_ROUTER)}


def block_flags(case: Case) -> list[str]:
    """Megatron's flags for blocks of a case, as ``measuring.blocks`` builds them."""
    flags = [
        *("--hidden-size", case.hidden, "--num-attention-heads", case.heads),
        *("--kv-channels", case.head_size or case.hidden // case.heads),
        *("--ffn-hidden-size", case.ffn, "--moe-ffn-hidden-size", case.ffn),
        *("--num-experts", case.experts, "--moe-router-topk", case.topk),
        *("--moe-router-load-balancing-type", "none", "--moe-token-dispatcher-type", "alltoall"),
        *("--normalization", "RMSNorm", "--disable-bias-linear", "--no-bias-gelu-fusion"),
        *("--attention-dropout", 0, "--hidden-dropout", 0),
        *_PRECISION[case.dtype],
    ]
    if case.topk == 1:
        flags += ["--moe-router-pre-softmax"]
    if case.query_groups is not None:
        flags += ["--group-query-attention", "--num-query-groups", case.query_groups]
    if case.shared_ffn is not None:
        flags += ["--moe-shared-expert-intermediate-size", case.shared_ffn]
    if case.activation == "swiglu":
        flags += ["--swiglu"]
    if case.capacity is not None:
        flags += ["--moe-expert-capacity-factor", case.capacity, "--moe-token-drop-policy", "position"]
    return [str(flag) for flag in flags]


def training_flags(case: Case, *, layers: int, num_ranks: int, iterations: int, seed: int) -> tuple[str, ...]:
    """Megatron's flags for training a model of such blocks on made-up data, the experts over all ranks."""
    batch = case.batch
    flags = [
        *block_flags(case),
        *("--num-layers", layers, "--expert-model-parallel-size", num_ranks),
        *("--seq-length", case.sequence_length, "--max-position-embeddings", case.sequence_length),
        # A table of positions would be reduced over the link in every iteration, as large as all attention.
        *("--position-embedding-type", "rope"),
        *("--micro-batch-size", batch, "--global-batch-size", batch * MICRO_BATCHES * num_ranks),
        *("--mock-data", "--tokenizer-type", "NullTokenizer", "--vocab-size", _VOCABULARY),
        *("--train-iters", iterations, "--seed", seed, *_OPTIMIZER.split()),
        # AMPipe uses no mask; stock gets a kernel that needs none.
        "--no-create-attention-mask-in-dataloader",
        *("--log-interval", 1, "--eval-interval", 1_000_000, "--eval-iters", 0),
    ]
    return tuple(str(flag) for flag in flags)


def variant_flags(variant: Variant) -> tuple[str, ...]:
    """What makes a training stock or AMPipe's."""
    if not variant.pipelined:
        return ("--ampipe-degree", "1")
    exchange: tuple[str, ...] = ()
    if variant.exchange is not Exchange.ROWS:
        exchange = ("--ampipe-exchange", variant.exchange)
    cut = variant.cut
    if not variant.pipeline.overlaps:
        return ("--ampipe-degree", "1", *exchange)
    if cut.shares is not None:
        flags = ("--ampipe-chunks", ",".join(map(repr, cut.shares)))
    else:
        flags = ("--ampipe-degree", str(cut.degree))
    if cut.backward_degree != cut.degree:
        flags += ("--ampipe-backward-degree", str(cut.backward_degree))
    return (
        *flags,
        "--ampipe-schedule",
        variant.schedule,
        "--ampipe-stack",
        str(variant.stack),
        "--ampipe-memory",
        variant.memory,
        *exchange,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingJob:
    """One training.

    Attributes:
        flags: The command line of ``megatron_ampipe.pretrain_gpt``.
        stock_attends_as: For a stock training, the precision for which its core attention is to be the
            kernel that AMPipe's layers have; None in a training of AMPipe's, which has it.
        link: As the user wrote it. An emulated one slows the all-to-alls alone.
        num_ranks: Processes, each an expert-parallel rank.
        timeout_s: A collective fails after this time.
        rendezvous: File over which the ranks find each other.
        cores: One for each rank; empty when ranks are not pinned.
        gloo_all_to_all: Whether it uses gloo's own all-to-all.
    """

    worker: ClassVar[str] = "megatron_ampipe.tools.benchmark.training_worker"
    device: ClassVar[str] = "cpu"

    flags: tuple[str, ...]
    stock_attends_as: str | None
    link: str
    num_ranks: int
    timeout_s: float
    rendezvous: str = ""
    cores: tuple[int, ...] = ()
    gloo_all_to_all: bool = False

    @property
    def num_processes(self) -> int:
        """How many processes there are."""
        return self.num_ranks

    def to_json(self) -> str:
        """One line."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, line: str) -> TrainingJob:
        """Read what :meth:`to_json` wrote."""
        found = json.loads(line)
        return cls(**found | {key: tuple(found[key]) for key in ("flags", "cores")})
