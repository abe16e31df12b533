"""The trainings that are compared with those of Megatron's layers, as data; read by ``test_training.py``.

What one training would notice and no other stands in :data:`TRAININGS`, before its row.
"""

import shlex
from dataclasses import dataclass
from pathlib import Path

from tests.megatron.launcher import MOCK_DATA, TINY_GPT, TINY_MOE

NUM_ITERATIONS = 4
SAVED_ITERATION = 2
COMMON = [
    *TINY_GPT,
    *TINY_MOE,
    *shlex.split(
        f"--train-iters {NUM_ITERATIONS} --seq-length 32 --attention-dropout 0 --hidden-dropout 0 "
        "--lr-decay-style constant"
    ),
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """A run of Megatron's layers, and runs of AMPipe's that must log its digits.

    The stock run is number 0, the others are counted from 1. ``{folder}`` in flags is a folder of all runs.
    """

    flags: str
    """Flags of all runs."""
    ours: tuple[str, ...] = ("--ampipe-degree 4",)
    """What is added in each run of AMPipe's layers."""
    stock: str = ""
    """What is added in the run of Megatron's layers."""
    said: tuple[str, ...] = ()
    """What the start-up table of each run of AMPipe's layers says."""
    num_ranks: int = 2
    stand_ins: str = ""
    """Of what needs a GPU, by their name in ``stand_ins.py``."""
    text: str | None = None
    """The dataset, made by ``test_training.write_texts``; None for mock data."""
    restarts: tuple[tuple[int, int], ...] = ()
    """Runs that go on from a checkpoint, each with the run that wrote it; then all of them are saved."""
    moments: bool = False
    """Also compare Adam's first moments in the checkpoints, which have all gradients in full precision."""

    def lines(self, name: str, folder: Path) -> dict[str, list[str]]:
        """Command lines of its runs, by name: ``NAME 0`` and so on, then ``NAME 1 from 0``."""
        common = [*COMMON, *shlex.split(self.flags)]
        if self.text is None:
            common += MOCK_DATA
        else:
            common += ["--data-path", str(folder / self.text), "--data-cache-path", str(folder / "cache")]
        kinds = [[*common, *shlex.split(added)] for added in (self.stock, *self.ours)]
        runs = {f"{name} {number}": words for number, words in enumerate(kinds)}
        if self.restarts or self.moments:
            saved = ["--save-interval", str(SAVED_ITERATION), "--save"]
            runs = {run: [*words, *saved, str(folder / run)] for run, words in runs.items()}
            for number, other in self.restarts:
                run, load = f"{name} {number} from {other}", ["--load", str(folder / f"{name} {other}")]
                last = [*load, "--ckpt-step", str(SAVED_ITERATION), *saved, str(folder / run)]
                runs[run] = [*kinds[number], *last]
        return {run: [word.replace("{folder}", str(folder)) for word in words] for run, words in runs.items()}


EP = "--expert-model-parallel-size 2 "
PP = "--pipeline-model-parallel-size 2 "
TP = "--tensor-model-parallel-size 2 --sequence-parallel "
WHOLE_EXPERTS = TP + "--expert-tensor-parallel-size 1 "
CP = "--context-parallel-size 2 --cp-comm-type p2p "
OVERLAPS = "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather "
ROPE = "--position-embedding-type rope "
GQA = "--group-query-attention --num-query-groups 2 "
LLAMA = ROPE + GQA + "--normalization RMSNorm --swiglu "
LATENT = "--kv-lora-rank 16 --qk-head-dim 16 --qk-pos-emb-head-dim 8 --v-head-dim 16 "
SHARED = "--moe-shared-expert-intermediate-size 32 "
FULL = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1 "
FULL_BLOCK = "--recompute-granularity full --recompute-method block --recompute-num-layers 1 "
NO_LOSS = "--moe-aux-loss-coeff 0 --moe-router-load-balancing-type none "
FOUR_LAYERS = "--num-layers 4 "
BLOCKS, BLOCK = "--ampipe-degree 4 ", "--ampipe-degree 4 --ampipe-stack 1 "
STACK = "--ampipe-degree 2 --ampipe-stack all "
STACKS = (STACK, "--ampipe-degree 4 --ampipe-stack 2 --ampipe-backward-degree 2")
PLACED = "--ampipe-grad-reduce placed"
ALL_LAYERS = ("layers per schedule all",)
PARTNER = "--ampipe-degree 2 --ampipe-partner "
REDISPATCH, REBUILD = (f"{STACK}--ampipe-memory {two}" for two in ("redispatch/S3", "rebuild/offload"))

REAL_TEXT = (
    EP + LLAMA + "--seed 7 --seq-length 64 --ffn-hidden-size 96 --untie-embeddings-and-output-weights "
    "--vocab-size 256 --split 80,20,0 "
)
TRAININGS: dict[str, Training] = {
    # Real text: what evaluates, what is traced, what a run goes on from, and gradients in full precision.
    "text": Training(
        flags=REAL_TEXT + "--eval-iters 1 --eval-interval 2",
        ours=(
            f"{BLOCKS} --ampipe-trace-dir {{folder}}/trace",
            f"{BLOCKS} --ampipe-schedule joined",
            PARTNER,
            f"{STACK} --ampipe-schedule tests.schedules:interleaved",
        ),
        text="text",
        # The trace is that of the unbroken run.
        restarts=((0, 1), (2, 0), (3, 1)),
        moments=True,
    ),
    # Data-parallel experts and dense parameters, buckets that are gathered and reduced during a pass.
    "sharded": Training(
        flags=REAL_TEXT + OVERLAPS + "--global-batch-size 12", text="text", moments=True, num_ranks=4
    ),
    # Combined parallelism, and whole weights that are drawn on the CPU before they are divided.
    "tp2-pp2-ep2": Training(
        flags=WHOLE_EXPERTS + PP + EP + OVERLAPS + LLAMA + "--use-cpu-initialization",
        ours=(f"{BLOCKS} --tp-comm-overlap",),
        said=("--tp-comm-overlap switched off: its buffers have the size of a whole sequence",),
        num_ranks=4,
        stand_ins="tensor_overlap",
    ),
    # What Megatron weighs otherwise than one rank would: docs/troubleshooting.md.
    "masked-mtp-cp": Training(
        flags=CP + ROPE + GQA + "--seq-length 64 --vocab-size 256 --split 100,0,0 --eod-mask-loss "
        "--mtp-num-layers 1 --calculate-per-token-loss --softmax-type learnable",
        text="documents",
        moments=True,
    ),
    "latent-mtp": Training(
        flags=EP + LATENT + ROPE + "--multi-latent-attention --q-lora-rank 16 --mtp-num-layers 1"
    ),
    # In fp32 Megatron would refuse the last two, if they were still set when it validates its arguments.
    "other-overlaps": Training(
        flags=EP + SHARED,
        ours=(
            f"{BLOCKS} --moe-shared-expert-overlap --overlap-moe-expert-parallel-comm --delay-wgrad-compute "
            "--fine-grained-activation-offloading --offload-modules expert_fc1 moe_act",
        ),
        said=(
            "--moe-shared-expert-overlap switched off: ",
            "--overlap-moe-expert-parallel-comm switched off: --ampipe-partner does the same",
            "partner uncut, lancet, megatron-1f1b a backward pass and the next micro-batch's forward pass",
            "--delay-wgrad-compute switched off: ",
            "--fine-grained-activation-offloading switched off: --ampipe-memory offload puts away",
            "memory offload",
        ),
    ),
    # Layers that share a schedule. An evaluation takes the pre-hooks of the gather away. With Megatron's own
    # seed, one token of the last iteration is between two experts: rounding sends it to another one at
    # degree 4 on some machines, block by block too.
    "stack": Training(
        flags=FOUR_LAYERS + EP + OVERLAPS + "--seed 7 --ddp-bucket-size 1000 --eval-iters 1 "
        "--eval-interval 2",
        ours=(
            *STACKS,
            REDISPATCH,
            f"{STACK}{PLACED}",
            f"--ampipe-schedule lancet {PLACED}",
            f"{PARTNER}{PLACED}",
            f"{BLOCKS} --ampipe-partner --ampipe-partner-degree 2",
            f"{PARTNER}--ampipe-partner-order listed",
        ),
    ),
    # Layers of the user's own specification: as in Qwen3-Next, three of four have gated delta nets.
    "delta-nets": Training(
        flags=FOUR_LAYERS + EP + LLAMA + SHARED + "--spec tests.megatron.custom_spec deltas "
        "--overlap-grad-reduce --linear-attention-freq 4 --linear-conv-kernel-dim 4 --linear-key-head-dim 8 "
        "--linear-value-head-dim 8 --linear-num-key-heads 2 --linear-num-value-heads 4",
        ours=(f"{STACK}{PLACED}", PARTNER, FULL + BLOCKS),
        restarts=((0, 1), (1, 0)),
        moments=True,
    ),
    # Several micro-batches wait for their backward at the same time. One specification is all layers'.
    "interleaved": Training(
        flags=PP + "--num-layers 8 --num-layers-per-virtual-pipeline-stage 2 "
        "--spec tests.megatron.custom_spec layer_of",
        ours=(STACK, f"{REBUILD} --overlap-grad-reduce {PLACED}", f"{PARTNER}--overlap-grad-reduce"),
        said=ALL_LAYERS,
    ),
    "recompute-dense-first-mtp": Training(
        flags=FOUR_LAYERS + EP + LLAMA + FULL + "--moe-layer-freq [0,1,1,1] --mtp-num-layers 1",
        ours=(STACK, PARTNER),
        said=("full recompute every layer",),
    ),
    # A dense layer outside a stack has Megatron's own checkpoints.
    "recompute-modules": Training(
        flags=FOUR_LAYERS + EP + LLAMA + SHARED + "--moe-layer-freq [0,1,1,1] --recompute-granularity "
        "selective --recompute-modules layernorm shared_experts mlp core_attn",
        ours=(BLOCK, REDISPATCH, PARTNER),
    ),
    "recompute-interleaved": Training(
        flags=PP + FULL_BLOCK + OVERLAPS + "--num-layers 8 --num-layers-per-virtual-pipeline-stage 2 "
        "--ddp-bucket-size 1000",
        ours=(f"{STACK}{PLACED}", f"{PARTNER}{PLACED}"),
        said=("full recompute first 1 of a stage",),
        num_ranks=4,
    ),
    # Ranks hold parts of the parameters; two are expert-parallel, and two share the experts.
    **{
        f"fsdp-{strategy}": Training(
            flags=EP + LLAMA + SHARED + "--use-megatron-fsdp --use-distributed-optimizer "
            "--ckpt-format fsdp_dtensor --untie-embeddings-and-output-weights --calculate-per-token-loss "
            f"--data-parallel-sharding-strategy {strategy}",
            ours=tuple(f"{again}{BLOCKS}--overlap-moe-expert-parallel-comm" for again in ("", FULL)),
            said=(
                "layers per schedule 1, in place of all Megatron-FSDP gathers the parameters",
                "--overlap-moe-expert-parallel-comm switched off: Megatron-FSDP gathers parameters for one "
                "pass at a time; the same all-to-alls overlap with other chunks",
            ),
            num_ranks=4,
            stand_ins="fsdp",
        )
        for strategy in ("optim_grads_params", "optim_grads")
    },
    # In a pipeline several micro-batches are in flight, each with its own graphs.
    "graphs": Training(
        flags=EP + PP + LLAMA + SHARED + FOUR_LAYERS,
        ours=(
            f"{BLOCKS}--overlap-moe-expert-parallel-comm --cuda-graph-impl local --cuda-graph-modules attn "
            "moe_router moe_preprocess mlp",
        ),
        said=("switched off: a pipeline stage without virtual stages waits for the next stage",),
        num_ranks=4,
        stand_ins="graphs",
    ),
    # What is sent once to each node, or in two hops.
    "two-hops": Training(
        flags=SHARED + "--expert-model-parallel-size 4 --num-experts 8 --moe-router-topk 4 "
        "--moe-expert-capacity-factor 1.0 --moe-token-drop-policy position",
        ours=tuple(
            f"{BLOCKS} --ampipe-ranks-per-node 2 --ampipe-exchange {kind}"
            for kind in ("nodes", "2dh", "nodes --ampipe-partner")
        ),
        num_ranks=4,
    ),
    # Documents of one line each, often of a few tokens.
    "documents": Training(
        flags=WHOLE_EXPERTS + EP + ROPE + GQA + "--seq-length 64 --dataloader-inter-document-masking "
        "--vocab-size 256 --split 100,0,0 --micro-batch-size 2 "
        "--moe-router-load-balancing-type seq_aux_loss --moe-aux-loss-coeff 1e-1",
        ours=(f"{BLOCKS} --ampipe-stack all", "--ampipe-partner"),
        said=("documents packed",),
        text="documents",
    ),
    "documents-masked": Training(
        flags=EP + ROPE + "--seq-length 64 --vocab-size 256 --split 100,0,0 --reset-attention-mask "
        "--reset-position-ids --eod-mask-loss --micro-batch-size 2 --window-size 16,0 "
        "--window-attn-skip-freq 2",
        said=("documents masked",),
        text="documents",
    ),
    # Several conversations share a line and a sequence.
    "conversations": Training(
        flags=EP + ROPE + "--seq-length 64 --split 100,0,0 --micro-batch-size 2 --sft "
        "--no-create-attention-mask-in-dataloader",
        said=("documents packed",),
        text="text",
        stand_ins="conversations",
    ),
    # Ranks share each conversation. In Megatron's loader, masked tokens are weighted right only like this.
    "conversations-context": Training(
        flags=CP + EP + ROPE + "--seq-length 64 --split 100,0,0 --sft --calculate-per-token-loss "
        "--no-create-attention-mask-in-dataloader",
        said=("documents packed", "--cp-comm-type all_gather in pipelined blocks, in place of p2p"),
        text="text",
        stand_ins="conversations",
    ),
    "records": Training(
        flags=WHOLE_EXPERTS + EP + ROPE + "--moe-router-score-function sigmoid "
        "--moe-router-enable-expert-bias --moe-router-bias-update-rate 1e-2",
        ours=(f"{BLOCKS} --ampipe-stack all --moe-routing-trace-path {{folder}}/records",),
        said=("records of the routing need Megatron's order of the rows",),
    ),
}

# Routers: the class in Megatron's layers, and in chunks.
CHECKED = ("'ampipe gate' checks it",)
RESTARTS = ((0, 1), (1, 0))
COMPARES = "another function for each degree: later tokens of a chunk influence earlier ones"
ROUTERS: dict[str, Training] = {
    # The same numbers are drawn in a whole sequence and in chunks, one layer after the other.
    "noisy-topk": Training(
        flags=EP + "--ampipe-router noisy-topk", ours=(BLOCK,), said=CHECKED, restarts=RESTARTS
    ),
    # Exact: only equal tokens are condensed, and the wire changes no row.
    "cosine": Training(
        flags=EP + "--ampipe-router cosine",
        ours=(BLOCKS, f"{BLOCKS} --ampipe-condense 1 --ampipe-wire tests.wires:HalvesWire"),
        said=CHECKED,
        restarts=RESTARTS,
    ),
    "sigmoid": Training(flags=EP + "--ampipe-router sigmoid", said=CHECKED),
    "expert-choice": Training(
        flags=EP + NO_LOSS,
        stock="--ampipe-router tests.gates:ExpertChoiceOfEight --moe-expert-capacity-factor 4 "
        "--moe-token-drop-policy position",
        ours=(f"{BLOCKS} --ampipe-router expert-choice --ampipe-router-scope chunk",),
        said=(*CHECKED, COMPARES),
    ),
    "hash": Training(flags=EP + NO_LOSS + "--ampipe-router hash", said=CHECKED),
}

HYBRID = (
    ROPE + "--normalization RMSNorm --mamba-head-dim 16 --mamba-num-groups 2 --mamba-state-dim 16 "
    "--hybrid-layer-pattern "
)
HYBRIDS: dict[str, Training] = {
    # A dense pair in a stack, an MLP and an MoE layer on their own, an attention layer on its own.
    "hybrid-dense-layers": Training(flags=EP + HYBRID + "*-*E-*EE*", ours=(STACK,), said=ALL_LAYERS),
    "hybrid-mamba": Training(flags=EP + HYBRID + "M*EM*-*EM", ours=(BLOCK, STACK), restarts=((0, 2), (2, 0))),
    # Each MoE layer is a block without attention.
    "hybrid-without-pairs": Training(flags=EP + OVERLAPS + HYBRID + "ME*-ME", ours=(STACK, PARTNER)),
    "hybrid-mtp": Training(flags=EP + HYBRID + "*E*E/*E", ours=(STACK, PARTNER), said=ALL_LAYERS),
    "hybrid-of-tensor-ranks": Training(
        flags=WHOLE_EXPERTS + EP + HYBRID + "*E*EM*E", ours=(STACK,), said=ALL_LAYERS
    ),
    "hybrid-stages": Training(flags=PP + NO_LOSS + HYBRID + "*EM*E|*E*-E", ours=(STACK,), said=ALL_LAYERS),
}
TRAININGS |= ROUTERS | HYBRIDS
