"""Launches that combine features as NVIDIA's recipes do: AMPipe accepts them at degree 4.

Read by Megatron's parser and validation, with Transformer Engine counted as present and, as the device, a
Hopper GPU, for which Megatron checks ``CUDA_DEVICE_MAX_CONNECTIONS``. Nothing is trained.
"""

import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import pytest

from gpu_check.families import FAMILIES, TRAINING
from megatron_ampipe.errors import BadInput
from megatron_ampipe.launch import host, resolve
from megatron_ampipe.plan.cluster import Cluster, read_cluster
from megatron_ampipe.plan.plan_file import Plan
from tests import te_permutation_standin
from tests.megatron.launcher import MOCK_DATA, TINY_GPT, TINY_MOE, squeezed

pytestmark = pytest.mark.ranks(1)

MODEL = shlex.split(
    "--num-layers 4 --hidden-size 256 --num-attention-heads 8 --seq-length 4096 "
    "--max-position-embeddings 4096 --micro-batch-size 1 --global-batch-size 64 --train-iters 10 --lr 1e-4 "
    "--bf16 --mock-data "
    "--tokenizer-type NullTokenizer --vocab-size 1023 --position-embedding-type rope --normalization RMSNorm "
    "--swiglu --disable-bias-linear --untie-embeddings-and-output-weights --attention-dropout 0 "
    "--hidden-dropout 0 --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather "
    "--num-experts 16 --moe-router-topk 2 --moe-grouped-gemm --moe-permute-fusion --ampipe-degree 4"
)
EP = "--expert-model-parallel-size 8 "
ALLTOALL = EP + "--moe-token-dispatcher-type alltoall "
DEEPEP = EP + "--moe-token-dispatcher-type flex --moe-enable-deepep "
HYBRIDEP = EP + "--moe-token-dispatcher-type flex --moe-flex-dispatcher-backend hybridep "
TP = "--tensor-model-parallel-size 2 --sequence-parallel --expert-tensor-parallel-size 1 "
PP = "--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1 "
SHARED = "--moe-shared-expert-intermediate-size 128 "
LATENT = (
    "--multi-latent-attention --q-lora-rank 64 --kv-lora-rank 64 --qk-head-dim 32 --qk-pos-emb-head-dim 16 "
    "--v-head-dim 32 "
)
BIASED = (
    "--moe-router-score-function sigmoid --moe-router-enable-expert-bias --moe-router-bias-update-rate 1e-3 "
    "--moe-router-num-groups 4 --moe-router-group-topk 2 --moe-router-dtype fp32 "
    "--moe-router-load-balancing-type seq_aux_loss --moe-aux-loss-coeff 1e-4 "
)
PRECISION_AWARE = (
    "--use-precision-aware-optimizer --main-grads-dtype fp32 --main-params-dtype fp32 --exp-avg-dtype bf16 "
    "--exp-avg-sq-dtype bf16 "
)
BLOCKWISE = "--fp8-format e4m3 --fp8-recipe blockwise --fp8-param-gather "
MXFP8 = "--fp8-format e4m3 --fp8-recipe mxfp8 --fp8-param-gather --reuse-grad-buf-for-mxfp8-param-ag "
DELTA = "--experimental-attention-variant gated_delta_net --linear-attention-freq 4 "


GRAPHS = "--te-rng-tracker --cuda-graph-impl {} --cuda-graph-modules {} "
OVERLAP = "--overlap-moe-expert-parallel-comm"


def again(*modules: str) -> str:
    """Flags of selective recompute."""
    return f"--recompute-granularity selective --recompute-modules {' '.join(modules)} "


class Launch(NamedTuple):
    """A command line, and what the start-up table says of it."""

    flags: str
    said: tuple[str, ...] = ()


