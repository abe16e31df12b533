"""The tape of blocks as text, for ``ampipe plan --tape``: what a rank runs, without running it."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any

from megatron_ampipe.errors import EnvironmentMissing
from megatron_ampipe.plan.predict import Predictor
from megatron_ampipe.schedule import Pipeline, StageKind


def text(predictor: Predictor, pipeline: Pipeline) -> str:
    """The tapes of both passes of all layers of a predictor.

    Raises:
        BadInput: the sequence has fewer rows than the pipeline has chunks.
        EnvironmentMissing: torch is absent.
    """
    try:
        # By name: planning itself needs no torch.
        compiler = importlib.import_module("megatron_ampipe.runtime.compile")
    except ModuleNotFoundError as error:
        raise EnvironmentMissing(
            f"--tape needs {error.name}, which is not installed. Install torch, or leave --tape out."
        ) from error
    layers = predictor.layers
    tapes = compiler.compiled(
        pipeline.schedule_of(layers),
        layers,
        chunks=pipeline.chunks(predictor.workload.rows),
        functions=[Unnamed()] * len(layers),
        keep_graph=True,
        host_waits=True,
        threads=False,
    )
    return f"{tapes}\n"


class Unnamed:
    """Stands for the functions of a block that is only printed."""

    recomputed: Sequence[StageKind] = ()
    all_parameters: Sequence[Any] = ()

    def __init__(self) -> None:
        self.stage_parameters: dict[StageKind, Any] = {}

    def run(self, kind: StageKind) -> tuple[int, None]:
        """No function."""
        return 0, None

    differentiate = run

    def weights_apart(self, kind: StageKind, products: Any) -> None:
        """No context."""
