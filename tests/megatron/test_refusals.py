"""Every row of ``refusals.REFUSALS``, with Megatron's parser; one of them in a launch."""

import argparse
import contextlib
import itertools
import re
import shlex
from collections import Counter

import pytest

from megatron_ampipe.block.megatron_settings import Arguments
from megatron_ampipe.block.settings import Settings
from megatron_ampipe.errors import BadInput
from megatron_ampipe.launch import flags
from megatron_ampipe.launch.captured import captured_stages
from megatron_ampipe.launch.environment import exchanges_of
from megatron_ampipe.launch.refusals import REFUSALS, Refusal, refuse_unsupported
from megatron_ampipe.launch.run import prepare_arguments, requested
from megatron_ampipe.schedule import Exchange, Pipeline
from tests.megatron.launcher import MOCK_DATA, MODULE, REPOSITORY, TINY_GPT, execute, torchrun_command

DENSE = [*TINY_GPT, *MOCK_DATA, *shlex.split("--attention-dropout 0 --hidden-dropout 0 --ampipe-degree 4")]
ACCEPTED = [
    *DENSE,
    *shlex.split("--num-experts 4 --moe-token-dispatcher-type alltoall --disable-bias-linear"),
]
"""A command line that AMPipe accepts; every row is added to it."""

