"""Model files without Megatron: the sizes of a block, and errors with file and line."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from megatron_ampipe.errors import BadInput
from megatron_ampipe.plan.block import Block
from megatron_ampipe.plan.model_block import StageLayers, block_of, layers_of
from megatron_ampipe.plan.model_file import read_model
from tests.plan_cases import PLAIN, cluster, model_file


def read(path: Path, **settings: Any) -> tuple[Block, tuple[str, ...]]:
    model = read_model(path, overrides=settings.pop("overrides", None))
    return block_of(model, cluster("dgx-h100"), **settings)


LATENT = "multi-latent-attention: true"
FIELD_SOURCES = {
    "sequence_length": "seq-length: 8192",
    "batch": "micro-batch-size: 2",
    "hidden": "hidden-size: 2048",
    "heads": "num-attention-heads: 8",
    "head_size": "kv-channels: 128",
    "value_size": f"{LATENT}\nv-head-dim: 32",
    "projections": f"{LATENT}\nq-lora-rank: 8",
    "key_value_width": "group-query-attention: true\nnum-query-groups: 4",
    "experts": "num-experts: 16",
    "topk": "moe-router-topk: 2",
    "ffn": "moe-ffn-hidden-size: 512",
    "gated": "swiglu: true",
    "shared_ffn": "moe-shared-expert-intermediate-size: 512",
    "dense_ffn": "moe-layer-freq: 2",
    "capacity": "moe-expert-capacity-factor: 1.5",
    "capacity_per_chunk": "ampipe:\n  capacity-scope: chunk",
    "rows_margin": "ampipe:\n  rows: fixed",
    "captures_passes": "ampipe:\n  rows: fixed\ncuda-graph-impl: local",
    "chooses": "moe-router-load-balancing-type: sinkhorn",
    "padded": "moe-pad-expert-input-to-capacity: true",
    "grouped": "moe-grouped-gemm: true",
    "dispatcher": "moe-token-dispatcher-type: allgather",
    "dtype": "bf16: false\nfp16: true",
    "fp8_tile": "fp8-format: hybrid\nfp8-recipe: mxfp8",
    "losses": "moe-z-loss-coeff: 0.001",
    "window": "window-size: [128, 0]",
    "latent": LATENT,
    "fused_gradients": "no-gradient-accumulation-fusion: true",
    "tensor": "tensor-model-parallel-size: 2\nexpert-tensor-parallel-size: 1",
    "context": "context-parallel-size: 2",
    "ring": "context-parallel-size: 2\nattention-dropout: 0",
    "expert": "expert-model-parallel-size: 4",
    "expert_tensor": "expert-tensor-parallel-size: 2\nexpert-model-parallel-size: 4",
    "recomputes": "recompute-granularity: full",
    "recompute_modules": "recompute-granularity: selective\nrecompute-modules: [moe_act]",
    "local": "transformer-impl: local",
    "splits_weights": "transformer-impl: transformer_engine",
    "replicas": "tensor-model-parallel-size: 2\nexpert-tensor-parallel-size: 1",
    "expert_replicas": "expert-model-parallel-size: 4",
    "shards_optimizer": "use-distributed-optimizer: true",
}
"""For each field of a block, keys of a model file that change it."""
NOT_OF_A_MODEL = {
    # The run, or the machines.
    "ranks_per_node",
    "imbalance",
    "rows_seen",
    # How the block runs, which a planner or a flag of AMPipe decides.
    "exchange",
    "condense",
    "places_reductions",
}


@pytest.mark.parametrize("name", [field.name for field in dataclasses.fields(Block)])
def test_every_field_of_a_block_has_a_source(name: str, tmp_path: Path) -> None:
    """Megatron's arguments and a benchmark's case become a model file, so there is no other converter."""
    if name in NOT_OF_A_MODEL:
        assert name not in FIELD_SOURCES
        return
    usual, _ = read(model_file(tmp_path))
    # A repeated key is refused, so the line replaces the one of the plain file.
    lines = FIELD_SOURCES[name] + "\n"
    keys = [line.partition(":")[0] for line in lines.splitlines()]
    kept = [line for line in PLAIN.splitlines() if line.partition(":")[0] not in keys]
    (tmp_path / "model.yaml").write_text("\n".join([*kept, lines]))
    changed, _ = read(tmp_path / "model.yaml")
    assert getattr(changed, name) != getattr(usual, name)


@pytest.mark.parametrize(
    ("lines", "splits"),
    [
        ("", False),
        ("transformer-impl: transformer_engine", True),
        ("transformer-impl: transformer_engine\nmoe-grouped-gemm: true", True),
        ("transformer-impl: local", True),
        ("transformer-impl: local\nmoe-grouped-gemm: true", False),
        ("transformer-impl: inference_optimized", False),
    ],
)
def test_weights_are_split_where_the_layers_are_known_to_do_so(
    lines: str, splits: bool, tmp_path: Path
) -> None:
    assert read(model_file(tmp_path, lines + "\n"))[0].splits_weights == splits


@pytest.mark.parametrize(
    ("line", "parts"),
    [
        ("ampipe: 4", ["model.yaml:10: ampipe", "must hold AMPipe's settings"]),
        ("ampipe:\n  degre: 4", ["model.yaml:11: degre: there is no such setting", "Did you mean degree?"]),
        ("ampip:\n  degree: 4", ["model.yaml:10: ampip: is a section, and only 'ampipe:' is one"]),
        ("micro-batch-size: 0", ["micro-batch-size 0", "must be greater than or equal to 1"]),
        ("moe-expert-capacity-factor: much", ["must be a valid number"]),
        ("window-size: [128, 4]", ["attends to later keys"]),
        ("context-parallel-size: 3", ["seq-length", "multiple of 6: 16386"]),
    ],
)
def test_an_error_is_reported_with_its_line(line: str, parts: list[str], tmp_path: Path) -> None:
    with pytest.raises(BadInput) as refused:
        read(model_file(tmp_path, line + "\n"))
    assert all(part in str(refused.value) for part in parts), refused.value


@pytest.mark.parametrize(
    ("overrides", "part"),
    [
        ({"num-expert": 4}, "--set num-expert 4: has no effect: .* Did you mean num-experts\\?"),
        ({"expert-model-parallel-size": 3}, "--set expert-model-parallel-size 3: must divide the 8 experts"),
        ({"moe-router-topk": 9}, "--set moe-router-topk 9: is above num-experts 8"),
        (
            {"num-experts": 64, "expert-model-parallel-size": 64},
            "size 64: must divide the 8 ranks of the run. Use 64 ranks, or --expert-model-parallel-size 8.$",
        ),
    ],
)
def test_values_from_the_command_line_are_checked_too(
    overrides: dict[str, Any], part: str, tmp_path: Path
) -> None:
    with pytest.raises(BadInput, match=part):
        read(model_file(tmp_path), overrides=overrides)


@pytest.mark.parametrize(
    ("ranks", "flags", "says"),
    [
        (8, "expert 32, num-experts 32", "must divide the 8 ranks of the run. Use 32 ranks, or --expert-"),
        (
            32,
            "expert 32, pipeline 2, num-experts 32, num-layers 4",
            "--expert-model-parallel-size 32 x --pipeline-model-parallel-size 2 is 64, which must divide the "
            "32 ranks of the run. Use 64 ranks, or --expert-model-parallel-size 16.",
        ),
        (8, "expert 8, num-experts 7", "must divide the 7 experts of a layer. Use --expert-model-parallel-"),
        (8, "tensor 16", "tensor-model-parallel-size 16: must divide the 8 ranks of the run. Use 16 ranks"),
        (
            8,
            "tensor 8, expert-tensor-parallel-size 1, num-query-groups 3, group-query-attention true",
            "3: must be a multiple or a divisor of --tensor-model-parallel-size 8",
        ),
        (32, "pipeline 4, num-layers 6", "cannot be split over 4 pipeline ranks. Use --num-layers 8, or"),
        (16, "pipeline 2, num-layers 8, num-layers-per-virtual-pipeline-stage 3", "3: must divide the 4 "),
        (8, "num-virtual-stages-per-pipeline-rank 2", "needs several pipeline ranks. Add --pipeline-mod"),
    ],
)
def test_a_layout_that_megatron_refuses_is_refused(ranks: int, flags: str, says: str, tmp_path: Path) -> None:
    """tests/megatron/test_layouts.py compares the rules with Megatron's."""
    overrides: dict[str, Any] = {}
    for flag, value in (pair.split() for pair in flags.split(", ")):
        name = f"{flag}-model-parallel-size" if flag in ("expert", "tensor", "pipeline") else flag
        overrides[name] = True if value == "true" else int(value)
    with pytest.raises(BadInput, match="--set ") as refused:
        read(model_file(tmp_path), overrides=overrides, ranks=ranks)
    assert says in str(refused.value)


