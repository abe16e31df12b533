"""Modules that must not import torch, and cycles. scripts/test.sh checks the rules between the packages."""

import runpy
import sys
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import Any

import grimp
import pytest
import setuptools
from packaging.requirements import Requirement

from megatron_ampipe.tools import packages
from tests.forked import REPOSITORY, completed

LIGHT = (
    *("megatron_ampipe.cli", "megatron_ampipe.schedule.pipeline", "megatron_ampipe.files.timeline"),
    *("megatron_ampipe.plan.plan_file", "megatron_ampipe.launch.refusals"),
    *(
        f"megatron_ampipe.tools.{tool}_command"
        for tool in ("bench", "doctor", "draw", "plan", "routing", "sbatch")
    ),
)


def test_planning_drawing_and_help_import_neither_torch_nor_megatron() -> None:
    # setup() is replaced, so that this only reads the metadata.
    code = f"""
import contextlib, runpy, setuptools, sys, {", ".join(LIGHT)}
setuptools.setup = lambda **_: None
runpy.run_path("setup.py")
with contextlib.suppress(SystemExit):
    megatron_ampipe.cli.main(["--help"])
print("imported", {{"torch", "megatron"}} & sys.modules.keys())
"""
    result = completed(sys.executable, "-c", code)
    assert "usage: ampipe" in result.stdout
    assert result.stdout.endswith("imported set()\n")


WITHOUT = """
import sys

class Finder:
    def __init__(self, finder):
        self.finder = finder

    def find_spec(self, name, path=None, target=None):
        is_missing = name.partition(".")[0] in MISSING
        return None if is_missing else self.finder.find_spec(name, path, target)

    def __getattr__(self, name):
        return getattr(self.finder, name)

sys.meta_path[:] = [Finder(finder) for finder in sys.meta_path]
"""
"""A program's first lines, in which the packages of ``MISSING`` become ones that are not installed."""


def test_a_training_needs_no_package_of_the_tools() -> None:
    """Every module of a training is imported, those that a launch imports later included."""
    code = f"""
MISSING = {{"jinja2", "matplotlib", "scipy"}}
{WITHOUT}
import importlib, pkgutil
import megatron_ampipe.pretrain_gpt
from megatron_ampipe import attention, block, exchange, files, launch, layers, plan, runtime, schedule

for package in (attention, block, exchange, files, launch, layers, plan, runtime, schedule):
    for module in pkgutil.walk_packages(package.__path__, f"{{package.__name__}}."):
        if not module.name.endswith("__main__"):
            importlib.import_module(module.name)
print("imported", sys.modules["megatron_ampipe.launch.attach"].__name__, MISSING & sys.modules.keys())
"""
    done = completed(sys.executable, "-c", code, timeout_s=300)
    assert done.stdout.endswith("imported megatron_ampipe.launch.attach set()\n")


TOOLS = {
    "jinja2": "sbatch --nodes 1 --gpus-per-node 8 --model tiny --no-check",
    "matplotlib": "bench --link none --plot a.png",
    "matplotlib ": "draw traces",
    "matplotlib  ": "routing records --picture a.png",
    "scipy": "profile --output a.yaml",
    "tqdm": "bench",
    "tqdm ": "data --output a",
}
"""A command that needs each package of the extra ``tools``."""


def test_a_tool_without_its_package_names_the_extra(tmp_path: Path) -> None:
    """Before it measures or writes anything, and in one line."""
    for package, words in TOOLS.items():
        missing = package.strip()
        # The traces, the records and the grid are not looked at before.
        code = f"MISSING = {{{missing!r}}}\n{WITHOUT}\nfrom megatron_ampipe import cli; sys.exit(cli.main())"
        done = completed(sys.executable, "-c", code, *words.split(), cwd=tmp_path, code=1)
        (line,) = done.stderr.splitlines()
        assert missing in line and line.endswith("Run: pip install 'megatron-ampipe[tools]'"), line
    assert not list(tmp_path.iterdir())


def test_the_extra_of_the_tools_is_what_the_message_installs(monkeypatch: pytest.MonkeyPatch) -> None:
    metadata: dict[str, Any] = {}
    monkeypatch.setattr(setuptools, "setup", lambda **fields: metadata.update(fields))
    runpy.run_path(str(REPOSITORY / "setup.py"))
    tools = {Requirement(line).name.lower() for line in metadata["extras_require"]["tools"]}
    always = {Requirement(line).name.lower() for line in metadata["install_requires"]}
    assert tools == set(packages.PACKAGES)
    assert not tools & always


def test_no_module_imports_itself_through_others() -> None:
    """Within a package too, which the contracts do not look at; imports for type checking count."""
    graph = grimp.build_graph("megatron_ampipe", exclude_type_checking_imports=False, cache_dir=None)
    order = TopologicalSorter({name: graph.find_modules_directly_imported_by(name) for name in graph.modules})
    try:
        order.prepare()
    except CycleError as error:
        raise AssertionError(" imports ".join(reversed(error.args[1]))) from error
