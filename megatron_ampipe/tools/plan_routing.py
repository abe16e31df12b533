"""A workload with the figures of a recorded routing, for ``ampipe plan --routing``."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from megatron_ampipe.errors import BadInput
from megatron_ampipe.plan.recorded_routing import places_of, read_routing
from megatron_ampipe.plan.workload import Workload


def with_routing(
    workload: Workload, folder: Path | None, *, condense: float | None, given: float | None
) -> tuple[Workload, tuple[str, ...]]:
    """A workload whose experts are used as in a training.

    Args:
        workload: With experts evenly used, or ``given``.
        folder: Of ``--ampipe-routing-dir``; None leaves the workload as it is.
        condense: The threshold of ``--ampipe-condense``; None to send all tokens.
        given: The value of ``--imbalance``; None if there is none.

    Returns:
        The workload, and a sentence for each figure that was taken.

    Raises:
        BadInput: the routing cannot be read, or is of another number of experts, or flags contradict it.
    """
    if folder is None:
        if condense is not None:
            raise BadInput(
                "--condense",
                f"{condense:g}",
                rule="needs to know how many tokens are similar",
                remedy="Add --routing DIR, of a training with --ampipe-routing-dir.",
            )
        return workload, ()
    if given is not None:
        rule, remedy = f"is what --routing {folder} says", "Leave one of the two out."
        raise BadInput("--imbalance", f"{given:g}", rule=rule, remedy=remedy)
    routing = read_routing(folder, flag="--routing")
    if routing.num_experts != workload.experts:
        raise BadInput(
            "--routing",
            folder,
            rule=f"is of {routing.num_experts} experts, and the model has {workload.experts}",
            remedy="Record a training of this model, or give the model that was trained.",
        )
    ranks, seen = workload.expert, places_of(workload.experts)
    rows = tuple((places, routing.rows_to(places)) for places in (*seen, workload.experts))
    found = replace(workload, imbalance=routing.imbalance(ranks), rows_seen=rows)
    said = [
        f"imbalance {found.imbalance:.3f} of {ranks} ranks: {len(routing.records)} iterations in {folder}"
    ]
    if ranks in dict(rows):
        said.append(f"{found.rows_to(ranks):.3f} ranks get a token, from the same")
    if condense is not None:
        found = replace(found, condense=condense, condensed=routing.condensed(condense))
        said.append(
            f"{found.condensed:.1%} of the rows are not sent with --ampipe-condense {condense:g}, from the "
            f"same; they were compared in {len(routing.records[-1].tokens)} chunks"
        )
    return found, tuple(said)
