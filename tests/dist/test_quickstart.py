"""The quick start as a newcomer runs it, over a real slow network where one can be made."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.dist.test_bench import environment
from tests.forked import REPOSITORY, completed
from tests.unit.test_ranks import HAS_NETWORK, needs_network, possible

# A run that shows a speedup needs both cores, and the time of a few iterations over a slow link.
pytestmark = [pytest.mark.alone, pytest.mark.slow, pytest.mark.timeout(400)]

LEAST_GAIN = 1.15
"""What overlap alone gains, whatever else the machine does; chunks one after another gain nothing.

Of the fastest iterations: other work slows some of them, and rarely all.
"""

CHOOSE = """
from megatron_ampipe.tools.quickstart import choose_link
link, why = choose_link(None)
print(link.text, why, sep="|")
"""
IN_USER_NAMESPACE = ("unshare", "--user", "--map-root-user", "--")
"""As in scripts/quickstart.sh."""
WITHOUT_RIGHTS = ("setpriv", "--bounding-set=-all,+setfcap", "--inh-caps=-all", "--")
"""Root's files and none of its rights, except that without which it may not be mapped to root."""


def test_it_is_faster_over_a_slow_link_with_the_same_losses(tmp_path: Path) -> None:
    folder = tmp_path
    words = ("-m", "megatron_ampipe.tools.quickstart", "--output", folder, "--iterations", "8")
    done = completed(sys.executable, *words, env=environment(folder), timeout_s=360)
    # torch's cache may stay.
    assert not list((folder / "temporary").glob("ampipe-ranks-*"))
    summary: dict[str, Any] = json.loads((folder / "summary.json").read_text())
    assert Path(summary["timeline"]).is_file()
    assert "iteration" in Path(summary["baseline"]["log"]).read_text()
    assert len(summary["ampipe"]["losses"]) == 8
    # Seven digits are logged: the last one may be rounded the other way.
    assert summary["ampipe"]["losses"] == pytest.approx(summary["baseline"]["losses"], rel=1e-6, abs=0)
    assert summary["max_loss_diff"] <= 1e-6
    # 0 where nothing is overlapped.
    assert 0.2 < summary["hidden_share"] <= 1
    assert done.stdout.startswith("link: ")
    assert f"{summary['speedup']:.2f} times Megatron's speed, same losses" in done.stdout
    assert summary["link"]["kind"] == ("real" if HAS_NETWORK else "emulated")
    assert summary["link"]["rate_mbit_per_s"] == 100
    stock, ampipe = (min(summary[run]["ms"][summary["warmup"] :]) for run in ("baseline", "ampipe"))
    assert stock / ampipe >= LEAST_GAIN


def chosen(*prefix: str) -> list[str]:
    """What is chosen by a process that is started with this prefix."""
    return completed(*prefix, sys.executable, "-c", CHOOSE).stdout.strip().split("|")


@needs_network
@pytest.mark.skipif(
    not possible(*WITHOUT_RIGHTS, *IN_USER_NAMESPACE), reason="no user namespaces without rights"
)
def test_without_rights_a_real_network_is_made_in_a_user_namespace() -> None:
    assert chosen(*WITHOUT_RIGHTS, *IN_USER_NAMESPACE) == ["100mbit", "None"]
    assert " ".join(IN_USER_NAMESPACE) in (REPOSITORY / "scripts" / "quickstart.sh").read_text()