NCCLEP = "--moe-token-dispatcher-type flex --moe-flex-dispatcher-backend ncclep"
HYBRIDEP = "--moe-token-dispatcher-type flex --moe-flex-dispatcher-backend hybridep"
FP8 = "--fp8-format e4m3 --fp8-recipe blockwise --transformer-impl transformer_engine"
REFUSED = {
    "--ampipe-partner": ["--pipeline-model-parallel-size 2 --num-layers 4"],
    "--ampipe-schedule": ["lancet --transformer-impl transformer_engine --use-transformer-engine-op-fuser"],
    "--position-embedding-type": ["mrope --mrope-section 2 3 3"],
    "--qk-clip": [
        "--transformer-impl local",
        "--transformer-impl transformer_engine --context-parallel-size 2",
        "--transformer-impl transformer_engine --dataloader-inter-document-masking",
    ],
    "--log-max-attention-logit": ["--transformer-impl transformer_engine --sft"],
    "--window-size": ["8,8"],
    "--hybrid-layer-pattern": ["M*-", "*-/*E"],
    "--hybrid-layer-pattern (2)": ["ME --ampipe-cluster dgx-h100", "MEM* --ampipe-memory-budget 60GiB"],
    "--experimental-attention-variant": ["dsa"],
    "--micro-batch-size": [
        "4 --context-parallel-size 2 --sft",
        "4 --context-parallel-size 2 --dataloader-inter-document-masking",
    ],
    "--moe-token-dispatcher-type": ["flex --ampipe-memory rebuild/S2/keep/keep"],
    "--moe-token-dispatcher-type (2)": [
        "flex --moe-flex-dispatcher-backend hybridep --moe-hybridep-pad-uneven-dispatch-inputs",
    ],
    "--moe-ncclep-zero-copy": [f"{NCCLEP} --moe-ncclep-static-shape"],
    "--moe-ncclep-static-shape": [NCCLEP],
    "--skip-train": ["--ampipe-degree auto"],
    "--fp8-format": [
        f"{name} --fp8-recipe blockwise --transformer-impl local" for name in ("e4m3", "hybrid")
    ],
    "--fp8-recipe": [
        f"{name} --fp8-format e4m3 --transformer-impl transformer_engine" for name in ("delayed", "custom")
    ],
    "--te-precision-config-file": [str(REPOSITORY / "tests" / "megatron" / "precision.yaml")],
    "--ampipe-exchange": ["nodes --moe-token-dispatcher-type allgather"],
    "--ampipe-exchange (2)": ["ranks --moe-router-topk 1", "nodes --moe-router-topk 1"],
    "--ampipe-exchange (3)": ["ranks --moe-router-topk 2"],
    "--ampipe-exchange (4)": ["ranks --moe-router-topk 2 --expert-model-parallel-size 4"],
    "--ampipe-exchange (5)": ["nodes --moe-router-topk 2", "2dh --moe-router-topk 1"],
    "--ampipe-exchange (6)": [
        "nodes --moe-router-topk 2 --ampipe-ranks-per-node 8 --expert-model-parallel-size 4",
        "2dh --ampipe-ranks-per-node 1 --expert-model-parallel-size 4",
    ],
    "--ampipe-rows": [
        "fixed --moe-token-dispatcher-type allgather",
        "fixed --moe-token-dispatcher-type flex",
        "fixed --ampipe-exchange ranks --moe-router-topk 2 --expert-model-parallel-size 2",
    ],
    "--ampipe-rows (2)": [
        "fixed --transformer-impl transformer_engine",
        "fixed --transformer-impl inference_optimized --moe-grouped-gemm",
    ],
    "--ampipe-rows (3)": [
        "fixed --transformer-impl transformer_engine --moe-grouped-gemm --use-transformer-engine-op-fuser"
    ],
    "--ampipe-rows (4)": [f"fixed {HYBRIDEP} {FP8} --moe-grouped-gemm --micro-batch-size 64"],
    "--ampipe-rows (5)": [f"fixed {HYBRIDEP} --transformer-impl local --moe-permute-fusion-into-hybridep"],
    "--ampipe-rows (6)": [f"fixed {HYBRIDEP} --transformer-impl local --moe-expert-rank-capacity-factor 1.5"],
    "--ampipe-rows (7)": [
        f"fixed --transformer-impl local {others}"
        for others in (
            "--ampipe-condense 0.9",
            "--skip-train",
        )
    ],
    "--ampipe-rows-margin": ["1.5"],
    "--num-distributed-optimizer-instances": [
        "2 --ampipe-grad-reduce placed --overlap-grad-reduce --use-distributed-optimizer"
    ],
    "--cuda-graph-impl": ["full_iteration"],
    "--cuda-graph-impl (2)": [
        f"{implementation} --cuda-graph-modules attn {others}"
        for implementation, others in (
            ("local", "--ampipe-degree auto"),
            ("transformer_engine", "--ampipe-plan plan.yaml"),
            ("local", "--ampipe-memory-budget 40GiB"),
            ("local", "--ampipe-cluster dgx-h100"),
            # Graphs of stages in place of whole passes.
            ("local", "--ampipe-rows fixed --transformer-impl local --ampipe-degree auto"),
        )
    ],
    "--cuda-graph-impl (3)": [
        f"local {others} --ampipe-grad-reduce placed --overlap-grad-reduce"
        for others in (
            "--cuda-graph-modules attn",
            # In place of whole passes.
            "--ampipe-rows fixed --transformer-impl local --attention-dropout 0.1",
        )
    ],
    "--cuda-graph-impl (4)": ["transformer_engine --cuda-graph-modules attn --ampipe-partner"],
    "--cuda-graph-impl (5)": ["local --ampipe-rows fixed --transformer-impl local --ampipe-degree auto"],
    "--cuda-graph-impl (6)": [
        f"{implementation} --ampipe-rows fixed --transformer-impl local --recompute-granularity full {others}"
        for implementation, others in (("local", "--hidden-dropout 0.1"), ("transformer_engine", "--sft"))
    ],
    "--cuda-graph-impl (7)": [
        f"local --ampipe-rows fixed --transformer-impl local --ampipe-memory-budget 40GiB {others}"
        for others in ("", "--ampipe-memory auto")
    ],
    "--cuda-graph-impl (8)": [
        f"{name} --ampipe-rows fixed --moe-grouped-gemm --micro-batch-size 64 --fp8-param-gather {FP8}"
        for name in ("local", "transformer_engine")
    ],
    "--cuda-graph-impl (9)": [
        "local --ampipe-rows fixed --transformer-impl local --ampipe-partner --ampipe-grad-reduce placed "
        "--overlap-grad-reduce",
    ],
    "--cuda-graph-impl (10)": [
        "local --ampipe-rows fixed --transformer-impl local --ampipe-partner --global-batch-size 1024 "
        "--num-layers-per-virtual-pipeline-stage 1",
    ],
    "--tp-comm-overlap-cfg": [f"overlap.yaml --tp-comm-overlap {FP8}"],
    "--fine-grained-activation-offloading": [
        *(f"--offload-modules {modules}" for modules in ("core_attn attn_proj", "expert_fc1 mlp_norm")),
        # A launch that recomputes what the remedy of another row might name.
        "--offload-modules attn_norm --recompute-granularity selective --recompute-modules layernorm moe_act",
    ],
    "--fine-grained-activation-offloading (2)": [
        "--offload-modules expert_fc1 --recompute-granularity full",
        "--offload-modules moe_act --recompute-granularity selective --recompute-modules moe",
    ],
    "--fine-grained-activation-offloading (3)": [
        f"--offload-modules expert_fc1 {FP8}",
        "--offload-modules expert_fc1 --use-transformer-engine-op-fuser",
    ],
    "--fine-grained-activation-offloading (4)": ["--offload-modules expert_fc1 --ampipe-memory rebuild"],
    "--use-megatron-fsdp": ["--ampipe-partner"],
    "--use-megatron-fsdp (2)": ["--ampipe-grad-reduce placed"],
    "--ampipe-memory": [
        "rebuild --recompute-granularity selective --recompute-modules core_attn moe",
        "redispatch --recompute-granularity full",
    ],
    "--ampipe-memory (2)": [f"rebuild {FP8}"],
    "--ampipe-memory-budget": ["40GiB --use-transformer-engine-op-fuser", f"40GiB {FP8}"],
    "--ampipe-grad-reduce": ["placed"],
    "--ampipe-capacity-scope": ["chunk"],
    "--ampipe-router-scope": ["chunk"],
    "--ampipe-wire": [
        f"{name} --moe-token-dispatcher-type allgather" for name in ("fp8", "tests.wires:HalvesWire")
    ],
    "--ampipe-wire (2)": ["bf16 --bf16", "bf16 --fp16"],
    "--ampipe-condense": ["0.9 --moe-token-dispatcher-type allgather"],
    "--ampipe-condense (2)": ["0.9 --sft", "0.9 --reset-attention-mask"],
    "--ampipe-condense (3)": ["0.9 --moe-router-topk 1 --moe-apply-probs-on-input"],
    "--ampipe-trace-dir": ["traces --skip-train"],
    "--ampipe-measure": ["41-50 --skip-train"],
    "--ampipe-measure (2)": ["41-50 --train-iters 49"],
    "--ampipe-measure (3)": ["1-2 --train-iters 2"],
    "--ampipe-measure (4)": [
        "1-2 --train-iters 2 --expert-model-parallel-size 2 --cuda-graph-impl local --cuda-graph-modules attn"
    ],
}
"""What follows a flag that its row should refuse; else the test uses all choices but the default, or 2.

A second row of a flag has the number 2 after it, and so on.
"""


