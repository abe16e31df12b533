"""The answer of ``ampipe plan``: everything that was compared, as plain data and as tables."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace

from rich.console import Console
from rich.table import Table

from megatron_ampipe.errors import BadInput
from megatron_ampipe.files.outputs import Report, ReportView
from megatron_ampipe.files.timeline import Timeline
from megatron_ampipe.plan.cluster import Operation
from megatron_ampipe.plan.gradients import PLACED, STOCK, plan_gradients
from megatron_ampipe.plan.host_times import FACTORS, HostRow, in_words, with_graphs
from megatron_ampipe.plan.kept import equation_10_us
from megatron_ampipe.plan.partners import timeline as partner_timeline
from megatron_ampipe.plan.plan_file import Plan
from megatron_ampipe.plan.planner import GROUPED, Plans, sharing_layers
from megatron_ampipe.plan.predict import Predictor
from megatron_ampipe.plan.rank_memory import RankMemory
from megatron_ampipe.plan.search import MINIMUM_SAVING, candidates, in_one_chunk, named
from megatron_ampipe.plan.whole_passes import Gain, WholePasses
from megatron_ampipe.schedule import (
    KEEP,
    MEGATRON,
    STRATEGIES,
    Pipeline,
    even_chunks,
)
from megatron_ampipe.tools.plan_recipe import domain_sentence


def answer_of(
    predictor: Predictor,
    plans: Plans,
    others: Mapping[str, Plans],
    memory: list[RankMemory] | str,
    arguments: argparse.Namespace,
    assumed: list[str],
) -> Report:
    """Everything that is shown, as plain data; ``predictor`` is for all layers of a pipeline stage.

    ``others`` are the plans with other flags of Megatron (``plan.planner.alternatives``), ``memory`` is the
    memory of each pipeline stage (``plan.rank_memory.memory_by_stage``).
    """
    plan = plans.chosen
    gradients = _gradients_or_why_not(predictor, plan, assumed)
    if isinstance(memory, str):
        assumed.append(f"memory of a rank is not estimated: {memory}")
    block = predictor.of_layers(1)
    if block.block.captures_passes and block.block.dtype == "fp8":
        assumed.append("time and memory of quantized weights are not predicted: each micro-batch has its own")
    return {
        "model": arguments.model or str(arguments.recipe),
        "cluster": arguments.cluster,
        "assumed": assumed,
        "stock_ms": plan.stock_ms,
        "degrees": _rows(block, arguments.degrees, arguments.schedule),
        "stacks": _stacks(predictor, plans),
        "layers": _layers(predictor, plans),
        "basis": predictor.cluster.basis,
        "gradients": gradients,
        **_choice(predictor, plans),
        "memory_strategies": _memory_strategies(block, plan) if plan.helps else None,
        "dispatchers": _all_dispatchers(predictor, plans, others),
        "rank_memory": None if isinstance(memory, str) else _fullest(memory),
    }


def _choice(predictor: Predictor, plans: Plans) -> Report:
    """The chosen plan, and what it gains."""
    plan = plans.chosen
    pipeline, shares = plan.pipeline_of(predictor.block.rows), plan.pipeline.shares
    assert shares is not None
    return {
        "choice": str(pipeline) if plan.helps else None,
        "flags": pipeline.flags if plan.helps else None,
        "forward_degree": pipeline.degree,
        "backward_degree": pipeline.backward_degree,
        "stack": pipeline.stack,
        "num_layers": plan.num_layers,
        "shares": list(shares),
        "schedule": pipeline.name,
        "exchange": pipeline.exchange,
        "predicted_ms": plan.predicted_ms,
        "predicted_speedup": plan.predicted_speedup,
        "hidden_share": plan.hidden_share,
        "partner": pipeline.partner is not None,
        # Of a forward and a backward pass together; predicted_ms is without a partner.
        "partner_ms": plan.partner_ms,
        # The product of both is the speedup.
        "speedup_by_overlap": plan.predicted_speedup / plans.fewer_bytes,
        "speedup_by_fewer_bytes": plans.fewer_bytes,
        "hidden_by": timeline_of(predictor, pipeline).hidden_by if plan.helps else None,
        "memory_gib": plan.memory_gib,
        "device_memory_gib": predictor.cluster.device_memory_gib,
        "helps": plan.helps,
        "reason": plan.reason,
    }


def whole_passes_of(predictor: Predictor, gains: Sequence[tuple[WholePasses, Gain]]) -> Report:
    """What graphs of whole passes would gain, next to Megatron's layers with graphs of some modules."""
    if not gains:
        return {"whole_passes": None}
    stock_us = predictor.stock().total
    graphed_us = predictor.on(with_graphs(predictor.cluster)).stock().total
    ways = [
        {
            "name": whole.name,
            "flags": [*gain.pipeline.flags, *whole.flags],
            "way": in_words(gain.pipeline),
            "predicted_ms": gain.time_us / 1e3,
            "speedup": stock_us / gain.time_us,
            "padding": gain.padding,
        }
        for whole, gain in gains
    ]
    return {"whole_passes": {"stock_with_graphs": stock_us / graphed_us, "ways": ways}}


