"""What the planner predicts for the trainings of reductions.py, with the profiles of docs/measured.

Four layers, buckets of the same size; without the tables of words and positions, which the planner does not
count. Times are of the last micro-batch. Measured times of iterations are in reductions-*.json. The stored
document is of a version that also simulated the two steps of FSMoE's partitioning.

    python docs/measured/reductions_predicted.py docs/measured/results/reductions-predicted.json
"""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path

from megatron_ampipe.plan.cluster import read_cluster
from megatron_ampipe.plan.gradients import plan_gradients
from megatron_ampipe.plan.predict import Predictor
from megatron_ampipe.schedule import build, even_chunks
from megatron_ampipe.tools.measuring.grid import block_of_case, find_grid, read_grid

RESULTS = Path(__file__).parent / "results"
LAYERS, BUCKET_SIZE = 4, 250_000
DP2_EP2 = {"replicas": 4, "expert_replicas": 2}
PLACES = {
    "positions": ("100mbit", "ampipe", 4, 2048, {"replicas": 2}),
    "dp2-ep2": ("200mbit", "lancet", 1, 2048, DP2_EP2),
    "dp2-ep2, 4096 rows": ("200mbit", "lancet", 1, 4096, DP2_EP2),
    "dp2-ep2, 4096 rows, degree 2": ("200mbit", "ampipe", 2, 4096, DP2_EP2),
    "dp2-ep2, 4096 rows, degree 4": ("200mbit", "ampipe", 4, 4096, DP2_EP2),
}
"""By place the link, schedule, degree, rows of a rank, and over how many ranks gradients are reduced."""


def main() -> None:
    """Predict both and write the document."""
    (case,) = read_grid(find_grid("cpu-small"), only="top1")
    document: dict[str, object] = {"command": ["python", *sys.argv]}
    for place, (link, name, degree, rows, ranks) in PLACES.items():
        # One link for all ranks, as in the measurement.
        cluster = read_cluster(RESULTS / f"profile-{link}.yaml")
        cluster = dataclasses.replace(cluster, ranks_per_node=4)
        block = block_of_case(
            dataclasses.replace(case, sequence_length=rows), num_ranks=2, fused_gradients=True
        )
        block = dataclasses.replace(block, **ranks)
        predictor = Predictor(block, cluster, num_layers=LAYERS)
        schedule = build(name, degree=degree, features=predictor.features)
        lengths = even_chunks(block.rows, degree)
        found = plan_gradients(predictor, schedule, lengths, num_layers=LAYERS, bucket_size=BUCKET_SIZE)
        assert found is not None
        document[place] = {
            "forward_ms": predictor.pass_us(schedule, lengths).forward / 1e3,
            **found,
        }
    Path(sys.argv[1]).write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
