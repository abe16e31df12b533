"""From what the steps wrote to the one table at the end. Reads files as text; imports no torch.

Called by :mod:`.__main__`, with the document that ``summary.json`` holds.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.table import Table

from gpu_check import ranks
from gpu_check.families import COMPARED
from gpu_check.steps import Outcome
from megatron_ampipe.files.timeline import DIRECTIONS
from megatron_ampipe.tools.measuring.bench_job import EXACT, STOCK_GRAPHS
from megatron_ampipe.tools.measuring.tolerance import Tolerance

_TESTS = {
    "test_equals_stock_in_fp32": "parity fp32",
    "test_equals_stock_in_bf16": "parity bf16",
    "test_every_layer_case_in_fp32": "parity fp32, every layer",
    "test_partners_equal_stock_in_fp32": "partners, parity fp32",
    "test_partners_equal_the_sequence_of_stages": "partners under stress",
    "test_replays_equal_stock": "CUDA graphs, parity",
    "test_steps_with_partners_equal_stock": "CUDA graphs, whole passes with partners",
    "test_under_data_parallelism": "CUDA graphs, gradients under --overlap-grad-reduce",
    "test_transformer_engine_under_graphs": "CUDA graphs, layers of Transformer Engine",
    "test_replays_do_not_make_the_host_wait": "CUDA graphs, host waits",
    "test_the_host_has_less_to_do": "CUDA graphs, host time",
    "test_equals_the_sequence_of_stages": "under stress, compared with its stages in turn",
    "test_equals_stock_at_real_sizes": "under stress, parity fp32",
    "test_a_missing_wait_is_seen": "the stress shows a missing wait",
    "test_an_early_release_is_seen": "the stress shows an early release",
    "test_a_transfer_lasts_as_long_as_the_link_takes": "emulated transfers that move bytes, their time",
    "test_every_block_moves_its_share": "emulated transfers, every block moves its share",
    "test_nothing_makes_the_host_wait_between_chunks": "host waits (torch's own check)",
    "test_local_layers_under_overlapped_reduction": "gradients under --overlap-grad-reduce",
    "test_transformer_engine_under_overlapped_reduction": "the same, layers of Transformer Engine",
    "test_transformer_engine_delays_weight_gradients": "the same, weight gradients apart",
    "test_transformer_engine_in_fp8": "the same, in FP8",
    "test_transformer_engine_over_fixed_rows": "the same, over fixed rows, host waits",
    "test_compiled_by_megatron_in_fp32": "parity fp32, functions that Megatron compiles",
    "test_attention_kernel_in_bf16": "attention kernels",
    "test_log_sum_exp_of_pieces": "attention kernels, log-sum-exp",
    "test_features_beyond_plain_attention": "attention kernels: documents, windows, latent attention, sinks",
    "test_the_backward_drops_the_weights_of_the_forward": "attention kernels, dropout",
    "test_all_chunks_use_the_same_backend": "one backend for all chunks",
    "test_the_chosen_kernel_runs": "the chosen kernel",
}
"""What the tests of ``tests/gpu`` are called in the table."""
_COUNTS_WAIT = "cudaEventSynchronize"
_MIB = 2**20


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table."""

    check: str
    outcome: Outcome
    finding: str
    seconds: float | None = None


def rows(document: Mapping[str, Any]) -> list[Row]:
    """All lines; every step has at least one."""
    found: list[Row] = []
    for step in document["steps"]:
        outcome = Outcome(step["outcome"])
        lines: list[Row] = []
        # What a step that was cut had written is whole, or it would not be there.
        if step["found"] is not None:
            try:
                lines = list(_READERS[step["kind"]](step["found"]))
            except (ValueError, KeyError, TypeError) as error:
                lines = [Row(step["name"], Outcome.FAILED, f"its result cannot be read ({error!r})")]
        if outcome is not Outcome.OK and not any(line.outcome is Outcome.DIFFERENT for line in lines):
            lines.append(Row(step["name"], outcome, step["said"]))
        if not lines:
            lines = [Row(step["name"], Outcome.FAILED, "it wrote no result")]
        first = lines[0]
        found += [Row(first.check, first.outcome, first.finding, step["seconds"]), *lines[1:]]
    return found