LAUNCHES = {
    "blockwise, norms and activations again": Launch(
        ALLTOALL + BLOCKWISE + again("layernorm", "moe_act") + "--moe-router-padding-for-quantization",
        ("fp8 blockwise chunks end on whole tiles", "--moe-router-padding-for-quantization switched off"),
    ),
    "latent attention and a predicted token": Launch(
        ALLTOALL + LATENT + BIASED + SHARED + "--mtp-num-layers 1 --moe-layer-freq [0]+[1]*3"
    ),
    "deepseek-v3": Launch(
        DEEPEP + PP + LATENT + BIASED + SHARED + BLOCKWISE + PRECISION_AWARE + "--mtp-num-layers 1 "
        "--cross-entropy-loss-fusion --manual-gc " + again("layernorm", "moe_act", "mla_up_proj", "mlp")
    ),
    "mxfp8 and hybrid-ep": Launch(HYBRIDEP + MXFP8 + "--moe-permute-fusion-into-hybridep", ("fp8 mxfp8",)),
    "one scale for a tensor": Launch(
        ALLTOALL + "--fp8-format hybrid --fp8-recipe tensorwise --first-last-layers-bf16 "
        "--num-layers-at-start-in-bf16 1 --num-layers-at-end-in-bf16 1",
        ("fp8 tensorwise a scale for each chunk",),
    ),
    "tensor and context parallel": Launch(
        ALLTOALL + TP + "--context-parallel-size 2 --qk-layernorm --tp-comm-overlap",
        ("ring of 2 ranks", "--tp-comm-overlap switched off"),
    ),
    # Megatron checks the number of connections after its own overlap of the same all-to-alls is switched off.
    "overlaps in a pipeline": Launch(
        DEEPEP + PP + TP + "--overlap-moe-expert-parallel-comm --delay-wgrad-compute " + SHARED,
        ("partner uncut", "--delay-wgrad-compute switched off"),
    ),
    # Megatron's overlap asks for a partner, which cannot be: chunks overlap.
    "overlap and graphs": Launch(
        ALLTOALL + PP + "--overlap-moe-expert-parallel-comm --te-rng-tracker --cuda-graph-impl local "
        "--cuda-graph-modules attn",
        ("CUDA graphs attn", f"{OVERLAP} switched off: a CUDA graph is a part of one pass; the same"),
    ),
    # What cannot be captured runs without a graph.
    "graphs of a recipe": Launch(
        DEEPEP
        + PP
        + LATENT
        + BIASED
        + SHARED
        + GRAPHS.format("transformer_engine", "attn moe_router moe_preprocess")
        + "--moe-router-force-load-balancing --mtp-num-layers 1 --overlap-moe-expert-parallel-comm "
        + again("moe_act", "mla_up_proj", "mlp"),
        (
            "CUDA graphs attn moe_preprocess moe_router of stages",
            "without graphs qkv --recompute-modules mla_up_proj",
            f"{OVERLAP} switched off: a CUDA graph is a part of one pass",
        ),
    ),
    "graphs in FP8": Launch(
        ALLTOALL + SHARED + BLOCKWISE + GRAPHS.format("local", "attn moe_router"),
        (
            "CUDA graphs moe_router of stages",
            "without graphs qkv attention shared --fp8-format: weights are quantized into other memory",
        ),
    ),
    # Attention is all that is named, so a partner is possible.
    "no graphs in FP8": Launch(
        ALLTOALL + BLOCKWISE + GRAPHS.format("local", "attn") + "--overlap-moe-expert-parallel-comm",
        ("without graphs qkv attention --fp8-format", "partner uncut"),
    ),
    "graphs of tensor-parallel ranks": Launch(
        ALLTOALL + TP + GRAPHS.format("transformer_engine", "attn moe_router moe_preprocess"),
        (
            "CUDA graphs attn moe_preprocess moe_router",
            "without graphs qkv attention --tensor-model-parallel-size: their linear layers exchange rows",
        ),
    ),
    "graphs of whole layers": Launch(
        ALLTOALL
        + GRAPHS.partition("--cuda-graph-modules")[0].format("local")
        + "--moe-expert-capacity-factor 1",
        (
            "CUDA graphs attn of stages",
            "without graphs route merge --moe-expert-capacity-factor: a chunk has what earlier chunks leave",
            "experts, transfers their number of rows changes",
            "AMPipe: CUDA graphs of the stages qkv attention, not of whole passes: --ampipe-rows exact: "
            "numbers of rows change",
        ),
    ),
    "graphs in place of whole passes": Launch(
        ALLTOALL
        + SHARED
        + GRAPHS.partition("--cuda-graph-modules")[0].format("local")
        + "--ampipe-rows fixed --attention-dropout 0.1 --ampipe-memory rebuild",
        (
            "CUDA graphs moe_preprocess moe_router of stages",
            "without graphs qkv attention --attention-dropout draws random numbers",
            "experts, transfers only graphs of whole passes have them",
            "AMPipe: CUDA graphs of the stages route shared merge, not of whole passes: --attention-dropout "
            "draws random numbers",
        ),
    ),
    "graphs of mamba layers": Launch(
        ALLTOALL + GRAPHS.format("local", "attn mamba") + "--hybrid-layer-pattern M*EM --mamba-head-dim 64 "
        "--mamba-num-groups 8",
        ("CUDA graphs attn of stages", "CUDA graphs mamba Megatron's own"),
    ),
    "overlap in a pipeline without virtual stages": Launch(
        ALLTOALL + "--pipeline-model-parallel-size 2 --overlap-moe-expert-parallel-comm",
        (f"{OVERLAP} switched off: a pipeline stage without virtual stages waits for the next stage",),
    ),
    "overlap and a capacity of chunks": Launch(
        ALLTOALL
        + "--overlap-moe-expert-parallel-comm --moe-expert-capacity-factor 1 --ampipe-capacity-scope "
        "chunk",
        (f"{OVERLAP} switched off: with --ampipe-capacity-scope, passes with a partner would be another",),
    ),
    "gated delta net": Launch(
        ALLTOALL + DELTA + SHARED + "--moe-shared-expert-gate --attention-output-gate --qk-layernorm "
        "--linear-num-key-heads 8 --linear-num-value-heads 16 --mtp-num-layers 1 "
        + again("layernorm", "gdn_norm_out"),
        ("other layers gated_delta_net",),
    ),
    "hybrid without attention": Launch(
        ALLTOALL + "--hybrid-layer-pattern MEME --mamba-head-dim 64 --mamba-num-groups 8"
    ),
    "sinks and windows": Launch(
        ALLTOALL + "--softmax-type learnable --window-size 128,0 --window-attn-skip-freq 2"
    ),
}


