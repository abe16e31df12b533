"""Modules that must not import torch, and cycles. scripts/test.sh checks the rules between the packages."""

import sys
from graphlib import CycleError, TopologicalSorter

import grimp

from tests.forked import completed

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


def test_no_module_imports_itself_through_others() -> None:
    """Within a package too, which the contracts do not look at; imports for type checking count."""
    graph = grimp.build_graph("megatron_ampipe", exclude_type_checking_imports=False, cache_dir=None)
    order = TopologicalSorter({name: graph.find_modules_directly_imported_by(name) for name in graph.modules})
    try:
        order.prepare()
    except CycleError as error:
        raise AssertionError(" imports ".join(reversed(error.args[1]))) from error
