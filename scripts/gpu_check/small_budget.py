"""A training with AMPipe in which one step exceeds a budget: ``python -m gpu_check.small_budget``.

Takes the arguments of ``megatron_ampipe.pretrain_gpt``, with ``--ampipe-rows fixed``. The first budget that
is learned, of one chunk of the first layer, is a 32nd of what it should be, on every rank; so the next step
has rows without a place, and is repeated with exact rows.
"""

from __future__ import annotations

import sys
from typing import Any

from megatron_ampipe.launch import pretrain
from megatron_ampipe.launch.script import TrainingSession

_PART = 32


def lessen_first_budget() -> None:
    """Make the first budget that this process learns too small."""
    from megatron_ampipe.exchange.budgets import ChunkRows
    from megatron_ampipe.schedule.row_budget import RowBudget

    learn = ChunkRows.learn
    is_lessened = False

    def learn_less(chunk: ChunkRows, margin: float, **options: Any) -> None:
        nonlocal is_lessened
        learn(chunk, margin, **options)
        if is_lessened or chunk.budget is None or chunk.window is None:
            return
        is_lessened = True
        small = tuple(tuple(rows // _PART for rows in row) for row in chunk.budget.rows)
        chunk.use(RowBudget(small), chunk.window.device)

    ChunkRows.learn = learn_less  # type: ignore[method-assign]


def main() -> int:
    """Train, and return the exit code."""
    prepare = TrainingSession.prepare_platform

    def prepare_and_lessen(session: TrainingSession) -> Any:
        words = prepare(session)
        # Imports Megatron, which must come after the platform is prepared.
        lessen_first_budget()
        return words

    TrainingSession.prepare_platform = prepare_and_lessen  # type: ignore[method-assign]
    return pretrain.main()


if __name__ == "__main__":
    sys.exit(main())