def test_experts_that_no_rank_can_share_equally_stay_on_one_rank(tmp_path: Path) -> None:
    block, notes = read(
        model_file(tmp_path, without="expert-model-parallel-size: 8\n"), overrides={"num-experts": 7}
    )
    assert block.expert == 1
    assert any("1: the model names none; this is the largest that divides both 7" in note for note in notes)


def test_an_imbalance_that_cannot_occur_is_refused(tmp_path: Path) -> None:
    for imbalance in (0.5, 4.5):
        with pytest.raises(BadInput, match=rf"--imbalance {imbalance}: .* has 1 to 4 times the mean"):
            read(model_file(tmp_path), overrides={"moe-router-topk": 2}, imbalance=imbalance)


def test_a_misspelled_key_is_reported_and_unknown_flags_are_accepted(tmp_path: Path) -> None:
    lines = "moe-router-topkk: 1\na-flag-of-the-next-megatron: [3]\n"
    path = model_file(tmp_path, lines, without="moe-router-topk: 1\n")
    found, assumed = read(path)
    assert found.topk == 2
    assert assumed == (
        f"moe-router-topkk ({path}:9) is not read by the planner; did you mean moe-router-topk?",
    )
    wrong = model_file(tmp_path, "num-expert: 8\n", without="num-experts: 8\n")
    with pytest.raises(BadInput, match=r"num-experts: is missing\. Add .* Did you mean num-expert\?"):
        read(wrong)


