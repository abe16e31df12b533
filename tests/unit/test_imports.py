"""The import rules between the packages, and modules that must not import torch."""

import ast
import subprocess
import sys
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import grimp
import pytest

ROOT = Path(__file__).resolve().parents[2]
LINT_IMPORTS = Path(sys.executable).with_name("lint-imports")


def heavy_modules_after(code: str) -> tuple[set[str], str]:
    """Run ``code`` in a new interpreter; returns which of torch and Megatron it imported, and its output."""
    report = "import sys; print('imported', *({'torch', 'megatron'} & sys.modules.keys()))"
    result = subprocess.run(
        [sys.executable, "-c", f"{code}\n{report}"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr
    *_, last = result.stdout.splitlines()
    assert last.startswith("imported"), result.stdout
    return set(last.split()[1:]), result.stdout


@pytest.mark.skipif(not LINT_IMPORTS.exists(), reason="import-linter is missing; install the [test] extra")
def test_import_contracts_hold() -> None:
    result = subprocess.run(
        [LINT_IMPORTS, "--no-cache"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stdout + result.stderr


def test_every_file_and_every_class_has_a_unique_name() -> None:
    """Of the whole package: a name in a message, a log or a review then means one thing."""
    files: dict[str, list[str]] = {}
    classes: dict[str, list[str]] = {}
    for path in sorted((ROOT / "megatron_ampipe").rglob("*.py")):
        where = str(path.relative_to(ROOT))
        if path.name not in ("__init__.py", "__main__.py"):
            files.setdefault(path.name, []).append(where)
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                classes.setdefault(node.name, []).append(where)
    assert len(files) > 100 and len(classes) > 100
    shared = {name: places for name, places in (files | classes).items() if len(places) > 1}
    assert not shared


LIGHT = (
    *("megatron_ampipe.cli", "megatron_ampipe.schedule.pipeline", "megatron_ampipe.files.timeline"),
    *("megatron_ampipe.plan.plan_file", "megatron_ampipe.launch.refusals"),
    *(f"megatron_ampipe.tools.{tool}_command" for tool in ("doctor", "draw", "plan", "sbatch")),
)


def test_planning_drawing_and_help_import_neither_torch_nor_megatron() -> None:
    # setup() is replaced, so that this only reads the metadata.
    code = f"""
import contextlib, runpy, setuptools, {", ".join(LIGHT)}
setuptools.setup = lambda **_: None
runpy.run_path("setup.py")
with contextlib.suppress(SystemExit):
    megatron_ampipe.cli.main(["--help"])
"""
    imported, output = heavy_modules_after(code)
    assert "usage: ampipe" in output
    assert imported == set()


def test_runtime_does_not_import_megatron() -> None:
    imported, _ = heavy_modules_after("import megatron_ampipe.runtime")
    assert "megatron" not in imported


def test_no_module_imports_itself_through_others() -> None:
    """Within a package too, which the contracts do not look at; imports for type checking count."""
    graph = grimp.build_graph("megatron_ampipe", exclude_type_checking_imports=False, cache_dir=None)
    order = TopologicalSorter({name: graph.find_modules_directly_imported_by(name) for name in graph.modules})
    try:
        order.prepare()
    except CycleError as error:
        raise AssertionError(" imports ".join(reversed(error.args[1]))) from error
