"""Would sequences that move to the rank with most of their tokens save bytes? Luffy's migration, in numbers.

Trains the quick start's model with several numbers of experts and experts per token, records the routing
(``--ampipe-routing-dir``), and simulates the first and the last quarter of the records, for two ranks and for
four. Nothing moves in the trainings.

After the experts of a layer, a sequence's rows are combined on some rank, and the sequence lives there from
then on: the rows of its tokens that are there already need not travel. What else has to follow is counted
too: its residual rows, to which the experts' outputs are added. Keys and values need not, as the next layer
computes new ones. Counted in rows of the hidden size; the backward pass sends as many the other way. Also
counted are the fewest rows if every rank has as many sequences as before in every layer, so that attention is
equal work.

Source: Chen et al., Luffy, 2024 (arXiv 2411.15419); of the paper, the abstract was at hand.

    ampipe data --output runs/stdlib
    python docs/measured/migration.py train runs/stdlib runs/migration
    python docs/measured/migration.py count runs/migration docs/measured/results/migration.json
    python docs/measured/migration.py show docs/measured/results/migration.json

A training that the folder has is not run again.
"""

from __future__ import annotations

import itertools
import json
import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from megatron_ampipe.plan.recorded_routing import (
    LayerRouting,
    RecordedRouting,
    RoutingRecord,
    busiest,
    read_routing,
)
from megatron_ampipe.tools.measuring import machine
from megatron_ampipe.tools.measuring.network import parse_link
from megatron_ampipe.tools.measuring.ranks import signals_as_interrupts
from megatron_ampipe.tools.measuring.training import TrainingJob, run
from megatron_ampipe.tools.quickstart import CONFIGS

ITERATIONS, INTERVAL, PHASE = 240, 5, 60
"""Of a training; of them one in five is recorded; and how many count as early and as late."""


@dataclass(frozen=True, slots=True)
class Training:
    """What is trained: the quick start's model but for this."""

    topk: int
    experts: int
    balanced: bool = True

    def __str__(self) -> str:
        return f"top-{self.topk} of {self.experts}{', no balancing loss' * (not self.balanced)}"


TRAININGS = (
    *(Training(*sizes) for sizes in itertools.product((1, 2), (8, 32))),
    Training(1, 8, balanced=False),
)
RANKS, BATCH, LENGTH = 2, 2, 512
DIVIDED = (2, 4)
"""Ranks between which the experts are divided in the simulation: two sequences on each, or one."""


def main() -> None:
    """Train, count or show, as the command line says."""
    match sys.argv[1:]:
        case "train", data, folder, *numbers:
            chosen = [TRAININGS[int(number)] for number in numbers] or TRAININGS
            with signals_as_interrupts():
                for one in chosen:
                    train(one, data, Path(folder) / str(one))
        case "count", folder, output:
            Path(output).write_text(json.dumps(count(Path(folder)), indent=1) + "\n")
        case "show", document:
            show(json.loads(Path(document).read_text()))
        case _:
            sys.exit(__doc__)


def train(one: Training, data: str, folder: Path) -> None:
    """Run one training, unless the folder has it."""
    if (folder / "training.json").exists():
        return
    flags = [
        *("--train-iters", ITERATIONS, "--seq-length", LENGTH, "--max-position-embeddings", LENGTH),
        *("--num-experts", one.experts, "--moe-router-topk", one.topk),
        *("--expert-model-parallel-size", RANKS),
        *("--micro-batch-size", BATCH, "--global-batch-size", RANKS * BATCH),
        *(["--moe-router-pre-softmax"] * (one.topk == 1)),
        *(["--moe-router-load-balancing-type", "none"] * (not one.balanced)),
    ]
    where = (
        *("--ampipe-config", *CONFIGS, "--ampipe-degree", "1"),
        *("--data-path", data, "--data-cache-path", f"{data}-cache"),
        *("--ampipe-routing-dir", str(folder / "records"), "--ampipe-routing-interval", str(INTERVAL)),
    )
    job = TrainingJob(
        flags=(*where, *map(str, flags)),
        stock_attends_as="fp32",
        link=parse_link("none"),
        num_ranks=RANKS,
        timeout_s=300.0,
    )
    curve = run(job, iterations=ITERATIONS, title=str(one))
    document = {"flags": flags, "lm_loss": curve.lm_loss, "versions": machine.versions()}
    (folder / "training.json").write_text(json.dumps(document))
    print(one, flush=True)


