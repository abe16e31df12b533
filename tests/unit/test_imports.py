"""The import rules between the packages, and modules that must not import torch."""

import ast
import subprocess
import sys
import tomllib
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


def test_plan_is_in_the_import_rules() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]
    _, laptop, *_ = settings["importlinter"]["contracts"]
    assert "megatron_ampipe.plan" in laptop["source_modules"]
    assert "megatron_ampipe/plan" in settings["mypy"]["files"]


def test_contracts_count_imports_for_type_checking() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]
    assert settings["importlinter"]["exclude_type_checking_imports"] is False


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


@pytest.mark.parametrize(
    "module",
    [
        "megatron_ampipe",
        "megatron_ampipe.cli",
        "megatron_ampipe.schedule.config",
        "megatron_ampipe.errors",
        "megatron_ampipe.plan.plan_file",
        "megatron_ampipe.launch.refusals",
        "megatron_ampipe.schedule",
        "megatron_ampipe.files.timeline",
        "megatron_ampipe.tools.doctor_command",
        "megatron_ampipe.tools.draw_command",
        "megatron_ampipe.tools.plan_command",
        "megatron_ampipe.tools.sbatch_command",
    ],
)
def test_importing_it_imports_neither_torch_nor_megatron(module: str) -> None:
    imported, _ = heavy_modules_after(f"import {module}")
    assert imported == set()


def test_runtime_does_not_import_megatron() -> None:
    imported, _ = heavy_modules_after("import megatron_ampipe.runtime")
    assert "megatron" not in imported


def test_the_command_prints_its_help_without_torch() -> None:
    code = """
import contextlib, sys
from megatron_ampipe.cli import main
sys.argv = ["ampipe", "--help"]
with contextlib.suppress(SystemExit):
    main()
"""
    imported, output = heavy_modules_after(code)
    assert "usage: ampipe" in output
    assert imported == set()


def test_metadata_is_read_without_torch() -> None:
    # setup() is replaced, so that this only reads the file.
    code = "import setuptools, runpy; setuptools.setup = lambda **_: None; runpy.run_path('setup.py')"
    imported, _ = heavy_modules_after(code)
    assert imported == set()


def test_no_module_imports_itself_through_others() -> None:
    """Within a package too, which the contracts do not look at; imports for type checking count."""
    graph = grimp.build_graph("megatron_ampipe", exclude_type_checking_imports=False, cache_dir=None)
    order = TopologicalSorter({name: graph.find_modules_directly_imported_by(name) for name in graph.modules})
    try:
        order.prepare()
    except CycleError as error:
        raise AssertionError(" imports ".join(reversed(error.args[1]))) from error