def _sentences_on_whole_passes(whole: ReportView) -> Iterator[str]:
    """The flags for graphs of whole passes, and what they are predicted to gain."""
    for way in whole["ways"]:
        how = f"{way['way']}, {way['padding']:.2f} times the rows with padding"
        yield (
            f"with CUDA graphs of whole passes ({' '.join(way['flags'])}): predicted "
            f"{way['speedup']:.2f} times as fast as Megatron's layers ({how})"
        )
    yield (
        f"    Megatron's layers with graphs of attention and routing: {whole['stock_with_graphs']:.2f}. "
        "Unmeasured on a GPU; a launch needs compute capability 9 or 10, and no dropout"
    )


def host_of(predictor: Predictor, rows: Sequence[HostRow]) -> Report:
    """The assumed time of the host, and the plans for slower hosts; nothing in training on a CPU."""
    if not rows:
        return {"host": None}
    issue = predictor.cluster.host.issue
    return {
        "host": {
            "forward_us": issue.forward_us,
            "backward_us": issue.backward_us,
            "basis": issue.basis,
            "source": issue.source,
            "choices": [asdict(row) for row in rows],
        }
    }


def _host_sentences(host: ReportView) -> Iterator[str]:
    """What is assumed of the host, and from which time on another plan is chosen."""
    yield (
        f"host: takes {host['forward_us']:.0f} us to issue a stage forward and {host['backward_us']:.0f} us "
        f"backward ({host['basis']}: {host['source']})"
    )
    first, *others = host["choices"]
    for row in others:
        from_us = f"    from about {row['forward_us']:.0f} us on: {row['choice']}"
        gains = row["speedup"] > 1
        yield f"{from_us}, {row['speedup']:.2f} times as fast as Megatron's layers" if gains else from_us
    if not others:
        slowest = host["forward_us"] * FACTORS[-1]
        yield f"    up to {slowest:.0f} us the choice stays the same: {first['choice']}"
    yield "    measure it on your machines: ampipe profile, then --cluster FILE"


def _fullest(ranks: Sequence[RankMemory]) -> Report:
    """The memory of the fullest rank, in numbers of parameters and GiB."""
    memory = max(ranks, key=lambda rank: rank.total)
    kinds = ("weights", "gradients", "optimizer", "activations", "buffers", "total")
    return {
        "pipeline_stage": memory.stage,
        "parameters": round(memory.parameters.others),
        "expert_parameters": round(memory.parameters.experts),
        **{f"{kind}_gib": getattr(memory, kind) / 2**30 for kind in kinds},
    }


def _all_dispatchers(predictor: Predictor, plans: Plans, others: Mapping[str, Plans]) -> list[Report]:
    """The layers with the model's flags, and with other flags of Megatron."""
    rows = _dispatchers(predictor, plans, "")
    for flags, other_plans in others.items():
        rows += _dispatchers(predictor, other_plans, flags)
    return rows


