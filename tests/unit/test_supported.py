"""The page of supported combinations says what the tables say."""

from pathlib import Path

from tests.supported import flags_table, render

PAGE = Path(__file__).resolve().parents[2] / "docs" / "supported.md"


def test_page_is_up_to_date() -> None:
    assert PAGE.read_text() == "\n".join(render()) + "\n", (
        "run: python -m tests.supported > docs/supported.md"
    )


def test_usage_has_the_table_of_settings() -> None:
    """With ``--ampipe-config``, which cannot stand in a file."""
    table = "\n".join(flags_table())
    assert f"\n{table}\n" in PAGE.with_name("usage.md").read_text(), "run: python -m tests.supported flags"
