"""Command lines for the tests of refusals, as data: read by the tests and by their worker process."""

from __future__ import annotations

import shlex

from tests.megatron.launcher import MOCK_DATA, TINY_GPT

DENSE = [*TINY_GPT, *MOCK_DATA, *shlex.split("--attention-dropout 0 --hidden-dropout 0 --ampipe-degree 4")]
ACCEPTED = [*DENSE, *shlex.split("--num-experts 4 --moe-token-dispatcher-type alltoall --disable-bias-linear")]
"""A command line that AMPipe runs; every row is tried on top of it."""

ALONE = {"--num-experts": DENSE}
"""Settings that are refused when they are absent, and the command line without them."""

VALUES = {
    "--spec": [["some.module", "some_spec"]],
    "--window-size": [["8,0"]],
    "--attention-dropout": [["0.1"]],
    "--hidden-dropout": [["0.1"]],
    "--moe-token-dispatcher-type": [["allgather"], ["flex"]],
    "--moe-router-load-balancing-type": [["sinkhorn"], ["quantile_balancing"]],
    "--moe-token-drop-policy": [["probs"]],
    "--recompute-granularity": [["selective"]],
}
"""Refused values; of other flags the worker takes every choice but the default, or 2."""

COMPANIONS = {
    "--moe-token-drop-policy": ["--moe-expert-capacity-factor", "1.0"],
    "--moe-pad-expert-input-to-capacity": shlex.split(
        "--moe-expert-capacity-factor 1.0 --moe-token-drop-policy position"
    ),
}
"""Flags without which the setting has no meaning."""