def count(folder: Path) -> dict[str, Any]:
    """Simulate what was recorded in every training that the folder has."""
    found: dict[str, Any] = {"iterations": ITERATIONS, "interval": INTERVAL, "trainings": {}}
    for one in TRAININGS:
        if not (folder / str(one) / "training.json").exists():
            continue
        trained = json.loads((folder / str(one) / "training.json").read_text())
        records = read_routing(folder / str(one) / "records", flag="DIR").records
        phases = {}
        for name, first in (("early", 0), ("late", ITERATIONS - PHASE)):
            last = first + PHASE
            chosen = tuple(record for record in records if first < record.iteration <= last)
            loss = statistics.fmean(trained["lm_loss"][first:last])
            ranks = {str(ranks): figures_of(RecordedRouting(chosen), ranks) for ranks in DIVIDED}
            phases[name] = {"loss": loss, "ranks": ranks}
        found["trainings"][str(one)] = {**asdict(one), "flags": trained["flags"], "phases": phases}
        found["versions"] = trained["versions"]
    return found


def figures_of(routing: RecordedRouting, ranks: int) -> dict[str, Any]:
    """The simulation of some records."""
    sequences = [
        busiest(part_per_place(layer, part, ranks))
        for record in routing.records
        for layer in record.layers
        for part in range(record.num_parts)
    ]
    saved = {}
    for once, residual in itertools.product((False, True), (Residual.ALL, Residual.MISSING)):
        moves = simulate(routing, ranks, once=once, residual=residual)
        pairs = [equal_shares(record, ranks, once=once, residual=residual) for record in routing.records]
        stays, fewest = (sum(column) for column in zip(*pairs, strict=True))
        saved[f"{'ranks' if once else 'rows'}, {residual}"] = {
            "of the combine": moves.saved_of_combine,
            "of both": moves.saved_by_most,
            "at most": moves.saved_by_best,
            "at most, equal shares": 1 - fewest / stays,
        }
    return {
        "sequences": sum(record.num_parts for record in routing.records),
        "busiest rank of a micro-batch": routing.imbalance(ranks),
        "busiest rank of a sequence": statistics.fmean(sequences),
        "saved": saved,
    }