@pytest.mark.parametrize(
    ("text", "layers", "dense"),
    [
        ("", 12, ()),
        ("moe-layer-freq: 3\n", 12, (1, 2, 4, 5, 7, 8, 10, 11)),
        ('moe-layer-freq: "([0]*1+[1]*11)"\n', 12, (0,)),
        ('moe-layer-freq: "([0]*1+[1]*11)"\npipeline-model-parallel-size: 4\n', 3, ()),
        ("pipeline-model-parallel-size: 2\nnum-layers-per-virtual-pipeline-stage: 2\n", 2, ()),
        ("pipeline-model-parallel-size: 2\nnum-virtual-stages-per-pipeline-rank: 3\n", 2, ()),
        ("hybrid-layer-pattern: M*E*EM*E-\n", 2, ()),
        ("hybrid-layer-pattern: '*-*EM*E'\n", 2, (0,)),
        ("hybrid-layer-pattern: '*E*E*EM|*EM/*E*E*E*E'\npipeline-model-parallel-size: 2\n", 3, ()),
        (
            "hybrid-layer-pattern: '*E*E*E*E*EM'\npipeline-model-parallel-size: 3\n"
            "decoder-first-pipeline-num-layers: 2\ndecoder-last-pipeline-num-layers: 3\n",
            3,
            (),
        ),
    ],
)
def test_layers_of_a_pipeline_stage(text: str, layers: int, dense: tuple[int, ...], tmp_path: Path) -> None:
    model = read_model(model_file(tmp_path, text))
    # A pipeline without virtual stages.
    waits = "pipeline-model" in text and "virtual" not in text
    assert layers_of(model) == StageLayers(layers, dense, waits)
    found, _ = block_of(model, None, ranks=64)
    assert found.dense_ffn == (4096 if dense else None)


@pytest.mark.parametrize(
    ("value", "rule"),
    [
        ('"([0]*1+[1]*9)"', "is of 10 layers, and num-layers is 12"),
        ('"[1]*1000000000"', "must be a valid"),
        ('"__import__(1)"', "must be a valid"),
    ],
)
def test_a_wrong_frequency_of_layers_is_refused(value: str, rule: str, tmp_path: Path) -> None:
    path = model_file(tmp_path, f"moe-layer-freq: {value}\n")
    with pytest.raises(BadInput, match=rf"model\.yaml:\d+: moe-layer-freq .*: {rule}"):
        layers_of(read_model(path))


def test_fixed_rows_need_a_dispatcher_that_sends_them(tmp_path: Path) -> None:
    path = model_file(tmp_path, "ampipe:\n  rows: fixed\n")
    assert read(path)[0].rows_margin == 1.25
    with pytest.raises(BadInput, match="moe-token-dispatcher-type allgather: cannot send fixed rows"):
        read(path, overrides={"moe-token-dispatcher-type": "allgather"})
