"""Launches command lines of the three ways, each in a fork of one process with Megatron imported; JSON.

Arguments: the script of a checkout; by name the way (``entry``, ``launcher`` or ``patched``), the words and
the environment of each launch. Each ends at the latest where it would make a process group. Run by
:mod:`.test_ways`.
"""

from __future__ import annotations

import functools
import json
import os
import runpy
import sys
from pathlib import Path
from typing import Any

from megatron_ampipe.launch import ending, host
from tests.megatron.forked_launch import Launch

RANK = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}


def enter(way: str, script: str, words: list[str], environment: dict[str, str]) -> int:
    """The exit code of one launch; in a child."""
    os.environ |= RANK | environment
    _count_read_plans(Path(environment["READS"]))
    if way == "patched":
        adjusted, _ = host.adjust(words)
        sys.argv = [script, *adjusted]
        try:
            runpy.run_path(script, run_name="__main__")
        except SystemExit as stop:
            assert stop.code is None or isinstance(stop.code, int), stop.code
            return stop.code or 0
        return 0
    from megatron_ampipe.launch import pretrain
    from megatron_ampipe.launch import script as launcher

    return pretrain.main(words) if way == "entry" else launcher.main([script, *words])


def _count_read_plans(file: Path) -> None:
    """Leave a byte in a file for every time that a plan file is read."""
    from megatron_ampipe.plan import plan_file

    load = plan_file.load

    def counted(*args: Any, **kwargs: Any) -> Any:
        with file.open("a") as reads:
            reads.write("x")
        return load(*args, **kwargs)

    plan_file.load = counted


def main() -> None:
    """Report on every command line."""
    script, asked = sys.argv[1:]
    # As when the script is started by hand: the megatron next to it is the one that is imported.
    sys.path.insert(0, str(Path(script).parent))
    import tests.preloaded  # noqa: F401 - what launches import, once

    # There are no other ranks to wait for.
    ending.PEER_LAG_S = 0.0
    results: dict[str, dict[str, Any]] = {}
    running: dict[str, Launch] = {}
    for name, (way, words, environment) in json.loads(asked).items():
        if len(running) == 2:
            oldest = next(iter(running))
            results[oldest] = running.pop(oldest).result()
        running[name] = Launch([], entry=functools.partial(enter, way, script, words, environment))
    results |= {name: launch.result() for name, launch in running.items()}
    with open(os.environ["AMPIPE_TEST_REPORT"], "w") as report:
        json.dump(results, report)


if __name__ == "__main__":
    main()
