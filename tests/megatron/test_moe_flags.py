"""What flags of Megatron's MoE layers do in chunks, and by what that is known.

Not listed are those that a case of ``tests/dist/cases.py`` sets, that ``launch.run.SWITCHED_OFF`` has, or
that have a row in ``launch.refusals.REFUSALS``. All others do what they do in Megatron's layers:

- ``TESTED``, by ``PATH: TEXT``: the file with this text tests it; or by ``becomes FLAG``: Megatron turns it
  into another flag;
- ``_READ_BY``: known from reading the files of Megatron that use it; nothing here runs it. If another file
  begins to use it, read that.

``REFUSED`` are others that are refused.
"""

import argparse
import dataclasses
import functools
import importlib.util
import inspect
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from megatron_ampipe.launch.refusals import REFUSALS
from megatron_ampipe.launch.run import SWITCHED_OFF
from tests.dist.cases import PARITY
from tests.megatron.launcher import REPOSITORY, TINY_GPT

pytestmark = pytest.mark.ranks(1)

_FLAGS = {
    "tests/dist/blocks.py: num_moe_experts": "--num-experts",
    "tests/megatron/trainings.py: --moe-layer-freq": "--moe-layer-freq",
    "tests/megatron/test_training.py: --moe-use-upcycling": "--moe-use-upcycling",
    "tests/dist/test_memory.py: moe_ffn_hidden_size": "--moe-ffn-hidden-size",
    "tests/dist/blocks.py: moe_enable_routing_replay": "--moe-enable-routing-replay",
    "tests/dist/blocks.py: moe_router_pre_softmax": "--moe-router-pre-softmax",
    "tests/megatron/test_training.py: --moe-router-force-load-balancing": "--moe-router-force-load-balancing",
    "tests/dist/test_random.py: moe_input_jitter_eps": "--moe-input-jitter-eps",
    "tests/dist/test_flex_budget.py: moe_expert_rank_capacity_factor": "--moe-expert-rank-capacity-factor",
    "becomes --moe-flex-dispatcher-backend": "--moe-enable-deepep",
    "becomes --recompute-modules": "--moe-layer-recompute",
}
"""By the means."""

_EXPERTS = "core/transformer/moe/experts.py"
_DISPATCHER = "core/transformer/moe/token_dispatcher.py"
_FINALIZE = "core/distributed/finalize_model_grads.py"
_TRAINING = "training/training.py"
_TRANSFORMER_ENGINE = "core/extensions/transformer_engine.py"
_READ_BY = {
    # What Megatron does with a checkpoint.
    "--moe-upcycling-granularity": [_TRAINING],
    # After the backward passes of a step.
    "--moe-router-bias-update-rate": [_FINALIZE],
    "--moe-router-quantile-balancing-ema": [_FINALIZE],
    # Megatron prints what routers have logged.
    "--moe-per-layer-logging": [_TRAINING],
    # Inference, which runs Megatron's layers.
    "--moe-pad-experts-for-cuda-graph-inference": [
        "core/inference/text_generation_controllers/text_generation_controller.py"
    ],
    "--inference-moe-disable-fused-quant-kernels": [_EXPERTS],
    "--inference-moe-token-dispatcher-type": [
        "core/inference/contexts/dynamic_context.py",
        _EXPERTS,
        "core/transformer/moe/moe_layer.py",
        "core/transformer/moe/token_dispatcher_inference.py",
    ],
    "--rl-inference-expert-model-parallel-size": [_TRAINING],
    "--rl-inference-expert-tensor-model-parallel-size": [_TRAINING],
    # Modules that a stage calls, and specs that choose these modules.
    "--use-transformer-engine-op-fuser": [
        _EXPERTS,
        "core/transformer/moe/moe_utils.py",
        _DISPATCHER,
        "training/models/gpt.py",
    ],
    "--use-grouped-gemm-for-shared-expert": ["core/models/gpt/moe_module_specs.py"],
    "--moe-shared-expert-glu-interleave-size": ["core/transformer/moe/shared_experts.py"],
    "--moe-grouped-gemm": [
        "core/models/gpt/experimental_attention_variant_module_specs.py",
        "core/models/gpt/gpt_layer_specs.py",
        _DISPATCHER,
        "training/checkpointing.py",
        "training/models/gpt.py",
    ],
    "--moe-single-grouped-weight": [_TRANSFORMER_ENGINE, "training/checkpointing.py"],
    "--moe-single-grouped-bias": [_TRANSFORMER_ENGINE, "training/checkpointing.py"],
    "--moe-apply-probs-on-input": [_EXPERTS],
    "--moe-mlp-glu-interleave-size": [_EXPERTS],
    # Numbers for the library of the flex dispatcher, which Megatron's own code gives to it.
    "--moe-flex-dispatcher-num-sms": [_DISPATCHER],
    "--moe-deepep-num-sms": [],
    "--moe-hybridep-num-sms": [],
    "--moe-hybridep-num-blocks-permute": [_DISPATCHER],
    "--moe-hybridep-num-blocks-unpermute": [_DISPATCHER],
    "--moe-hybridep-num-sms-preprocessing": [_DISPATCHER],
    # Hooks of routers, which a block calls once (parity cases of replay).
    "--moe-routing-trace-path": [_TRAINING],
    "--moe-routing-trace-max-training-iters": [_TRAINING],
    "--moe-routing-trace-capture-logits": [_TRAINING],
    "--moe-routing-trace-capture-hidden-states": [_TRAINING],
    "--moe-routing-trace-dump-weights": [_TRAINING],
}
"""By the flag, all files of Megatron that read it, after those that parse and check it."""
_PARSERS = {"core/transformer/transformer_config.py", "training/arguments.py", "training/yaml_arguments.py"}