@pytest.fixture(scope="module")
def parser() -> argparse.ArgumentParser:
    return flags.full_parser()


def values_of(action: argparse.Action) -> list[str]:
    """Values of a flag that its row should refuse."""
    if action.nargs == 0:
        return [""]
    return [str(choice) for choice in action.choices or () if choice != action.default] or ["2"]


def names_of_rows() -> list[str]:
    """The names of all rows, as in :data:`REFUSED`."""
    numbers: Counter[str] = Counter()
    names = []
    for row in REFUSALS:
        numbers[row.setting] += 1
        names.append(row.setting + (f" ({numbers[row.setting]})" if numbers[row.setting] > 1 else ""))
    return names


def conflicts_in(text: str) -> list[str]:
    """The flags, of those that rows name with the refused value, that are in a command line."""
    named = {"--ampipe-cluster", "--ampipe-memory-budget", "--sft", "--dataloader-inter-document-masking"}
    named |= {"--reset-attention-mask", "--use-transformer-engine-op-fuser", "--ampipe-partner"}
    named |= {"--moe-apply-probs-on-input", "--bf16", "--fp16"}
    return [word for word in shlex.split(text) if word in named]


@pytest.mark.ranks(1)
@pytest.mark.parametrize(
    ("name", "row"), zip(names_of_rows(), REFUSALS, strict=True), ids=lambda value: str(value)[:60].strip("-")
)
def test_a_row_applies_to_the_parsed_value_of_its_flag(
    name: str, row: Refusal, parser: argparse.ArgumentParser, monkeypatch: pytest.MonkeyPatch
) -> None:
    # As on a login node; tests of ``tests.forked`` set it.
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    actions = {flag: action for action in parser._actions for flag in action.option_strings}
    texts = REFUSED.get(name) or values_of(actions[row.setting])
    command_lines = [[*ACCEPTED, row.setting, *shlex.split(text)] for text in texts]
    for words in [DENSE] if row.required else command_lines:
        args = parser.parse_args(words)
        # Settings that contradict each other are refused before.
        with contextlib.suppress(BadInput):
            prepare_arguments(args, requested(args))
        with pytest.raises(BadInput) as refused:
            refuse_unsupported(Settings(), Pipeline.of(4), args)
        error = refused.value
        assert error.name == row.setting
        assert error.exit_code == 2
        rule = f"with --ampipe-degree 4, {row.rule}"
        assert str(error) == str(BadInput(row.setting, error.value, rule=rule, remedy=row.remedy))
        given = list(itertools.takewhile(lambda word: not word.startswith("--"), words[len(ACCEPTED) + 1 :]))
        assert not given or any(word.split(",")[0] in str(error.value) for word in given)
        if not row.required:
            # With the value stands the flag that is in conflict with it.
            assert all(flag in str(error) for flag in conflicts_in(" ".join(words[len(ACCEPTED) + 1 :])))


