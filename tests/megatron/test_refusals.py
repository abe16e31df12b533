"""Every row of ``refusals.REFUSALS``, with Megatron's parser; one of them in a launch."""

import argparse
import itertools
import shlex

import pytest

from megatron_ampipe.errors import BadInput
from megatron_ampipe.launch import flags
from megatron_ampipe.launch.refusals import REFUSALS, Refusal, refuse_unsupported
from megatron_ampipe.schedule import Pipeline
from megatron_ampipe.schedule.pipeline import AMPipeConfig
from tests.megatron.launcher import MOCK_DATA, MODULE, REPOSITORY, TINY_GPT, execute, torchrun_command

DENSE = [*TINY_GPT, *MOCK_DATA, *shlex.split("--attention-dropout 0 --hidden-dropout 0 --ampipe-degree 4")]
ACCEPTED = [
    *DENSE,
    *shlex.split("--num-experts 4 --moe-token-dispatcher-type alltoall --disable-bias-linear"),
]
"""A command line that AMPipe accepts; every row is added to it."""

REFUSED = {
    "--ampipe-partner": ["--pipeline-model-parallel-size 2 --num-layers 4"],
    "--ampipe-schedule": ["lancet --transformer-impl transformer_engine --use-transformer-engine-op-fuser"],
    "--position-embedding-type": ["mrope --mrope-section 2 3 3"],
    "--qk-clip": ["--transformer-impl local"],
    "--log-max-attention-logit": ["--transformer-impl local"],
    "--window-size": ["8,8"],
    "--hybrid-layer-pattern": ["M*-", "*-/*E"],
    "--experimental-attention-variant": ["dsa"],
    "--context-parallel-size": ["2 --sft"],
    "--moe-token-dispatcher-type": [
        "flex --ampipe-memory rebuild/S2/keep/keep",
        "flex --moe-flex-dispatcher-backend hybridep --moe-hybridep-pad-uneven-dispatch-inputs",
    ],
    "--moe-flex-dispatcher-backend": ["ncclep --moe-token-dispatcher-type flex"],
    "--skip-train": ["--ampipe-degree auto"],
    "--fp8-format": [
        f"{name} --fp8-recipe blockwise --transformer-impl local" for name in ("e4m3", "hybrid")
    ],
    "--fp8-recipe": [
        f"{name} --fp8-format e4m3 --transformer-impl transformer_engine" for name in ("delayed", "custom")
    ],
    "--te-precision-config-file": [str(REPOSITORY / "tests" / "megatron" / "precision.yaml")],
    "--ampipe-exchange": ["ranks", "nodes"],
    "--num-distributed-optimizer-instances": [
        "2 --ampipe-grad-reduce placed --overlap-grad-reduce --use-distributed-optimizer"
    ],
    "--cuda-graph-modules": ["moe --cuda-graph-impl local", "attn mamba --cuda-graph-impl local"],
    "--cuda-graph-impl": [
        "full_iteration",
        *(
            f"{implementation} --cuda-graph-modules attn {others}"
            for implementation, others in (
                ("local", "--hidden-dropout 0.1"),
                ("local", "--attention-dropout 0.1"),
                ("local", "--moe-input-jitter-eps 0.1"),
                ("local", "--ampipe-schedule joined --transformer-impl local"),
                ("local", "--ampipe-degree auto"),
                ("transformer_engine", "--ampipe-plan plan.yaml"),
                ("transformer_engine", "--ampipe-partner"),
                ("transformer_engine", "--recompute-granularity full"),
                ("local", "--tensor-model-parallel-size 2 --sequence-parallel"),
                ("local", "--context-parallel-size 2"),
                ("local", "--moe-router-load-balancing-type sinkhorn"),
                ("local", "--moe-expert-capacity-factor 1.5"),
                ("local", "--moe-enable-routing-replay"),
                ("local", "--moe-router-force-load-balancing"),
                ("local", "--sft"),
                ("local", "--ampipe-router cosine"),
                ("local", "--ampipe-memory rebuild"),
                ("local", "--ampipe-memory-budget 40GiB"),
                ("local", "--fp8-format e4m3 --fp8-recipe blockwise"),
                ("local", "--ampipe-grad-reduce placed --overlap-grad-reduce"),
                ("local", "--reset-attention-mask"),
            )
        ),
    ],
    "--fine-grained-activation-offloading": [
        f"--offload-modules {modules}" for modules in ("core_attn attn_proj", "expert_fc1 mlp_norm")
    ],
    "--use-megatron-fsdp": ["--ampipe-partner"],
    "--ampipe-memory": [
        f"{name} --recompute-granularity selective --recompute-modules core_attn moe"
        for name in ("rebuild", "redispatch")
    ],
    "--ampipe-memory-budget": ["40GiB --use-transformer-engine-op-fuser"],
    "--ampipe-grad-reduce": ["placed"],
    "--ampipe-capacity-scope": ["chunk"],
    "--ampipe-router-scope": ["chunk"],
    "--ampipe-wire": [
        f"{name} --moe-token-dispatcher-type allgather" for name in ("fp8", "tests.wires:HalvesWire")
    ],
    "--ampipe-condense": ["0.9 --moe-router-topk 1 --moe-apply-probs-on-input"],
    "--ampipe-trace-dir": ["traces --skip-train"],
}
"""What follows a flag that its row should refuse; else the test uses all choices but the default, or 2."""


@pytest.fixture(scope="module")
def parser() -> argparse.ArgumentParser:
    return flags.full_parser()


def values_of(action: argparse.Action) -> list[str]:
    """Values of a flag that its row should refuse."""
    if action.nargs == 0:
        return [""]
    return [str(choice) for choice in action.choices or () if choice != action.default] or ["2"]


@pytest.mark.ranks(1)
@pytest.mark.parametrize("row", REFUSALS, ids=lambda row: row.setting.strip("-"))
def test_a_row_applies_to_the_parsed_value_of_its_flag(row: Refusal, parser: argparse.ArgumentParser) -> None:
    actions = {flag: action for action in parser._actions for flag in action.option_strings}
    texts = REFUSED.get(row.setting) or values_of(actions[row.setting])
    command_lines = [[*ACCEPTED, row.setting, *shlex.split(text)] for text in texts]
    for words in [DENSE] if row.required else command_lines:
        with pytest.raises(BadInput) as refused:
            refuse_unsupported(AMPipeConfig(pipeline=Pipeline.of(4)), parser.parse_args(words))
        error = refused.value
        assert error.name == row.setting
        assert error.exit_code == 2
        rule = f"with --ampipe-degree 4, {row.rule}"
        assert str(error) == str(BadInput(row.setting, error.value, rule=rule, remedy=row.remedy))
        given = list(itertools.takewhile(lambda word: not word.startswith("--"), words[len(ACCEPTED) + 1 :]))
        assert not given or any(word.split(",")[0] in str(error.value) for word in given)


def test_rows_have_the_right_form_and_none_applies_twice_or_at_degree_1() -> None:
    settings = [row.setting for row in REFUSALS]
    assert len(settings) == len(set(settings))
    refuse_unsupported(AMPipeConfig(), argparse.Namespace(seq_length=64, window_size=(8, 0)))
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