TESTED = {flag: means for means, flags in _FLAGS.items() for flag in flags.split()}
REFUSED = {
    "--moe-hybridep-pad-uneven-dispatch-inputs": "--moe-token-dispatcher-type",
    "--moe-ncclep-static-shape": "--moe-ncclep-static-shape",
    "--moe-ncclep-zero-copy": "--moe-ncclep-zero-copy",
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
    assert not {*TESTED, *_READ_BY} & {*SWITCHED_OFF, *REFUSED}
    assert not TESTED.keys() & _READ_BY.keys()
    assert set(REFUSED.values()) <= rows
    known = {*TESTED, *_READ_BY, *SWITCHED_OFF, *rows, *REFUSED}
    missing = {flag for flag in moe_flags() if flag not in known and not is_compared(flag)}
    assert not missing, f"say above what these do in chunks: {sorted(missing)}"


@pytest.mark.parametrize("flag", TESTED)
def test_the_means_exist(flag: str) -> None:
    means, _, text = TESTED[flag].partition(": ")
    if means.startswith("becomes "):
        other = means.removeprefix("becomes ")
        assert is_compared(other) or other == "--recompute-modules"
    else:
        assert text in (REPOSITORY / means).read_text()


@functools.cache
def sources() -> dict[str, str]:
    """The text of every file of Megatron, by its path in the package, except of those that parse flags."""
    spec = importlib.util.find_spec("megatron")
    assert spec is not None and spec.submodule_search_locations is not None
    texts = {}
    for folder in map(Path, spec.submodule_search_locations):
        for path in folder.rglob("*.py"):
            texts[path.relative_to(folder).as_posix()] = path.read_text()
    return {name: text for name, text in texts.items() if name not in _PARSERS}


@pytest.mark.parametrize("flag", _READ_BY)
def test_only_these_files_of_megatron_read_it(flag: str) -> None:
    field = flag.removeprefix("--").replace("-", "_")
    uses = re.compile(rf"\.{field}\b|['\"]{field}['\"]")
    readers = sorted(name for name, text in sources().items() if uses.search(text))
    assert readers == sorted(_READ_BY[flag]), f"what do these files do with {flag} in chunks?"


def test_megatron_cannot_upcycle() -> None:
    """If this fails, its upcycling may work: look at the stand-in of ``test_training.py``."""
    from megatron.training import training

    called = re.search(r"load_kwargs=\{\s*'(\w+)': dense_model", inspect.getsource(training))
    assert called is not None
    assert called[1] not in inspect.signature(training.load_checkpoint).parameters


_FIELD_OF_YAML = "account_for_embedding_in_pipeline_split"


@pytest.mark.parametrize("in_section", (True, False))
def test_megatron_reads_no_yaml_file(in_section: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """``--yaml-cfg`` needs a field at the top and in a section, and refuses it in both.

    If this fails, it may work: AMPipe refuses it, and docs/configuration.md says why.
    """
    from megatron.core.model_parallel_config import ModelParallelConfig
    from megatron.core.transformer import TransformerConfig
    from megatron.training import yaml_arguments
    from megatron.training.arguments import parse_args

    monkeypatch.setattr(sys, "argv", ["pretrain_gpt.py", *TINY_GPT])
    monkeypatch.setattr(yaml_arguments, "_print_args", lambda *_: None)
    args = parse_args()
    ranks = {field.name for field in dataclasses.fields(ModelParallelConfig)}
    model = {field.name for field in dataclasses.fields(TransformerConfig)} - ranks
    model |= {"bias_swiglu_fusion", "embedding_init_method"}
    top = {name: value for name, value in vars(args).items() if name not in model | ranks}
    sections = [{name: getattr(args, name, None) for name in names} for names in (model, ranks)]
    if not in_section:
        del sections[0][_FIELD_OF_YAML]
    names = ("language_model", "model_parallel")
    top |= {name: SimpleNamespace(**values) for name, values in zip(names, sections, strict=True)}
    file = SimpleNamespace(**top, **{_FIELD_OF_YAML: False}, disable_bias_linear=True)
    if in_section:
        with pytest.raises(TypeError, match=f"multiple values for keyword argument '{_FIELD_OF_YAML}'"):
            yaml_arguments.validate_yaml(file)
        return
    read = yaml_arguments.validate_yaml(file)
    with pytest.raises(Exception, match=f"Missing argument {_FIELD_OF_YAML}"):
        yaml_arguments.core_transformer_config_from_yaml(read, "language_model")
