"""The picture of ``ampipe routing``: load of the experts, of the ranks over time, rows sent, similar rows."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from megatron_ampipe.errors import EnvironmentMissing
from megatron_ampipe.files import outputs
from megatron_ampipe.plan.recorded_routing import RecordedRouting, busiest, share_condensed
from megatron_ampipe.tools.timeline_picture import SUFFIXES


def draw(routing: RecordedRouting, ranks: int, prefix: Path) -> None:
    """Write the picture with each suffix.

    Args:
        routing: What was recorded.
        ranks: Between which the experts are divided.
        prefix: Path without suffix.

    Raises:
        EnvironmentMissing: matplotlib is absent.
        RunFailed: it cannot be written.
    """
    try:
        import matplotlib
        from matplotlib.figure import Figure
    except ImportError as error:
        raise EnvironmentMissing(
            f"ampipe routing --picture needs matplotlib ({error}). Install it: pip install matplotlib"
        ) from error
    with matplotlib.rc_context({"svg.hashsalt": "ampipe"}):
        figure = Figure(figsize=(11, 7.5), layout="constrained")
        panels = figure.subplots(2, 2)
        _experts(panels[0][0], routing)
        _ranks(panels[0][1], routing, ranks)
        _chunks(panels[1][0], routing, ranks)
        _similar(panels[1][1], routing)
        for axes in (axes for row in panels for axes in row):
            axes.xaxis.get_major_locator().set_params(integer=True)
        for suffix in SUFFIXES:
            with outputs.atomic_file(prefix.with_name(prefix.name + suffix)) as partial:
                figure.savefig(partial, format=suffix.removeprefix("."), dpi=110)


def _experts(axes: Any, routing: RecordedRouting) -> None:
    record = routing.records[-1]
    shares = [
        [count * record.num_experts / layer.rows for count in layer.per_expert()] for layer in record.layers
    ]
    image = axes.imshow(shares, aspect="auto", cmap="viridis", vmin=0, interpolation="nearest")
    axes.figure.colorbar(image, ax=axes, label="tokens over the mean")
    axes.set(xlabel="expert", ylabel="layer", title=f"load of the experts, iteration {record.iteration}")
    axes.set_yticks(range(len(record.layers)), [str(layer.layer) for layer in record.layers])


def _ranks(axes: Any, routing: RecordedRouting, ranks: int) -> None:
    iterations = [record.iteration for record in routing.records]
    for index, layer in enumerate(routing.records[0].layers):
        values = [busiest(record.layers[index].per_place(ranks)) for record in routing.records]
        axes.plot(iterations, values, marker=".", linewidth=1, label=f"layer {layer.layer}")
    axes.set(xlabel="iteration", ylabel="rows of the busiest rank over the mean", title=f"{ranks} ranks")
    axes.set_ylim(bottom=0.98)
    if len(routing.records[0].layers) <= 8:
        axes.legend(fontsize=7)


def _chunks(axes: Any, routing: RecordedRouting, ranks: int) -> None:
    record = routing.records[-1]
    rows = [
        [sum(layer.per_place(ranks, chunk)[rank] for layer in record.layers) for rank in range(ranks)]
        for chunk in range(len(record.tokens))
    ]
    image = axes.imshow(rows, aspect="auto", cmap="viridis", vmin=0, interpolation="nearest")
    axes.figure.colorbar(image, ax=axes, label="rows, all layers")
    axes.set(
        xlabel="rank of the experts", ylabel="chunk", title=f"who gets what, iteration {record.iteration}"
    )
    axes.set_yticks(range(len(record.tokens)))


def _similar(axes: Any, routing: RecordedRouting) -> None:
    iterations = [record.iteration for record in routing.records]
    for threshold in routing.thresholds:
        shares = [share_condensed(record.layers, threshold) for record in routing.records]
        percent = [math.nan if share is None else 100 * share for share in shares]
        axes.plot(iterations, percent, marker=".", linewidth=1, label=f"{threshold:g}")
    axes.set(xlabel="iteration", ylabel="rows, %", title="not sent by --ampipe-condense")
    axes.set_ylim(0, 100)
    axes.legend(title="threshold", fontsize=7)
