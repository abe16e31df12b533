"""How the outcomes of the ranks become the outcome of a test (tests/ranks.py)."""

import pytest

from tests.ranks import require_passed


def test_passed_on_every_rank() -> None:
    require_passed(["passed", "passed"])


def test_skipped_on_every_rank() -> None:
    with pytest.raises(pytest.skip.Exception, match="no GPU"):
        require_passed(["skipped: no GPU", "skipped: no GPU"])


@pytest.mark.parametrize(
    ("outcomes", "said"),
    [
        (["skipped: no GPU", "failed: 1 != 2"], "^rank 1 failed: 1 != 2\nrank 0 skipped: no GPU$"),
        (["skipped: no GPU", "passed"], "^rank 0 skipped: no GPU$"),
        (["passed", "did not run"], "^rank 1 did not run$"),
    ],
)
def test_anything_else_fails(outcomes: list[str], said: str) -> None:
    with pytest.raises(AssertionError, match=said):
        require_passed(outcomes)
