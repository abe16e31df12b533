"""What ``patches/`` proposes to Megatron: the patch applies, its tests pass, AMPipe needs no more."""

import importlib.util
import os
import shutil
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from megatron_ampipe.schedule.pipeline import AMPipeConfig
from tests.dist.cases import LARGE, Case
from tests.dist.worker import use_groups
from tests.forked import completed
from tests.megatrons import CHECKOUT, NEXT, folder_of, installed, megatron_of

PATCH = Path(__file__).resolve().parents[2] / "patches" / "layer-range-runner.patch"
BLOCK = "megatron/core/transformer/transformer_block.py"
ITS_TESTS = "tests/unit_tests/transformer/test_layer_range_runner.py"
VERSIONS = (installed(), *([NEXT] if CHECKOUT is not None else []))
PATCHED = """
import importlib.util, sys, pytest
spec = importlib.util.spec_from_file_location("megatron.core.transformer.transformer_block", sys.argv[1])
sys.modules[spec.name] = module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
sys.exit(pytest.main([*"-q -p no:cacheprovider --noconftest --rootdir".split(), *sys.argv[2:]]))
"""
"""Runs tests with a file in place of Megatron's."""


def git_apply(folder: Path, *options: str) -> str:
    alone = {**os.environ, "GIT_CEILING_DIRECTORIES": str(folder.parent)}
    return completed("git", "apply", *options, PATCH, cwd=folder, env=alone).stdout


def patched(folder: Path, version: str) -> Path:
    """A folder with the patched file of a version, and the tests of the patch."""
    copy = folder / BLOCK
    copy.parent.mkdir(parents=True)
    shutil.copy(megatron_of(version).parent / BLOCK, copy)
    git_apply(folder)
    return folder


@pytest.mark.parametrize("version", VERSIONS)
def test_the_patch_applies_and_is_taken_back(version: str, tmp_path: Path) -> None:
    changes = [line.split("\t") for line in git_apply(tmp_path, "--numstat").splitlines()]
    assert [(deleted, name) for _, deleted, name in changes] == [("1", BLOCK), ("0", ITS_TESTS)]
    patched(tmp_path, version)
    git_apply(tmp_path, "--reverse")
    assert (tmp_path / BLOCK).read_bytes() == (megatron_of(version).parent / BLOCK).read_bytes()
    assert not (tmp_path / ITS_TESTS).exists()


@pytest.mark.parametrize("version", VERSIONS)
def test_its_own_tests_pass(version: str, tmp_path: Path) -> None:
    folder = folder_of(version)
    paths = {} if folder is None else {"PYTHONPATH": str(folder)}
    patched(tmp_path, version)
    words = (sys.executable, "-c", PATCHED, BLOCK, tmp_path, ITS_TESTS)
    done = completed(*words, cwd=tmp_path, env={**os.environ, **paths, "OMP_NUM_THREADS": "1"})
    assert "14 passed" in done.stdout, done.stdout


def load(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location("patched_transformer_block", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.ranks(2)
def test_stock_numbers_are_unchanged_and_schedules_run_by_the_hook(tmp_path: Path) -> None:
    from megatron.core.transformer import transformer_block as stock

    from megatron_ampipe.layers.context import AMPipeContext
    from megatron_ampipe.layers.layer import pipelined
    from megatron_ampipe.runtime.executors import ThreadExecutor
    from megatron_ampipe.runtime.recorder import Recorder
    from tests.dist import logged_losses
    from tests.dist.blocks import differences, inputs_of, layer_specs, transformer_config

    use_groups()
    case = Case("of the hook", layers="mdmm", stack=0, degree=2, batch=2, model=LARGE)
    config, inputs = transformer_config(case), inputs_of(case, rank=0, dtype=torch.float32)
    changed = load(patched(tmp_path, installed()) / BLOCK)
    specs = layer_specs(case, config)

    def block(module: Any, layers: list[Any]) -> Any:
        torch.manual_seed(11)
        made = module.TransformerBlockSubmodules(layer_specs=layers)
        return module.TransformerBlock(config, made, post_layer_norm=False)

    def results(block: Any) -> dict[str, torch.Tensor]:
        logged_losses.clear()
        block.zero_grad()
        hidden = inputs.hidden.clone().requires_grad_()
        output = block(hidden, attention_mask=None)
        output.backward(inputs.gradient)
        assert hidden.grad is not None
        gradients = {f"gradient of {name}": x.grad.clone() for name, x in block.named_parameters()}
        return {"output": output.detach(), "input gradient": hidden.grad, **gradients}

    expected, unused = results(block(stock, specs)), block(changed, specs)
    assert not any(differences(expected, results(unused)).values())

    context = AMPipeContext(
        AMPipeConfig(pipeline=case.pipeline), recorder=Recorder(), executor=ThreadExecutor()
    )
    layers = pipelined(stock.TransformerBlockSubmodules(layer_specs=specs), context).layer_specs
    ours = block(changed, layers)
    ours.load_state_dict(unused.state_dict())
    calls = []

    def run(layers: Any, *, hidden_states: torch.Tensor, context: Any, rotary_pos_emb: Any, **_: Any) -> Any:
        calls.append(len(layers))
        return layers[0]._stack()(hidden_states, rotary_pos_emb, None), context

    ours.set_layer_range_runner(0, len(case.layers), run)
    wrong = {name: value for name, value in differences(expected, results(ours)).items() if value > 1e-5}
    assert calls == [4] and not wrong