_OPERATIONS: Mapping[str, Operation] = {
    "alltoall": "all_to_all",
    "allgather": "all_gather",
    "deepep": "deepep",
    "hybridep": "hybridep",
}
"""The collective of each dispatcher, as a cluster file names it."""


def _dispatchers(predictor: Predictor, plans: Plans, flags: str) -> list[Report]:
    """The layers with each exchange of a dispatcher, and the flags of Megatron that the model lacks."""
    words = flags.split()
    dispatcher = words[-1] if "--moe-token-dispatcher-type" in words else predictor.block.dispatcher
    stock_ms = plans.step_ms * plans.chosen.predicted_speedup
    operation = _OPERATIONS[dispatcher]
    return [
        {
            "dispatcher": dispatcher,
            "exchange": exchange.value if dispatcher == "alltoall" else None,
            "flags": words,
            "stock_ms": stock_ms,
            "predicted_ms": time_ms,
            "speedup": stock_ms / time_ms,
            "figures": predictor.cluster.basis_of(operation),
        }
        for exchange, time_ms in plans.by_exchange.items()
    ]


def _rows(predictor: Predictor, degrees: tuple[int, ...], asked: str | None) -> list[Report]:
    """Megatron's layer, and the named schedules at each degree in equal chunks, with the one asked for."""
    stock = predictor.stock()
    ways = [("stock", 1, stock, 0.0, {KEEP: predictor.peak_bytes(Pipeline.of(1))})]
    whole = in_one_chunk(predictor)
    compared = [*([] if whole is None else [whole]), *candidates(predictor, degrees)]
    known = {(way.schedule.name, way.schedule.degree) for way in compared}
    if asked is not None:
        lacking = [degree for degree in degrees if (asked, degree) not in known]
        splitting = filter(predictor.block.splits_into, lacking)
        compared += [named(predictor, asked, degree, degree) for degree in splitting]
    for way in compared:
        hidden = predictor.timeline(way.schedule, way.lengths).hidden_share
        pipeline = Pipeline.of(way.schedule.degree, order=way.schedule)
        memory = {
            strategy: predictor.peak_bytes(replace(pipeline, memory=strategy)) for strategy in STRATEGIES
        }
        ways.append((way.schedule.name, way.schedule.degree, way.time, hidden, memory))
    return [
        {
            "degree": degree,
            "schedule": name,
            "forward_ms": time.forward / 1e3,
            "backward_ms": time.backward / 1e3,
            "predicted_ms": time.total / 1e3,
            "speedup": stock.total / time.total,
            "hidden_share": hidden,
            "memory_gib": memory[KEEP] / 2**30,
            # By the experts' strategy, for --ampipe-memory.
            "memory_gib_by_strategy": {strategy: size / 2**30 for strategy, size in memory.items()},
        }
        for name, degree, time, hidden, memory in ways
    ]


def _memory_strategies(predictor: Predictor, plan: Plan) -> Report:
    """The strategy that MPipeMoE's equation 10 chooses, and the one that is fastest by simulation."""
    degree = plan.pipeline.backward_degree
    costs_us = equation_10_us(predictor, degree=degree)
    times = {}
    for name in (KEEP, *costs_us):
        predicted = predictor.of_layers(1, memory=name)
        schedule = Pipeline.of(degree, memory=name).schedule_of(predicted.layers)
        times[name] = predicted.pass_us(schedule, even_chunks(predictor.block.rows, degree)).total / 1e3
    return {
        "degree": degree,
        "equation_10": min(costs_us, key=lambda name: costs_us[name]),
        "equation_10_ms": {name: cost / 1e3 for name, cost in costs_us.items()},
        "simulated": min(costs_us, key=lambda name: times[name]),
        "simulated_ms": times,
    }


