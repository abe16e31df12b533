"""Checks every name of Megatron that AMPipe builds on (:mod:`tests.internals`).

A change in another Megatron is then reported here, by name and with AMPipe's file that depends on it,
before it shows as a wrong gradient. The checks run in one separate process, because the host platform has to
be in place before Megatron is imported: ``python -m tests.megatron.test_megatron_names`` prints them.
"""

from __future__ import annotations

import ast
import inspect
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.internals import INTERNALS, Fact, Internal, Subject, begins_with, behaves, has, render, says, takes
from tests.internals_seen import complaints_of, recorded, summary
from tests.megatron.launcher import REPOSITORY
from tests.megatrons import OLDER, at_hand

PACKAGE = REPOSITORY / "megatron_ampipe"
PAGE = REPOSITORY / "docs" / "internals.md"
ALL_OF_A_FOLDER = ("tools/measuring",)
"""Folders that are listed as one, in place of their files."""
BY_NAME = {internal.name: internal for internal in INTERNALS}


def complaints(internal: Internal) -> list[str]:
    """What is not as we rely on it."""
    try:
        subject = Subject.of(internal.name)
    except (ImportError, AttributeError) as error:
        return [f"it is not there any more ({error})"]
    found: list[str] = []
    for fact in internal.facts:
        try:
            found += fact(subject)
        except Exception as error:
            found.append(f"it cannot be checked any more ({type(error).__name__}: {error})")
    return found


def main() -> None:
    """Check every name in this process; the last line printed is the result as JSON."""
    from megatron_ampipe.launch import host

    if not host.gpu_available():
        host.install()
    print(json.dumps({internal.name: complaints(internal) for internal in INTERNALS}))


@pytest.fixture(scope="module")
def found() -> dict[str, dict[str, list[str]]]:
    """By version."""
    return {version: complaints_of(version) for version in at_hand()}


@pytest.mark.parametrize("version", at_hand())
def test_what_is_recorded_of_a_version_is_so(version: str, found: dict[str, dict[str, list[str]]]) -> None:
    assert summary(found[version]) == recorded()[version], "run: python -m tests.internals_seen"


class _Sample:
    """Stands for a class of Megatron in the test of the facts themselves."""

    def method(self, first: int, second: int) -> int:
        return first + second


@pytest.mark.parametrize(
    ("holds", "changed"),
    [
        (takes("second", method="method"), takes("third", method="method")),
        (begins_with("first", method="method"), begins_with("second", method="method")),
        (says("return first + second", method="method"), says("return first", "* 2", method="method")),
        (has("method"), has("other")),
        (behaves(lambda value: True), behaves(lambda value: False)),
        (takes("first", method="method"), takes("first", method="gone")),
    ],
)
def test_facts_notice_a_change(holds: Fact, changed: Fact) -> None:
    (source,) = ast.parse(inspect.getsource(_Sample)).body
    assert isinstance(source, ast.ClassDef)
    subject = Subject(_Sample, source)
    assert list(holds(subject)) == []
    assert list(changed(subject))


def test_no_name_is_listed_twice() -> None:
    assert len(BY_NAME) == len(INTERNALS)


@pytest.mark.parametrize("version", [version for version in at_hand() if version not in OLDER])
@pytest.mark.parametrize("name", BY_NAME)
def test_megatron_is_as_we_rely_on_it(
    name: str, version: str, found: dict[str, dict[str, list[str]]]
) -> None:
    files = ", ".join(f"megatron_ampipe/{path}" for path in BY_NAME[name].used_in.split())
    complaints = found[version][name]
    assert not complaints, (
        f"megatron.{name} has changed in {version}: {'; '.join(complaints)}. {files} depend on it "
        f"({BY_NAME[name].if_changed}): adapt them, then its facts in tests/internals.py."
    )


def test_the_page_is_up_to_date() -> None:
    assert PAGE.read_text() == "\n".join(render()) + "\n", (
        "run: python -m tests.internals > docs/internals.md"
    )


def test_every_import_of_megatron_is_listed() -> None:
    missing = []
    for path in sorted(PACKAGE.rglob("*.py")):
        file = path.relative_to(PACKAGE).as_posix()
        file = next((folder for folder in ALL_OF_A_FOLDER if file.startswith(f"{folder}/")), file)
        for name in _imports_of_megatron(path):
            # A module that is imported is there for some name in it.
            listed = [each for each in INTERNALS if f"{each.name}.".startswith(f"{name}.")]
            if not any(file in each.used_in.split() for each in listed):
                missing.append(f"{file} imports megatron.{name}")
    assert not missing, f"{'; '.join(missing)}: add it to INTERNALS in tests/internals.py"


def _imports_of_megatron(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        names: list[str] = []
        if isinstance(node, ast.ImportFrom) and node.module:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        yield from (name.removeprefix("megatron.") for name in names if name.startswith("megatron."))


def test_files_that_are_named_exist() -> None:
    named = {path for internal in INTERNALS for path in internal.used_in.split()}
    assert not [path for path in named if not (PACKAGE / path).exists()]


if __name__ == "__main__":
    main()
