"""The pages, and the words in the code, keep to the agreed wording (tests/prose.py)."""

from __future__ import annotations

import pytest

from tests import prose


def test_nothing_is_left_to_change() -> None:
    left = prose.report(prose.COVERED)
    assert not left, "\n".join(left)


@pytest.mark.parametrize("wording", prose.WORDINGS, ids=lambda wording: wording.example)
def test_each_phrase_is_found_in_its_example(wording: prose.Wording) -> None:
    assert wording.instead in {finding.instead for finding in prose.findings(wording.example)}


@pytest.mark.parametrize("sentence", prose.FINE)
def test_plain_sentences_are_left_alone(sentence: str) -> None:
    assert not list(prose.findings(sentence))


def test_python_is_read_as_comments_docstrings_and_messages() -> None:
    source = (
        '"""One thread, of its\nown."""\n'
        "beside = 1  # shown beside stock\n"
        'print(f"{beside} held against" " stock")\n'
        "# one chunk\n# behind the other\n"
    )
    found = [(finding.line, finding.found) for finding in prose.findings(prose.prose_of_python(source))]
    assert sorted(found) == [(1, "of its own"), (3, "beside"), (4, "held against"), (6, "behind")]


def test_a_literal_that_goes_on_in_the_next_line_is_one_sentence() -> None:
    source = 'print(\n    "a thread of its "\n    "own"\n)\n'
    assert [finding.found for finding in prose.findings(prose.prose_of_python(source))] == ["of its own"]


def test_code_in_a_page_is_not_prose() -> None:
    page = "Shown\n\n```\nbeside\n```\n\nnext to it, beside.\n"
    assert [finding.line for finding in prose.findings(prose.prose_of_markdown(page))] == [7]


def test_released_sections_of_the_changelog_are_history() -> None:
    changelog = "# Changelog\n\n## [Unreleased]\n\n- plain\n\n## [0.1]\n\n- held against\n"
    assert not list(prose.findings(prose.newest_section(changelog)))


def test_what_is_covered_exists() -> None:
    assert all((prose.ROOT / name).exists() for name in prose.COVERED)
