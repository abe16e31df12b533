"""Runs many blocks on the modelled device in one process, rank 0 of two; reports results by run name."""

from __future__ import annotations

import itertools
import os
import traceback

from tests.dist.worker import report, start_alone


def use_expert_ranks(number: int, *, shares: int = 1, tensor: int = 1) -> None:
    """Spread experts over so many ranks from now on, each over ``shares``, and rows over ``tensor``."""
    from megatron.core import parallel_state

    sizes = {
        "expert_model_parallel_size": number,
        "expert_tensor_parallel_size": shares,
        "tensor_model_parallel_size": tensor,
    }
    if sizes != {
        "expert_model_parallel_size": parallel_state.get_expert_model_parallel_world_size(),
        "expert_tensor_parallel_size": parallel_state.get_expert_tensor_parallel_world_size(),
        "tensor_model_parallel_size": parallel_state.get_tensor_model_parallel_world_size(),
    }:
        parallel_state.destroy_model_parallel()
        parallel_state.initialize_model_parallel(**sizes, create_gloo_process_groups=False)


def main() -> None:
    """Run this process's share; the first process also runs the faults, the second counts the calls."""
    from tests.streams.cases import RANKS, RANKS_OF_NODES, runs
    from tests.streams.census import census
    from tests.streams.faults import FAULTS, races

    start_alone(RANKS_OF_NODES, expert_model_parallel_size=RANKS)
    from tests.streams.run import run_case

    process, processes = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    found: dict[str, object] = {}
    for run in itertools.islice(runs(), process, None, processes):
        parallel = run.case.parallel
        use_expert_ranks(
            parallel.get("expert_model_parallel_size", run.case.world_size),
            shares=parallel.get("expert_tensor_parallel_size", 1),
            tensor=parallel.get("tensor_model_parallel_size", 1),
        )
        try:
            result = run_case(
                run.case,
                pipeline=run.pipeline,
                in_flight=run.in_flight,
                gradients=run.gradients,
                issue=run.issue,
            )
            found[run.name] = {
                "races": result.races,
                "operations": result.num_operations,
                "waits": sorted({place for place, _ in result.waits}),
                "wait calls": sorted({f"{place.partition('.')[0]}: {call}" for place, call in result.waits}),
            }
        except Exception:
            found[run.name] = {"error": traceback.format_exc()}
    use_expert_ranks(RANKS)
    if process == 0:
        report({"runs": found, "faults": {name: races(name) for name in FAULTS}})
    else:
        report({"runs": found, "census": census()})


if __name__ == "__main__":
    main()