@pytest.fixture(autouse=True)
def _engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Transformer Engine is counted as present, and 64 ranks."""
    from megatron.core.models.common.embeddings import rope_utils
    from megatron.core.transformer import transformer_config
    from megatron.training import arguments

    te_permutation_standin.install()
    for module in (arguments, transformer_config):
        monkeypatch.setattr(module, "is_te_min_version", lambda *_, **__: True)
    monkeypatch.setattr(rope_utils, "fused_apply_rotary_pos_emb", print)
    monkeypatch.setattr(arguments, "get_device_arch_version", lambda: 9)
    monkeypatch.setenv("NVTE_CPU_OFFLOAD_V1", "1")
    monkeypatch.setenv("WORLD_SIZE", "64")
    for variable in ("CUDA_DEVICE_MAX_CONNECTIONS", "NCCL_LAUNCH_ORDER_IMPLICIT"):
        monkeypatch.delenv(variable, raising=False)


def table_of(
    flags: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    model: Sequence[str] = MODEL,
) -> str:
    """What rank 0 prints up to the creation of process groups; raises if the launch is refused."""
    from megatron.training.arguments import core_transformer_config_from_args, parse_args, validate_args

    from megatron_ampipe.launch.script import TrainingSession

    words = [*model, *shlex.split(flags)]
    monkeypatch.setattr(sys, "argv", ["pretrain_gpt.py", *words])
    session = TrainingSession(words)
    try:
        args = session.parse(parse_args)
        session.validate(validate_args, args, {})
        core_transformer_config_from_args(args)
    finally:
        session.end()
    return squeezed(capsys.readouterr().out)


def test_an_overlap_without_partners_has_the_default_number_of_chunks(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Unless the user gives a number; the exchange alone has AMPipe's layers built."""
    flags = f"{ALLTOALL}--use-megatron-fsdp --ckpt-format fsdp_dtensor --ampipe-exchange ranks "
    table = table_of(flags + OVERLAP, monkeypatch, capsys, MODEL[:-2])
    why = "Megatron-FSDP gathers parameters for one pass at a time"
    assert squeezed("degree 2 default") in table
    assert squeezed(f"{OVERLAP} switched off: {why}; the same all-to-alls overlap with other chunks") in table
    table = table_of(f"{flags} {OVERLAP} --ampipe-degree 1", monkeypatch, capsys, MODEL[:-2])
    assert squeezed("degree 1 --ampipe-degree") in table
    assert squeezed(f"{OVERLAP} switched off: {why}, and one chunk leaves nothing to overlap with") in table