@pytest.mark.parametrize(
    "words",
    [
        "--transformer-impl local --moe-grouped-gemm",
        "--transformer-impl transformer_engine --moe-grouped-gemm --ampipe-schedule lancet",
        "--transformer-impl transformer_engine --moe-grouped-gemm --ampipe-memory rebuild",
        *(
            f"{FP8.replace('blockwise', recipe)} --moe-grouped-gemm --micro-batch-size 64"
            for recipe in ("blockwise", "mxfp8", "tensorwise")
        ),
        # As whole passes.
        f"{FP8} --moe-grouped-gemm --micro-batch-size 64 --cuda-graph-impl local",
    ],
)
def test_experts_that_run_over_fixed_rows(words: str, parser: argparse.ArgumentParser) -> None:
    args = parser.parse_args([*ACCEPTED, "--ampipe-rows", "fixed", *shlex.split(words)])
    prepare_arguments(args, requested(args))
    refuse_unsupported(Settings(), Pipeline.of(4), args)


@pytest.mark.parametrize(
    "words",
    [
        *(
            f"--cuda-graph-modules {modules}"
            for modules in ("attn", "moe_router moe_preprocess --hidden-dropout 0.1", "moe --sft")
        ),
        "--attention-dropout 0.1",
        "--hidden-dropout 0.1",
        "--moe-input-jitter-eps 0.1",
        "--moe-router-load-balancing-type sinkhorn",
        "--moe-router-force-load-balancing",
        "--moe-expert-capacity-factor 1.5",
        "--ampipe-router cosine",
        "--ampipe-wire tests.wires:HalvesWire",
        "--ampipe-routing-dir routing",
        "--ampipe-memory rebuild",
        "--fine-grained-activation-offloading --offload-modules expert_fc1",
        "--reset-attention-mask",
        "--sft",
        "--dataloader-inter-document-masking",
    ],
)
def test_graphs_of_stages_over_fixed_rows(words: str, parser: argparse.ArgumentParser) -> None:
    given = f"--ampipe-rows fixed --transformer-impl local --cuda-graph-impl local {words}"
    args = parser.parse_args([*ACCEPTED, *shlex.split(given)])
    prepare_arguments(args, requested(args))
    refuse_unsupported(Settings(), Pipeline.of(4), args)
    graphs = captured_stages(args)
    assert graphs.stages and (graphs.no_passes is None) == ("--cuda-graph-modules" in words)


