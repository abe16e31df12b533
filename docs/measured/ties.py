"""Whether losses that differ from stock's begin with a tie between experts.

Trains the model of ``ampipe bench --end-to-end`` (case top1 of cpu-small, four layers, eight micro-batches,
two ranks) from several seeds: Megatron's layers with AMPipe's attention kernel and with their own, a stack in
two chunks, and partners. Stores all losses with every digit, and of the first iteration in which a token has
another expert than in the first training: how many such tokens, and by how much the logits of both experts
differ in the first layer that has one. From the repository's root:

    PYTHONPATH=. python docs/measured/ties.py docs/measured/results/ties.json 1 2 3
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_ampipe.schedule import MEGATRON, Partner
from megatron_ampipe.tools.measuring import machine, training
from megatron_ampipe.tools.measuring.bench_job import Variant
from megatron_ampipe.tools.measuring.grid import find_grid, read_grid
from megatron_ampipe.tools.measuring.network import parse_link
from megatron_ampipe.tools.measuring.ranks import Rank

LAYERS, MICROBATCHES, RANKS, ITERATIONS = 4, 8, 2, 6
VARIANTS = {
    "megatron": Variant("stock"),
    "megatron, its own attention": Variant("stock"),
    "stack, degree 2": Variant.of("ampipe", 2, stack=0),
    "partners": Variant.of("ampipe", 2, stack=0, partner=Partner(order=MEGATRON)),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Watched(training.TrainingJob):
    """A training that stores its routing and losses in ``folder``, by iteration and rank."""

    folder: str


def main() -> None:
    """Train from every seed, and write the document."""
    file, *seeds = sys.argv[1:]
    (case,) = read_grid(find_grid("cpu-small"), only="top1")
    trainings = []
    for seed in map(int, seeds):
        flags = training.training_flags(
            case,
            layers=LAYERS,
            num_ranks=RANKS,
            iterations=ITERATIONS,
            seed=seed,
            micro_batches=MICROBATCHES,
        )
        with tempfile.TemporaryDirectory() as folder:
            for number, (name, variant) in enumerate(VARIANTS.items()):
                own = Path(folder, str(number))
                own.mkdir()
                job = Watched(
                    flags=(*flags, *variant.pipeline.flags),
                    stock_attends_as=case.dtype if name == "megatron" else None,
                    link=parse_link("none"),
                    num_ranks=RANKS,
                    folder=str(own),
                )
                training.run(job, iterations=ITERATIONS, title=name, work=work)
                trainings.append({"seed": seed, "training": name, **compared(own, Path(folder, "0"))})
                print(json.dumps(trainings[-1]), flush=True)
    document = {
        "command": ["python", *sys.argv],
        "hardware": machine.hardware(),
        "versions": machine.versions(),
        "case": dataclasses.asdict(case) | {"layers": LAYERS, "microbatches": MICROBATCHES},
        "trainings": trainings,
    }
    Path(file).write_text(json.dumps(document, indent=1) + "\n")


def compared(own: Path, stock: Path) -> dict[str, Any]:
    """The losses of a training, and the first tokens with another expert than in that of stock."""
    import torch

    losses: list[float] = []
    result: dict[str, Any] = {"losses": losses, "first": None}
    for iteration in range(1, ITERATIONS + 1):
        stored = [torch.load(own / f"{iteration}-{rank}.pt") for rank in range(RANKS)]
        losses.append(stored[0]["loss"])
        if result["first"] is not None:
            continue
        gaps: dict[int, list[float]] = {}
        for rank, of_rank in enumerate(stored):
            expected = torch.load(stock / f"{iteration}-{rank}.pt")["routed"]
            for layer, (_, chosen) in of_rank["routed"].items():
                logits, chosen_there = expected[layer]
                best = logits[(chosen != chosen_there).any(-1)].topk(2).values
                gaps.setdefault(layer, []).extend((best[:, 0] - best[:, 1]).tolist())
        if any(gaps.values()):
            layer = min(layer for layer, of_layer in gaps.items() if of_layer)
            result["first"] = {
                "iteration": iteration,
                "tokens": sum(map(len, gaps.values())),
                "of": sum(len(logits) for of_rank in stored for logits, _ in of_rank["routed"].values()),
                "layer": layer,
                "differences_of_logits": gaps[layer],
            }
    return result


def work(rank: Rank[Watched]) -> None:
    """Train, and store what every router has seen."""
    tell_iterations = training._tell_iterations

    def tell(rank: Rank[Watched]) -> None:
        # Only now Megatron may be imported.
        tell_iterations(rank)
        watch(rank)

    training._tell_iterations = tell
    training.train(rank)


def watch(rank: Rank[Watched]) -> None:
    """Have this rank store its routing and losses."""
    import torch
    from megatron.core.transformer.moe.router import TopKRouter
    from megatron.training import training as megatron

    route, log = TopKRouter.routing, megatron.training_log
    # By layer, logits and choices of all its calls.
    routed: dict[int, list[tuple[torch.Tensor, ...]]] = {}
    iterations = itertools.count(1)

    def routing(self: Any, scores: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        result = route(self, scores, *args, **kwargs)
        logits = scores.detach().reshape(-1, scores.shape[-1])
        routed.setdefault(self.layer_number, []).append((logits.clone(), result[1].clone()))
        return result

    def training_log(losses: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        stored = {
            "loss": float(losses["lm loss"]),
            "routed": {
                layer: [torch.cat(parts) for parts in zip(*calls, strict=True)]
                for layer, calls in routed.items()
            },
        }
        torch.save(stored, Path(rank.job.folder, f"{next(iterations)}-{rank.number}.pt"))
        routed.clear()
        return log(losses, *args, **kwargs)

    TopKRouter.routing, megatron.training_log = routing, training_log


if __name__ == "__main__":
    main()