def _stacks(predictor: Predictor, plans: Plans) -> list[Report]:
    """The layers of a pipeline stage block by block, and sharing a schedule; empty if they cannot."""
    shared = plans.shared
    if shared is None:
        return []
    assert shared.stock_ms is not None and shared.predicted_ms is not None
    lengths = _lengths(predictor, shared.pipeline_of(predictor.block.rows))
    bound = sharing_layers(predictor, shared.pipeline.stack).bound_us(shared.schedule, lengths)
    blocks, together = (
        {
            "stack": plan.pipeline.stack,
            "layers": shared.num_layers,
            "forward_degree": plan.pipeline.degree,
            "backward_degree": plan.pipeline.backward_degree,
            "schedule": plan.schedule.name if plan.helps else "stock",
            "predicted_ms": time_ms,
            "speedup": shared.stock_ms / time_ms,
        }
        for plan, time_ms in ((plans.alone, plans.blocks_ms), (shared, shared.predicted_ms))
    )
    together["share_of_bound"] = bound.total / 1e3 / shared.predicted_ms
    return [blocks, together]


def _layers(predictor: Predictor, plans: Plans) -> list[Report]:
    """The layers of a pipeline stage in chunks and with partners; empty if neither can be."""
    running = _with_a_partner(predictor, plans)
    stock_us = running.stock().total
    rows = []
    for row in _stacks(predictor, plans):
        way = "block by block" if row["stack"] == 1 else "one schedule"
        bound = f"{row['share_of_bound']:.1%}" if "share_of_bound" in row else ""
        rows.append(row | {"way": f"{way}, degree {row['forward_degree']}", "of_bound": bound})
    for name, together in ((f"partners, {MEGATRON}", plans.as_megatron), ("partners", plans.together)):
        if together is not None:
            row = {"way": name, "predicted_ms": together.time_us / 1e3}
            row |= {"speedup": stock_us / together.time_us}
            rows.append(row | {"of_bound": f"{together.bound_us(running) / together.time_us:.1%}"})
    if plans.shared is not None and plans.partners_ms is not None and plans.chosen.pipeline.stack == 1:
        row = {"way": "partners, block by block", "predicted_ms": plans.partners_ms}
        rows.append(row | {"speedup": stock_us / 1e3 / plans.partners_ms, "of_bound": ""})
    return rows


def _with_a_partner(predictor: Predictor, plans: Plans) -> Predictor:
    """The predictor of the layers that :attr:`Plans.together` is predicted for."""
    return sharing_layers(predictor, 1 if plans.shared is None else plans.shared.pipeline.stack)


def timeline_of(
    predictor: Predictor, pipeline: Pipeline, *, labels: Mapping[str, str] | None = None
) -> Timeline:
    """The predicted timeline of the layers that a pipeline is for; with a partner, of both passes."""
    running = sharing_layers(predictor, pipeline.stack)
    if pipeline.partner is not None:
        return partner_timeline(running, pipeline.partner, labels=labels)
    schedule = pipeline.schedule_of(running.layers)
    return running.timeline(schedule, _lengths(predictor, pipeline), labels=labels)


def _lengths(predictor: Predictor, pipeline: Pipeline) -> list[int]:
    """Rows of a rank in each chunk."""
    return [chunk.hidden[0].length for chunk in pipeline.chunks(predictor.block.rows)]


def _gradients_or_why_not(predictor: Predictor, plan: Plan, assumed: list[str]) -> Report | None:
    """:func:`_gradients`; if they cannot be predicted, None, and ``assumed`` says why."""
    if predictor.block.captures_passes:
        assumed.append("reductions of gradients are not predicted: they start between graphs of a pass")
        return None
    try:
        return _gradients(predictor, plan)
    except BadInput as error:
        # The rest of the plan does not need this figure.
        assumed.append(f"reductions of gradients are not predicted: {error.value} {error.rule}")
        return None