def test_a_rule_states_one_reason_and_the_flag_in_conflict_stands_with_the_value() -> None:
    """Rules of several conditions would leave users to find out which one applied."""
    for row in REFUSALS:
        named = set(re.findall(r"--[a-z0-9-]+", row.rule)) - {row.setting}
        assert len(named) <= 1, row


def test_an_exchange_is_refused_where_it_cannot_be_chosen_and_nowhere_else(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The rows give one reason each; together they are the rule of ``useful_exchanges``."""
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    rows = [row for row in REFUSALS if row.setting == "--ampipe-exchange"]
    sizes = {
        "ampipe_exchange": ["auto", *Exchange],
        "moe_token_dispatcher_type": ["alltoall", "allgather", "flex"],
        "moe_router_topk": [1, 2],
        "expert_model_parallel_size": [1, 2, 4, 8],
        "expert_tensor_parallel_size": [1, 2],
        "num_experts": [4, 8],
        "ampipe_ranks_per_node": [None, 1, 2, 4, 8],
    }
    num_refused = 0
    for values in itertools.product(*sizes.values()):
        named = dict(zip(sizes, values, strict=True))
        args = argparse.Namespace(**named, tensor_model_parallel_size=1)
        refused = [row.rule for row in rows if row.applies(Arguments(args)) is not None]
        allowed = named["ampipe_exchange"] in ("auto", *exchanges_of(args, named["ampipe_ranks_per_node"]))
        assert bool(refused) != allowed, (named, refused)
        num_refused += bool(refused)
    assert num_refused > 100


def test_a_node_of_unknown_size_is_no_fault_of_a_plan(
    parser: argparse.ArgumentParser, monkeypatch: pytest.MonkeyPatch
) -> None:
    at = ACCEPTED.index("--ampipe-degree")
    words = [*ACCEPTED[:at], *ACCEPTED[at + 2 :], "--moe-router-topk", "2", "--ampipe-plan", "plan.yaml"]
    args = parser.parse_args(words)
    settings, pipeline = Settings(plan="plan.yaml"), Pipeline.of(2, exchange=Exchange.NODES)
    for per_node, remedy in ((None, "Start the run with torchrun"), ("8", "Make one with ampipe plan")):
        monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
        if per_node is not None:
            monkeypatch.setenv("LOCAL_WORLD_SIZE", per_node)
        with pytest.raises(BadInput) as refused:
            refuse_unsupported(settings, pipeline, args)
        assert refused.value.remedy.startswith(remedy)


def test_rows_have_the_right_form_and_none_applies_twice_or_at_degree_1() -> None:
    rules = [(row.setting, row.rule) for row in REFUSALS]
    assert len(rules) == len(set(rules))
    refuse_unsupported(Settings(), Pipeline.of(1), argparse.Namespace(seq_length=64, window_size=(8, 0)))
    for row in REFUSALS:
        assert not row.rule.endswith(".")
        assert row.remedy.endswith(".") and not row.remedy.endswith("..")
        assert "--" in row.remedy or "Leave it out" in row.remedy or "Use " in row.remedy


def test_under_torchrun_the_message_is_printed_once() -> None:
    run = execute(torchrun_command("-m", MODULE, *ACCEPTED, "--mlp-chunks-for-training", "2"))
    expected = "--mlp-chunks-for-training 2: with --ampipe-degree 4, "
    # Not Run.error: both ranks write to one stream, and their lines can be interleaved.
    shown = f"traceback : error: {expected}"
    assert run.output.count(expected) - run.output.count(shown) == 1, run.output[-4000:]
    assert run.output.count("exitcode  : 2") == 2, "both ranks"
    # torchrun's last block contains the error of both ranks.
    assert run.output.count(shown) == 2
    assert run.output.count("Traceback (most recent call last)") == 1, "only torchrun's own"
    assert "initializing torch distributed" not in run.output
