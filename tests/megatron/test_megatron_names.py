"""Checks what AMPipe takes from Megatron in every version that is at hand; see :mod:`tests.internals`.

A change in another Megatron is then reported here, by name and with AMPipe's file that depends on it,
before it shows as a wrong gradient.
"""

import pytest

from tests.internals import MIRRORED, PAGE, RECORD, recorded, render, report_of, used
from tests.megatrons import at_hand, installed

AGAIN = "then run: python -m tests.internals"


def files_of(name: str) -> str:
    """The files that depend on a name, for a message."""
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
    for name in {*found["lacks"]} - {*known["lacks"]}:
        raise AssertionError(f"{version} has no megatron.{name}: adapt {files_of(name)}, {AGAIN}")
    assert found == known, AGAIN


def test_the_installed_version_has_every_name_and_takes_every_argument() -> None:
    assert recorded()[installed()]["lacks"] == recorded()[installed()]["refuses"] == []


def test_the_page_is_up_to_date() -> None:
    assert PAGE.read_text() == "\n".join(render()) + "\n", (
        f"{RECORD.name} has changed, or imports have: {AGAIN}"
    )
