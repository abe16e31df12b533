"""Checks what AMPipe takes from Megatron in every version that is at hand; see :mod:`tests.internals`.

A change in another Megatron is then reported here, by name and with AMPipe's file that depends on it,
before it shows as a wrong gradient.
"""

import importlib.util
import os
import re
import sys
from pathlib import Path

import pytest

from tests import foreign
from tests.forked import REPOSITORY, completed
from tests.internals import (
    MIRRORED,
    PAGE,
    RECORD,
    REPLACED,
    WHERE_PRESENT,
    lacks_of,
    look_up_torch,
    recorded,
    recorded_torch,
    render,
    report_of,
    torch_version,
    used,
)
from tests.megatrons import at_hand, installed, megatron_of

AGAIN = "then run: python -m tests.internals"


def files_of(name: str) -> str:
    """The files that depend on a name, for a message."""
    own = foreign.scan()
    if files := own.replaced.get(name, set()) | own.names.get(f"megatron.{name}", set()):
        return ", ".join(sorted(files))
    near = [use for other, use in used().items() if f"{other}.".startswith(f"{name}.") or other == name]
    return ", ".join(sorted({file for use in near for file in use.files})) or "what mirrors it"


@pytest.mark.parametrize("version", at_hand())
def test_a_version_is_as_it_was_when_the_package_was_adapted_to_it(version: str) -> None:
    found, known = report_of(version), recorded()[version]
    for name, code in known["sources"].items():
        assert found["sources"].get(name) == code, (
            f"the code of megatron.{name} ({MIRRORED[name] or 'all of it'}) is another one in {version}: "
            f"compare it with {files_of(name)}, {AGAIN}"
        )
    for name, described in known["replaced"].items():
        now = found["replaced"].get(name)
        assert now == described, (
            f"megatron.{name}, which AMPipe replaces, was {described} in {version} and is {now}: "
            f"read {files_of(name)} again, {AGAIN}"
        )
    for name in {*found["lacks"]} - {*known["lacks"]}:
        raise AssertionError(f"{version} has no megatron.{name}: adapt {files_of(name)}, {AGAIN}")
    assert found == known, AGAIN


def test_the_installed_version_has_every_name_and_takes_every_argument() -> None:
    newest = recorded()[installed()]
    assert {*newest["lacks"]} <= WHERE_PRESENT and newest["refuses"] == []


def test_everything_that_is_replaced_or_has_an_underscore_is_known() -> None:
    found = foreign.scan()
    assert not found.unknown, "say in tests/foreign.py whose these are:\n" + "\n".join(found.unknown)
    new = {name: sorted(found.replaced[name]) for name in {*found.replaced} - {*REPLACED}}
    assert not new, f"say in REPLACED of tests/internals.py what is compared of {new}, {AGAIN}"
    assert {*REPLACED} <= {*found.replaced}, f"no longer replaced: {sorted({*REPLACED} - {*found.replaced})}"
    entries = {*foreign.OF_OBJECTS, *foreign.UNGUARDED, *foreign.ON_OBJECTS, *foreign.BY_VARIABLE}
    assert entries | foreign.OTHER_ATTRIBUTES == found.used, "tests/foreign.py names what no file uses"


def test_what_has_an_underscore_in_torch_is_as_it_was() -> None:
    """In another torch than the recorded ones, as in the newest of them."""
    versions = recorded_torch()
    version = torch_version()
    recorded_version = version if version in versions else [*versions][-1]
    found, known = look_up_torch(), versions[recorded_version]
    for name, described in found.items():
        files = ", ".join(sorted(foreign.scan().names[name]))
        assert described is not None, f"torch {version} has no {name}: adapt {files}, {AGAIN}"
        assert name in known, f"{name}, used in {files}, is new: {AGAIN}"
        assert described == known[name], (
            f"{name} was {known[name]} in torch {recorded_version} and is {described} in {version}: "
            f"read {files} again, {AGAIN}"
        )
    assert found.keys() == known.keys(), AGAIN


@pytest.mark.parametrize("package", foreign.OPTIONAL)
def test_an_installed_package_has_every_name(package: str) -> None:
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed")
    for name in lacks_of(package):
        raise AssertionError(f"there is no {name}: adapt {', '.join(sorted(foreign.scan().names[name]))}")


def test_the_page_is_up_to_date() -> None:
    assert PAGE.read_text() == "\n".join(render()) + "\n", (
        f"{RECORD.name} has changed, or imports have: {AGAIN}"
    )


def test_a_name_that_a_package_lost_is_found(tmp_path: Path) -> None:
    """In a Transformer Engine of which two names are left."""
    files = {
        "__init__.py": "",
        "attention/__init__.py": "",
        "attention/dot_product_attention.py": "_attention_backends = {}",
        "module/__init__.py": "",
        "module/base.py": "class TransformerEngineBaseModule:\n"
        "    def __init__(self):\n        self._fp8_workspaces = {}",
    }
    for name, text in files.items():
        path = tmp_path / "transformer_engine" / "pytorch" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    code = "from tests.internals import lacks_of; print(*lacks_of('transformer_engine'))"
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), str(REPOSITORY)])}
    lost = completed(sys.executable, "-c", code, env=env).stdout.split()
    assert {name.removeprefix("transformer_engine.pytorch.") for name in lost} == {
        "distributed",
        "fp8",
        "fp8.FP8GlobalStateManager.is_fp8_enabled",
        "fp8_autocast",
    }


HOOKING = {
    "core/distributed/distributed_data_parallel.py": "waits for parameters: stages call every module",
    "core/distributed/fsdp": "--use-megatron-fsdp: hooks of layers, each of which is a stack",
    "core/extensions/transformer_engine.py": "inside of one module of Transformer Engine, which is called",
    "core/inference": "not in training",
    "core/models/mimo": "not a GPT",
    "core/transformer/moe/experts.py": "inside of the experts, which are called",
    "core/transformer/moe/shared_experts.py": "inside of the shared experts, which are called",
    "core/transformer/moe/router_trace.py": "--moe-routing-trace-path: routers call hooks once for a block",
    "elastification": "no flag of a GPT; hooks of attention and MoE layers are refused when they run",
    "training/activation_logging.py": "--save-activations-interval and -tokens-per-expert-: refused",
    "training/dgrad_logging.py": "--save-dgrads-interval: refused",
    "training/distillation": "the output layer, which is in no block",
    "training/logits_saver.py": "the output layer",
    "training/cached_logits_loss.py": "the output layer",
}
"""Files and folders of Megatron that hook modules, and what AMPipe does with these hooks."""


@pytest.mark.parametrize("version", at_hand())
def test_every_hook_of_megatron_is_known(version: str) -> None:
    """A flag that hooks modules would see chunks."""
    root = megatron_of(version)
    register = re.compile(r"\.register_(module_)?(forward|full_backward|backward)(_pre)?_hook\(")
    files = [str(file.relative_to(root)) for file in root.rglob("*.py") if register.search(file.read_text())]
    assert files, "the search finds nothing"
    unknown = [file for file in files if not file.startswith(tuple(HOOKING))]
    assert not unknown, f"refuse the flags that hook modules, or say why they may: {unknown}"