class Residual(StrEnum):
    """Which residual rows follow a sequence that moves."""

    ALL = "all"
    MISSING = "missing"
    """Those of tokens that no expert of the new rank had. The others would be computed back from the
    normalized rows that were sent to the experts there, with rounding."""
    NONE = "none"
    """None, which no implementation can do: what the combine alone would save."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceRows:
    """One sequence in one layer.

    Attributes:
        rows: Rows that experts of each rank return, ``[rank]``.
        present: Tokens that have experts on each rank, ``[rank]``.
        tokens: Tokens of the sequence.
    """

    rows: Sequence[int]
    present: Sequence[int]
    tokens: int

    def dispatched(self, home: int) -> int:
        """Rows that leave the rank of the sequence."""
        return sum(self.rows) - self.rows[home]

    def combined(self, home: int, new: int, residual: Residual) -> int:
        """Rows that travel so that the sequence lives on a rank afterwards."""
        moved = sum(self.rows) - self.rows[new]
        if new == home or residual is Residual.NONE:
            return moved
        return moved + self.tokens - (self.present[new] if residual is Residual.MISSING else 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Moves:
    """Rows of a forward pass, of all recorded sequences.

    Attributes:
        dispatch: With every sequence where it is.
        combine: Likewise.
        most: Both, if every sequence goes to the rank with most of its rows, in every layer.
        most_combine: The combine of that alone, with what follows.
        best: Both, if each sequence takes the way over the ranks with the fewest rows in total. No choice
            is better; that all might end up on one rank is not excluded.
    """

    dispatch: float
    combine: float
    most: float
    most_combine: float
    best: float

    @property
    def saved_by_most(self) -> float:
        """Share of dispatch and combine, below 0 where more is sent."""
        return _saved(self.most, self.dispatch + self.combine)

    @property
    def saved_of_combine(self) -> float:
        """Share of the combine alone."""
        return _saved(self.most_combine, self.combine)

    @property
    def saved_by_best(self) -> float:
        """Share of dispatch and combine that no choice of ranks exceeds."""
        return _saved(self.best, self.dispatch + self.combine)


def simulate(routing: RecordedRouting, ranks: int, *, once: bool, residual: Residual) -> Moves:
    """What sequences send that stay, and that move.

    The mean over all ranks on which a sequence can begin.

    Args:
        routing: Of sequences that are whole on a rank (``ranks_per_sequence`` 1).
        ranks: Between which the experts are divided.
        once: A token is sent to a rank once (``--ampipe-exchange ranks``); otherwise for each of its experts.
        residual: What follows.
    """
    totals = [0.0] * 5
    for record in routing.records:
        assert record.ranks_per_sequence == 1
        tokens = sum(record.tokens)
        for part in range(record.num_parts):
            layers = []
            for one in record.layers:
                present = one.arriving(part, ranks) if ranks > 1 else (tokens,)
                rows = present if once else part_per_place(one, part, ranks)
                layers.append(SequenceRows(rows=rows, present=present, tokens=tokens))
            for home in range(ranks):
                for index, value in enumerate(_of_sequence(layers, home, residual)):
                    totals[index] += value / ranks
    dispatch, combine, most_dispatch, most_combine, best = totals
    return Moves(
        dispatch=dispatch,
        combine=combine,
        most=most_dispatch + most_combine,
        most_combine=most_combine,
        best=best,
    )


def _of_sequence(
    layers: Sequence[SequenceRows], home: int, residual: Residual
) -> tuple[int, int, int, int, int]:
    stays = sum(layer.dispatched(home) for layer in layers)
    dispatched = combined = 0
    at = home
    for layer in layers:
        dispatched += layer.dispatched(at)
        # It stays where it is if no rank has more.
        new = max(range(len(layer.rows)), key=lambda rank: (layer.rows[rank], rank == at))
        combined += layer.combined(at, new, residual)
        at = new
    return stays, stays, dispatched, combined, fewest(layers, home, residual)


def fewest(layers: Sequence[SequenceRows], home: int, residual: Residual) -> int:
    """Rows of dispatch and combine on the best way of a sequence over the ranks, from a given one."""
    ranks = range(len(layers[0].rows))
    left = [0 for _ in ranks]
    for layer in reversed(layers):
        left = [
            layer.dispatched(at) + min(layer.combined(at, new, residual) + left[new] for new in ranks)
            for at in ranks
        ]
    return left[home]


def _saved(rows: float, before: float) -> float:
    return 1 - rows / before if before else 0.0


def part_per_place(layer: LayerRouting, part: int, places: int) -> list[int]:
    """Rows of the tokens of one part for the experts at each of so many places."""
    counts = [sum(column) for column in zip(*layer.counts[part], strict=True)]
    size = len(counts) // places
    return [sum(counts[first : first + size]) for first in range(0, len(counts), size)]


def equal_shares(record: RoutingRecord, num_ranks: int, *, once: bool, residual: Residual) -> tuple[int, int]:
    """Rows of a micro-batch if no sequence moves, and the fewest if ranks always have equally many.

    Every way in which the sequences can be on the ranks is tried after every layer.
    """
    ranks, parts = range(num_ranks), range(record.num_parts)
    begin = tuple(part * num_ranks // record.num_parts for part in parts)
    stays, fewest = 0, {begin: 0}
    for one in record.layers:
        sequences = []
        for part in parts:
            present = one.arriving(part, num_ranks)
            rows = present if once else part_per_place(one, part, num_ranks)
            sequences.append(SequenceRows(rows=rows, present=present, tokens=sum(record.tokens)))
        stays += sum(2 * layer.dispatched(home) for layer, home in zip(sequences, begin, strict=True))
        moved = {
            (part, old, new): layer.dispatched(old) + layer.combined(old, new, residual)
            for part, layer in enumerate(sequences)
            for old, new in itertools.product(ranks, repeat=2)
        }
        fewest = {
            new: min(
                rows + sum(moved[part, old[part], new[part]] for part in parts)
                for old, rows in fewest.items()
            )
            for new in set(itertools.permutations(begin))
        }
    return stays, min(fewest.values())


def show(found: dict[str, Any]) -> None:
    """Print the table."""
    columns = ("training", "", "loss", "ranks", "busiest rank of a sequence", "of the combine", "of both")
    shares = ("at most", "at most, equal shares", "the same, `missing`", "`ranks`, equal shares")
    print(f"| {' | '.join((*columns, *shares))} |")
    print("|---" * len((*columns, *shares)) + "|")
    for name, training in found["trainings"].items():
        for phase, of_phase in training["phases"].items():
            for ranks, one in of_phase["ranks"].items():
                rows, rest, once = (one["saved"][key] for key in ("rows, all", "rows, missing", "ranks, all"))
                saved = [*rows.values(), rest["at most, equal shares"], once["at most, equal shares"]]
                cells = [f"{of_phase['loss']:.2f}", ranks, f"{one['busiest rank of a sequence']:.2f}"]
                cells += [f"{100 * share:+.1f} %" for share in saved]
                print(f"| {name} | {phase} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
