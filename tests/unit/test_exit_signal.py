"""The signal that requests a checkpoint: the run receives it, but not its child processes. No torch."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
RUN = """
import argparse, json, multiprocessing, os, signal, subprocess, sys, time
from megatron_ampipe.launch.exit_signal import keep_from_children

def main():
    number = signal.Signals[sys.argv[1]]
    heard = []
    signal.signal(number, lambda *_: heard.append(True))
    keep_from_children(argparse.Namespace(exit_signal_handler=sys.argv[2] == "on", exit_signal=number))
    child = subprocess.Popen(["sleep", "60"])
    # Like Megatron's manager for the results of writing a checkpoint.
    manager = multiprocessing.get_context("spawn").Manager()
    for pid in (os.getpid(), child.pid, manager._process.pid):
        os.kill(pid, number)
    time.sleep(0.3)
    alive = [child.poll() is None, manager._process.is_alive()]
    child.kill()
    manager._process.kill()
    print(json.dumps([bool(heard), *alive]), flush=True)
    os._exit(0)

if __name__ == "__main__":
    main()
"""


@pytest.mark.parametrize(
    ("number", "handler", "children_live"),
    [("SIGUSR1", "on", True), ("SIGUSR1", "off", False), ("SIGTERM", "on", False)],
    ids=["usr1", "without-the-handler", "term-still-ends-children"],
)
def test_a_run_hears_the_signal_and_its_children_do_not(
    number: str, handler: str, children_live: bool, tmp_path: Path
) -> None:
    # A file, because a spawned process imports the main module again.
    script = tmp_path / "run.py"
    script.write_text(RUN)
    done = subprocess.run(
        [sys.executable, str(script), number, handler],
        env={"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=30,
    )  # fmt: skip
    assert json.loads(done.stdout) == [True, children_live, children_live], done.stderr