def show(document: Mapping[str, Any], lines: Sequence[Row]) -> None:
    """Print the table."""
    device = document["device"]
    built = f"torch {device['torch']} · CUDA {device['cuda']}"
    title = f"{device['gpu']} · {built} · {document['seconds']:.0f} s in all"
    table = Table(title=title, title_justify="left")
    table.add_column("check", overflow="fold")
    table.add_column("outcome")
    table.add_column("finding", overflow="fold")
    table.add_column("s", justify="right")
    for line in lines:
        seconds = "" if line.seconds is None else f"{line.seconds:.0f}"
        style = None if line.outcome is Outcome.OK else "bold"
        table.add_row(line.check, str(line.outcome), line.finding, seconds, style=style)
    # A log is as wide as it needs to be; only a terminal has an edge.
    Console(width=None if sys.stdout.isatty() else 140).print(table)


def _tests(text: str) -> Iterator[Row]:
    """From the lines of :mod:`.case_lines`: of each test function, how many of its cases passed."""
    lines = [json.loads(line) for line in text.splitlines() if line.endswith("}")]
    if not lines:
        raise ValueError("no test ran")
    planned = lines[0]["tests"]
    by_function: dict[str, list[dict[str, Any]]] = {}
    for line in lines:
        if "test" in line:
            by_function.setdefault(line["test"].partition("[")[0], []).append(line)
    if not by_function:
        raise ValueError("no test ran")
    for function, cases in by_function.items():
        ran = [case for case in cases if case["outcome"] != "skipped"]
        wrong = [case for case in ran if case["outcome"] == "failed"]
        finding = f"{len(ran) - len(wrong)} of {len(ran)} cases"
        if len(ran) < len(cases):
            reasons = dict.fromkeys(case["said"] for case in cases if case["outcome"] == "skipped")
            finding += f", {len(cases) - len(ran)} skipped ({'; '.join(reasons)[:200]})"
        if wrong:
            finding += f"; first: {wrong[0]['test']}: {wrong[0]['said']}"[:300]
        notes = dict.fromkeys(note for case in cases for note in case["notes"])
        finding += "".join(f"; {note}" for note in notes)
        outcome = Outcome.DIFFERENT if wrong else Outcome.OK if ran else Outcome.SKIPPED
        yield Row(_TESTS.get(function, function), outcome, finding)
    ended = len({case["test"] for cases in by_function.values() for case in cases})
    if ended < planned:
        yield Row("tests that did not end", Outcome.CUT, f"{planned - ended} of {planned}")


def _profile(text: str) -> Iterator[Row]:
    """Overlap, host synchronisation, peak memory of one block."""
    found = json.loads(text)
    where = f"{found['case']}, {found['link']}, degree {found['degree']}, {found['kernel']} attention"
    required = _required_share(found)
    yield Row(
        "overlap",
        Outcome.OK if found["hidden_share"] >= required else Outcome.DIFFERENT,
        f"{found['hidden_share']:.0%} of {found['communication_ms']:.2f} ms of communication under "
        f"{found['compute_ms']:.2f} ms of computation, at least {required:.0%} required ({where})"
        + (f"; the link counts clock cycles: {found['why_cycles']}" if found.get("why_cycles") else ""),
    )
    for direction in DIRECTIONS:
        waits = dict(found["host_waits"][direction])
        # The split sizes of dropless routing: one wait for each chunk, after the next chunk's attention.
        allowed = found["degree"] if direction == "forward" else 0
        for_counts = waits.pop(_COUNTS_WAIT, 0)
        others = ", ".join(f"{count} x {call}" for call, count in sorted(waits.items()))
        yield Row(
            f"host waits, {direction}",
            Outcome.OK if not waits and for_counts <= allowed else Outcome.DIFFERENT,
            f"{for_counts} for split sizes ({allowed} allowed), others: {others or 'none'}",
        )
    peaks = dict(found["peak_bytes"])
    stock = peaks.pop("stock")
    if stock:
        shares = ", ".join(f"{name} {peak / stock:.2f}" for name, peak in peaks.items())
        yield Row("peak memory", Outcome.OK, f"stock {stock / _MIB:.0f} MiB; of that: {shares}")
    held = [
        f"{name} {stats['reserved_bytes'] / _MIB:.0f} MiB, {stats['inactive_bytes'] / _MIB:.0f} in pieces, "
        f"{stats['retries']} retries"
        for name, stats in found["allocator"].items()
        if stats
    ]
    if held:
        yield Row("memory that torch's allocator held", Outcome.OK, "; ".join(held))
    for direction, times in found["issued_us"].items():
        shown = ", ".join(f"{kind} {us:.0f}" for kind, us in times.items())
        yield Row(f"host time per stage, {direction}", Outcome.OK, f"microseconds: {shown}")