@pytest.mark.parametrize("name", LAUNCHES)
def test_is_accepted(name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    table = table_of(LAUNCHES[name].flags, monkeypatch, capsys)
    for text in ("degree 4 --ampipe-degree", "chunk boundaries", *LAUNCHES[name].said):
        assert squeezed(text) in table


def test_the_table_shows_what_orders_streams_and_collectives_on_a_gpu(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(host, "installed", lambda: False)
    # Arguments are read before there are process groups.
    monkeypatch.setattr("torch.distributed.is_initialized", lambda: False)
    monkeypatch.setattr("torch.cuda.nccl.version", lambda: (2, 27, 5))
    flags = LAUNCHES["tensor and context parallel"].flags
    table = table_of(flags, monkeypatch, capsys)
    for variable in ("CUDA_DEVICE_MAX_CONNECTIONS=32", "NCCL_LAUNCH_ORDER_IMPLICIT=1"):
        assert squeezed(f"environment {variable}") in table
    assert "TORCH_NCCL_AVOID_RECORD_STREAMS" not in table
    monkeypatch.setattr("megatron_ampipe.compat.torch_release", lambda: (2, 7, 1))
    monkeypatch.setenv("NCCL_LAUNCH_ORDER_IMPLICIT", "0")
    monkeypatch.setenv("TORCH_NCCL_AVOID_RECORD_STREAMS", "0")
    table = table_of(flags, monkeypatch, capsys)
    assert squeezed("warning TORCH_NCCL_AVOID_RECORD_STREAMS=0") in table
    assert squeezed("warning NCCL_LAUNCH_ORDER_IMPLICIT=0") in table


def test_fixed_rows_need_16_bits_on_a_gpu(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "1")
    monkeypatch.setattr("torch.distributed.is_initialized", lambda: False)
    monkeypatch.setattr("torch.cuda.nccl.version", lambda: (2, 27, 5))
    model = [*TINY_GPT, *TINY_MOE, *MOCK_DATA, "--ampipe-degree", "2", "--transformer-impl", "local"]
    table = table_of("--ampipe-rows fixed", monkeypatch, capsys, model)
    assert squeezed("chunk boundaries") in table
    monkeypatch.setattr(host, "installed", lambda: False)
    with pytest.raises(BadInput, match="--ampipe-rows fixed: without --bf16"):
        table_of("--ampipe-rows fixed", monkeypatch, capsys, model)
    table = table_of("--ampipe-rows fixed --bf16", monkeypatch, capsys, model)
    assert squeezed("chunk boundaries") in table


def test_a_launch_reads_its_plan_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model, file = MODEL[:-2], tmp_path / "plan.yaml"
    assert MODEL[-2:] == ["--ampipe-degree", "4"]
    choosing = f"{ALLTOALL} --ampipe-degree auto --ampipe-cluster a800x8-20gbps --ampipe-save-plan {file}"
    assert squeezed("planned from a800x8-20gbps") in table_of(choosing, monkeypatch, capsys, model)
    read: list[Path] = []
    read_plan = Plan.read

    def counted(path: Path) -> Plan:
        read.append(path)
        return read_plan(path)

    monkeypatch.setattr(Plan, "read", counted)
    for flags in (choosing, f"{ALLTOALL} --ampipe-plan {file}"):
        read.clear()
        assert squeezed(f"read from {file}") in table_of(flags, monkeypatch, capsys, model)
        assert read == [file]


def test_a_launch_reads_its_cluster_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Both the memory strategy and the degree are chosen by it."""
    read: list[Path] = []

    def counted(path: Path) -> Cluster:
        read.append(path)
        return read_cluster(path)

    monkeypatch.setattr(resolve, "read_cluster", counted)
    flags = f"{ALLTOALL} --ampipe-degree auto --ampipe-memory auto --ampipe-memory-budget 600GiB"
    table = table_of(f"{flags} --ampipe-cluster a800x8-20gbps", monkeypatch, capsys, MODEL[:-2])
    assert squeezed("planned from a800x8-20gbps") in table
    assert squeezed("memory keep the fastest by a800x8-20gbps within 600GiB") in table
    assert [path.stem for path in read] == ["a800x8-20gbps"]
    with pytest.raises(BadInput, match="--ampipe-cluster nowhere: "):
        table_of(f"{flags} --ampipe-cluster nowhere", monkeypatch, capsys, MODEL[:-2])


def test_megatrons_demand_for_one_hardware_queue_is_not_lifted_for_its_own_layers(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = LAUNCHES["tensor and context parallel"].flags
    with pytest.raises(AssertionError, match="require setting the environment variable CUDA_DEVICE_MAX_CONN"):
        table_of(f"{flags} --ampipe-degree 1", monkeypatch, capsys)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_trainings_of_the_gpu_check_are_accepted(
    family: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WORLD_SIZE", str(FAMILIES[family].ranks))
    model = shlex.split(TRAINING + FAMILIES[family].words)
    for flags in FAMILIES[family].kinds.values():
        assert squeezed("chunk boundaries") in table_of(flags, monkeypatch, capsys, model)