def _gradients(predictor: Predictor, plan: Plan) -> Report | None:
    """How gradients are reduced with the chosen plan; None without a plan or without anything to reduce."""
    if not plan.helps:
        return None
    running = sharing_layers(predictor, plan.pipeline.stack)
    with_experts = sum(not features.dense for features in predictor.layers)
    num_layers = len(running.layers) if running is predictor else with_experts
    lengths = _lengths(predictor, plan.pipeline_of(predictor.block.rows))
    return plan_gradients(running, plan.schedule, lengths, num_layers=num_layers)


def _table(title: str, rows: Sequence[ReportView], columns: Mapping[str, str]) -> Table:
    """A table of rows; ``columns`` maps a heading to a key and the format of its value. None stays empty."""
    table = Table(*columns, title=title)
    for row in rows:
        parts = (column.partition(":") for column in columns.values())
        table.add_row(*("" if row.get(key) is None else format(row[key], form) for key, _, form in parts))
    return table


def show(answer: ReportView, plan: Plan, console: Console, *, verbose: bool = False) -> None:
    """Print an answer of :func:`answer_of` and the chosen plan: what to do first, then what was compared."""
    for sentence in _sentences(answer, plan):
        console.print(sentence, soft_wrap=True)
    for sentence in answer["assumed"]:
        console.print(f"assumed: {sentence}", soft_wrap=True, style="dim")
    for table in _tables(answer):
        console.print(table)
    if "next" in answer:
        console.print(answer["next"], soft_wrap=True, markup=False, highlight=False)
    if not verbose:
        return
    console.print(_memory_table(answer["degrees"]))
    if (gradients := answer["gradients"]) is not None:
        console.print(_advice_on_gradients(gradients), soft_wrap=True)
    if (memory := answer["memory_strategies"]) is not None:
        console.print(_advice_on_memory(memory), soft_wrap=True)


def _sentences(answer: ReportView, plan: Plan) -> Iterator[str]:
    """The choice, what it gains and needs."""
    if (no := domain_sentence(answer)) is not None:
        yield no
    if plan.helps:
        yield from _sentences_on_plan(answer, plan)
    else:
        yield "choice: degree 1, Megatron's own layers"
    if answer["host"] is not None:
        yield from _host_sentences(answer["host"])
    if answer["whole_passes"] is not None:
        yield from _sentences_on_whole_passes(answer["whole_passes"])
    yield from _faster_with(answer["dispatchers"])
    yield answer["reason"]
    if answer["hidden_by"] is not None:
        shares = [f"{share:.0%} under {source}" for source, share in answer["hidden_by"].items() if share]
        yield f"communication hidden: {', '.join(shares) or 'none'}"
    if (held := answer["rank_memory"]) is not None:
        yield _held(held, answer["device_memory_gib"])


def _sentences_on_plan(answer: ReportView, plan: Plan) -> Iterator[str]:
    yield f"choice: {answer['choice']}"
    yield f"predicted: {plan.predicted_speedup:.2f} times as fast as Megatron's layers ({answer['basis']})"
    if answer["speedup_by_fewer_bytes"] != 1:
        yield (
            f"of which {answer['speedup_by_overlap']:.2f} by overlap, "
            f"{answer['speedup_by_fewer_bytes']:.2f} by fewer bytes or messages between ranks"
        )
    yield f"flags: {' '.join(answer['flags'])}"
    if plan.searched:
        yield "Its order was searched: use --output FILE, and --ampipe-plan FILE in place of these flags."


_OF_WAYS = {"degree": "degree", "schedule": "schedule"}
"""The first columns of the tables of one block."""