def _required_share(found: Mapping[str, Any]) -> float:
    """How much of the communication has to be hidden: half of what a schedule of equal chunks could hide.

    The first chunk's dispatch and the last one's combine have nothing to travel under, which is one part in
    as many as there are chunks; and no more can be hidden than there is computation.
    """
    communication_ms = float(found["communication_ms"])
    # Without any there is nothing that was hidden.
    under_computation = min(1.0, float(found["compute_ms"]) / communication_ms) if communication_ms else 1.0
    return 0.5 * under_computation * (1 - 1 / int(found["degree"]))


def _attention(text: str) -> Iterator[Row]:
    """The times of the attention kernels, and how far they are from the first one."""
    document = json.loads(text)
    for case in document["cases"]:
        kernels = case["kernels"]
        times = [_time_of_kernel(name, found) for name, found in kernels.items()]
        if case.get("control"):
            times.append(_time_of_kernel("the first again", case["control"]))
        reasons = [f"{name}: {reason}" for name, reason in case["unusable"].items()]
        # A NaN is not at most what is allowed.
        wrong = {
            name: found["difference"]
            for name, found in kernels.items()
            if not found["difference"] <= document["allowed"]
        }
        differing = [f"{name} differs by {difference:.0e}" for name, difference in wrong.items()]
        outcome = Outcome.DIFFERENT if wrong else Outcome.OK if kernels else Outcome.SKIPPED
        yield Row(f"attention, {case['name']}", outcome, "; ".join([*differing, *times, *reasons]))


def _time_of_kernel(name: str, found: Mapping[str, Any]) -> str:
    # Checks of earlier formats have no range.
    low, high = found.get("range_ms", [found["ms"], found["ms"]])
    spread = "" if low == high else f", {low:.2f} to {high:.2f}"
    return f"{name} {found['ms']:.2f} ms{spread} (host {found['host_us']:.0f} us)"


def _training(text: str) -> Iterator[Row]:
    """Losses and gradient norms of Megatron's loop with AMPipe, compared with those without."""
    found = json.loads(text)
    for name, differences in found["differences"].items():
        # Checks of format 1 compared losses alone.
        compared = list(zip(COMPARED, differences, found["allowed"], strict=False))
        wrong = [what for what, difference, allowed in compared if not difference <= allowed]
        shown = ", ".join(
            f"{what} {difference:.0e} ({allowed:.0e} allowed)" for what, difference, allowed in compared
        )
        finding = f"{len(found['losses'][name])} iterations differ at most by: {shown}"
        if name in found.get("repeats", {}):
            num_steps, num_repeated = found["repeats"][name]
            finding += f"; {num_repeated} of {num_steps} steps with budgets repeated"
        outcome = Outcome.DIFFERENT if wrong else Outcome.OK
        yield Row(f"training, {found['family']}, {name}", outcome, finding)
    for name, why in found["failed"].items():
        yield Row(f"training, {found['family']}, {name}", Outcome.FAILED, why)


def _partners(text: str) -> Iterator[Row]:
    """Steps of several micro-batches through four layers."""
    document = json.loads(text)
    medians = {name: statistics.median(seconds) for name, seconds in document["seconds"].items()}
    case, stock = document["case"], medians.pop("megatron")
    shown = ", ".join(f"{name} {stock / seconds:.2f}x" for name, seconds in medians.items())
    each_ms = 1e3 * stock / case["microbatches"]
    # Without one, the document is of a version that did not prescribe experts, and so compared nothing.
    tolerance = document.get("tolerance", 0.0)
    wrong = {
        name: difference
        for name, difference in document["differences"].items()
        if not difference <= tolerance
    }
    finding = f"stock {each_ms:.1f} ms a micro-batch; {shown}"
    if wrong:
        worst = max(wrong, key=wrong.__getitem__)
        finding += f"; {worst} differs from stock by {wrong[worst]:.0e}, {tolerance:.0e} allowed"
    yield Row(
        f"partners, {case['name']}, {document['command'][3]}",
        Outcome.DIFFERENT if wrong else Outcome.OK,
        finding,
    )