def _tables(answer: ReportView) -> Iterator[Table]:
    """What was compared: for the layers of a pipeline stage, by dispatcher, and for one block."""
    if answer["layers"]:
        yield _table(
            "layers of a pipeline stage, a micro-batch forward and backward",
            answer["layers"],
            {
                "layers": "way",
                "predicted ms": "predicted_ms:.3f",
                "speedup": "speedup:.2f",
                "of bound": "of_bound",
            },
        )
    dispatchers = [row for row in answer["dispatchers"] if GROUPED not in row["flags"]]
    if len(dispatchers) > 1:
        yield _table(
            "the same layers by dispatcher that the cluster file has figures of",
            [row | {"exchange": row["exchange"] or "its own"} for row in dispatchers],
            {
                "dispatcher": "dispatcher",
                "exchange": "exchange",
                "Megatron's ms": "stock_ms:.1f",
                "AMPipe's ms": "predicted_ms:.1f",
                "speedup": "speedup:.2f",
                "figures": "figures",
            },
        )
    yield _table(
        "one block, one micro-batch, predicted ms",
        answer["degrees"],
        {
            **_OF_WAYS,
            "forward": "forward_ms:.3f",
            "backward": "backward_ms:.3f",
            "predicted": "predicted_ms:.3f",
            "speedup": "speedup:.2f",
            "hidden": "hidden_share:.1%",
        },
    )


def _memory_table(rows: Sequence[ReportView]) -> Table:
    by_strategy = [{**row, **row["memory_gib_by_strategy"]} for row in rows]
    title = "GiB of activations, one block, by --ampipe-memory"
    return _table(title, by_strategy, _OF_WAYS | {name: f"{name}:.2f" for name in STRATEGIES})


def _advice_on_memory(memory: ReportView) -> str:
    times = ", ".join(f"{name} {time_ms:.3f}" for name, time_ms in memory["simulated_ms"].items())
    return (
        f"to hold less, degree {memory['degree']}: {memory['equation_10']} by MPipeMoE's equation 10, "
        f"{memory['simulated']} by simulation (ms of the block: {times})"
    )


def _faster_with(rows: Sequence[ReportView]) -> Iterator[str]:
    """Other flags of Megatron that are predicted to be faster than the model's flags, the best first."""
    model_ms = min(row["predicted_ms"] for row in rows if not row["flags"])
    best: dict[str, ReportView] = {}
    for row in sorted(rows, key=lambda row: row["predicted_ms"]):
        if row["flags"] and row["predicted_ms"] < (1 - MINIMUM_SAVING) * model_ms:
            best.setdefault(" ".join(row["flags"]), row)
    for flags, row in best.items():
        time_ms, speedup, figures = row["predicted_ms"], row["speedup"], row["figures"]
        yield (
            f"with {flags}: layers take {time_ms:.4g} ms in place of {model_ms:.4g}, {speedup:.2f} times as "
            f"fast as Megatron's with it (figures {figures})"
        )


def _held(memory: ReportView, device_gib: float | None) -> str:
    """The memory of the fullest rank, and whether it fits."""
    parts = ("weights", "gradients", "optimizer", "activations", "buffers")
    shown = ", ".join(f"{part} {memory[f'{part}_gib']:.1f}" for part in parts if memory[f"{part}_gib"])
    limit = "" if device_gib is None else f" of {device_gib:g}"
    total = memory["total_gib"]
    text = f"memory of the fullest rank, estimated: {total:.1f}{limit} GiB ({shown})"
    if device_gib is None or total <= device_gib:
        return text
    return (
        f"{text}. That does not fit: use more ranks with --use-distributed-optimizer, more pipeline stages, "
        "or keep fewer activations (--ampipe-memory, --recompute-granularity)"
    )


def _advice_on_gradients(gradients: ReportView) -> str:
    ways, name = {way["name"]: way for way in gradients["ways"]}, gradients["chosen"]
    both = {name: way["pass_ms"] + way["left_ms"] for name, way in ways.items()}
    compared = f"placed {both[PLACED]:.3f} ms, stock {both[STOCK]:.3f} ms"
    if name not in (STOCK, PLACED):
        return f"gradients: overlapping their reductions saves nothing ({compared})"
    flags, size = "--overlap-grad-reduce", ways[name]["bucket_size"]
    flags += "" if name == STOCK else f" --ampipe-grad-reduce {PLACED}"
    flags += "" if size is None else f" --ddp-bucket-size {size}"
    return f"gradients: use {flags} ({compared}); {ways[name]['left_ms']:.3f} ms are left after the pass"