def _bench(text: str) -> Iterator[Row]:
    """The fastest row of each schedule of each case, by the kind of its rows and graphs."""
    document = json.loads(text)
    for case in document["cases"]:
        by_kind: dict[str, list[Any]] = {}
        for row in case["rows"]:
            if row["degree"] > 1 or row["schedule"] == STOCK_GRAPHS:
                by_kind.setdefault(_kind_of_row(row), []).append(row)
        parts = []
        for kind, rows in by_kind.items():
            best = min(rows, key=lambda row: row["ms"])
            where = f" at degree {best['degree']}" if best["degree"] > 1 else ""
            share = f" ({best['bound_share']:.0%} of bound)" if best["bound_share"] else ""
            parts.append(f"{kind} {best['speedup']:.2f}x{where}{share}")
        wrong = [
            row
            for row in (case["control"], *case["rows"])
            if not row["difference_from_stock"] <= Tolerance.of(case["block"]["dtype"], row.get("wire")).limit
        ]
        if wrong:
            worst = max(wrong, key=lambda row: row["difference_from_stock"])
            parts.append(
                f"{worst['schedule']} at degree {worst['degree']} differs from stock by "
                f"{worst['difference_from_stock']:.0e}"
            )
        yield Row(
            f"{case['name']}, {case['link']}",
            Outcome.DIFFERENT if wrong else Outcome.OK,
            f"stock {case['stock_ms']:.2f} ms; {'; '.join(parts)}",
        )


def _kind_of_row(row: Mapping[str, Any]) -> str:
    """Schedule, rows and graphs of a row of ``ampipe bench``."""
    if row["schedule"] == STOCK_GRAPHS:
        return "Megatron's graphs"
    parts = [row["schedule"]]
    if row.get("rows", EXACT) != EXACT:
        parts.append("fixed rows")
    if row.get("graphs"):
        parts.append("graphs")
    return ", ".join(parts)


def _ranks(text: str) -> Iterator[Row]:
    """From the lines of :mod:`.ranks`: how many cases of each kind equal Megatron's layers."""
    lines = [json.loads(line) for line in text.splitlines() if line.endswith("}")]
    head, found = lines[0], ranks.outcomes(lines)
    names_of: dict[str, list[str]] = {}
    for name, shows in head["cases"].items():
        names_of.setdefault(shows, []).append(name)
    over = "gloo" if head["nccl"] is None else f"NCCL {'.'.join(map(str, head['nccl']))}"
    for shows, names in names_of.items():
        # On every rank.
        ended = [name for name in names if len(found.get(name, {})) == head["ranks"]]
        said = {name: list(found[name].values()) for name in ended}
        skipped = [name for name in ended if all(how == "skipped" for how, _ in said[name])]
        wrong = {
            name: (rank, how, why)
            for name in ended
            for rank, (how, why) in sorted(found[name].items(), reverse=True)
            if how in ranks.BAD
        }
        ran = len(ended) - len(skipped)
        finding = f"{ran - len(wrong)} of {ran} cases"
        if skipped:
            finding += f", {len(skipped)} skipped ({said[skipped[0]][0][1]})"
        if wrong:
            name, (rank, how, why) = next(iter(wrong.items()))
            finding += f"; first: {name}, rank {rank} {how}: {why}"[:300]
        if len(ended) < len(names):
            finding += f"; {len(names) - len(ended)} did not end"
        outcome = Outcome.OK if ran else Outcome.SKIPPED
        if wrong:
            outcome = Outcome.DIFFERENT
        elif len(ended) < len(names):
            outcome = Outcome.CUT
        yield Row(f"{head['ranks']} ranks over {over}, {shows}", outcome, finding)


def _queues(text: str) -> Iterator[Row]:
    """Which environments let several ranks hang: no fault, but to know."""
    for line in (json.loads(line) for line in text.splitlines() if line.endswith("}")):
        named = ", ".join(f"{name}={value}" for name, value in line["environment"].items())
        bad = {name: how for name, how in line["found"].items() if set(how) & set(ranks.BAD)}
        finding = f"{len(line['found'])} cases end"
        if bad:
            name, how = next(iter(bad.items()))
            finding = f"{name}: {' and '.join(how)} ({''.join(line['said'])})"[:300]
        different = any("different" in how for how in bad.values())
        yield Row(named, Outcome.DIFFERENT if different else Outcome.OK, finding)


_READERS = {
    "ranks": _ranks,
    "queues": _queues,
    "tests": _tests,
    "training": _training,
    "profile": _profile,
    "attention": _attention,
    "partners": _partners,
    "bench": _bench,
}
