"""Tables that stand in pages between two comments: of each its page, its raw files, and how it is made."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import long_runs
from comparisons import (
    ALL_KINDS,
    CHUNKS,
    GRAPHS,
    MEGATRON_GRAPHS,
    MOE_ONLY,
    MOE_ONLY_WHOLE,
    PARTNERS,
    WHOLE,
    Comparison,
    comparisons_of,
    merged,
)
from gpu_checks import plan_table, queues_table, ranks_table
from raw_files import Documents, bench_results, link_to, markdown, steps_of, with_peaks, without_empty

GPU_CHECKS = r"gpu-check-.*"
GPU_LAYERS = r"gpu-check-(?!te-h200).*|deepseek-te-h200"
GPU_STEPS = r"gpu-check-(?!te-h200).*|partners-te-h200"
CPU_LAYERS = r"cpu-small-(\d+mbit|none)(?!-pretended).*|layers-training-.*|partners-.*mbit.*"


@dataclass(frozen=True, slots=True)
class Block:
    """A table of a page."""

    page: str
    name: str
    files: str
    """A pattern of the names of its raw files."""
    table: Callable[[Documents], str]


def results(documents: Documents) -> str:
    """The README's table: one row for a setting, merged over its runs; no kind is chosen by its time."""
    runs = [run for document in documents.values() for run in comparisons_of(document)]
    # Without a control, Megatron's layers had another all-to-all on a CPU; emulated links are not its topic.
    runs = [run for run in runs if not run.on_cpu or (run.noise is not None and not run.emulated)]
    rows = []
    for (where, what), belongs in SETTINGS.items():
        chosen = [run for run in runs if belongs(run)]
        for kinds in (KINDS, GRAPH_KINDS):
            found = [merged(chosen, kind) for kind in kinds]
            cells = ["" if speedup is None else str(speedup) for speedup in found]
            if any(cells):
                noises = [run.noise for run in chosen if run.noise is not None]
                rows.append(
                    [
                        where,
                        what if kinds is KINDS else "the same, CUDA graphs",
                        f"{len(chosen)}",
                        *cells,
                        *[""] * (len(KINDS) - len(cells)),
                        f"{max(noises):.1%}",
                    ]
                )
    return markdown(["", "", "runs", "2 chunks", "4 chunks", "partners", "noise"], rows)


KINDS = (CHUNKS.format(2), CHUNKS.format(4), PARTNERS)
GRAPH_KINDS = (GRAPHS.format(2), GRAPHS.format(4))


Filter = Callable[[Comparison], bool]


def _on_cpus(link: str, *, layers: int, micro_batches: int, is_training: bool = False) -> Filter:
    wanted = (True, link, 1, layers, micro_batches, is_training)

    def belongs(run: Comparison) -> bool:
        return (run.on_cpu, run.link, run.topk, run.layers, run.micro_batches, run.is_training) == wanted

    return belongs


def _on_a_gpu(link: str, case: str) -> Filter:
    def belongs(run: Comparison) -> bool:
        return not run.on_cpu and (run.link, run.case) == (link, case)

    return belongs


def _settings() -> dict[tuple[str, str], Filter]:
    found = {("CPUs, no slow link", "one layer"): _on_cpus("none", layers=1, micro_batches=1)}
    for link, where in {"200mbit": "CPUs, 200 Mbit/s", "100mbit": "CPUs, 100 Mbit/s"}.items():
        found[where, "one layer"] = _on_cpus(link, layers=1, micro_batches=1)
        found[where, "four layers"] = _on_cpus(link, layers=4, micro_batches=8)
        for micro_batches in (8, 2):
            what = f"training, {micro_batches} micro-batches"
            found[where, what] = _on_cpus(link, layers=4, micro_batches=micro_batches, is_training=True)
    found["H200, 50 GB/s", "Mixtral layer"] = _on_a_gpu("emulated:50GB/s", "mixtral-8k")
    where = "H200, 20 GB/s"
    found[where, "Mixtral layer"] = _on_a_gpu("emulated:20GB/s", "mixtral-8k")
    found[where, "DeepSeek layer"] = _on_a_gpu("emulated:20GB/s", "deepseek-8k-te")
    found[where, "four Mixtral layers"] = _on_a_gpu("emulated:20GB/s", "mixtral-4k-te")
    return found


SETTINGS = _settings()
"""The README's rows, where and what, and which runs belong to each."""


def check_steps(documents: Documents) -> str:
    """How every step of both checks of a GPU ended."""
    rows = []
    for name, document in documents.items():
        for step in document["steps"]:
            said = step["said"].split(" in ")[0] if step["outcome"] != "ok" else ""
            rows.append([link_to(name), step["name"], step["outcome"], said, f"{step['seconds']:.0f}"])
    return markdown(["file", "step", "outcome", "what it printed", "s"], rows)


def gpu_layers(documents: Documents) -> str:
    """One layer on a GPU: every kind, with ranges."""
    rows = []
    for run in _runs(documents):
        if run.layers == 1:
            kinds = [kind.format(degree) for degree in (2, 4) for kind in (MOE_ONLY, CHUNKS)]
            shares = [run.bound_shares.get(kind) for kind in (CHUNKS.format(2), CHUNKS.format(4))]
            rows.append(
                [
                    run.case,
                    run.link.removeprefix("emulated:").removesuffix("GB/s"),
                    f"{run.stock_ms:.1f}",
                    f"{run.noise:.1%}",
                    *(str(run.speedups.get(kind, "")) for kind in kinds),
                    ", ".join(f"{share:.0%}" for share in shares if share is not None),
                ]
            )
    head = [
        "case",
        "GB/s",
        "Megatron, ms",
        "noise",
        "2, moe-only",
        "2",
        "4, moe-only",
        "4",
        "of the bound: 2, 4",
    ]
    return markdown(head, rows)


def whole_graphs(documents: Documents) -> str:
    """One layer on a GPU, with fixed rows and whole passes as graphs."""
    rows = []
    kinds = [kind.format(degree) for degree in (2, 4) for kind in (MOE_ONLY_WHOLE, WHOLE)]
    for name, document in documents.items():
        for run in comparisons_of(document):
            found = [run.speedups.get(kind) for kind in kinds]
            if run.layers > 1 or not any(found):
                continue
            partial = run.speedups.get(MEGATRON_GRAPHS)
            rows.append(
                [
                    link_to(name),
                    run.case,
                    run.link.removeprefix("emulated:"),
                    f"{run.stock_ms:.1f}",
                    f"{run.noise:.1%}",
                    *("" if speedup is None else str(speedup) for speedup in (partial, *found)),
                    *_verdicts(run),
                ]
            )
    if not rows:
        return "Unmeasured: no GPU has run it yet.\n"
    head = [
        *("file", "case", "link", "Megatron, ms", "noise", "Megatron's graphs"),
        *("2, moe-only", "2", "4, moe-only", "4", "4 as fast as 2", "faster than moe-only"),
    ]
    return markdown(head, rows)


def _verdicts(run: Comparison) -> list[str]:
    """Whether four chunks are not slower than two, and the best number of them faster than ``moe-only``'s."""
    two, four = (run.speedups.get(WHOLE.format(degree)) for degree in (2, 4))
    alone = [run.speedups.get(MOE_ONLY_WHOLE.format(degree)) for degree in (2, 4)]
    alone += [run.speedups.get(MOE_ONLY.format(degree)) for degree in (2, 4)]
    best_alone = max((speedup.median for speedup in alone if speedup is not None), default=None)
    if two is None or four is None or best_alone is None or run.noise is None:
        return ["", ""]
    is_as_fast = four.median >= two.median / (1 + run.noise)
    is_faster = max(two.median, four.median) > best_alone * (1 + run.noise)
    return ["yes" if is_as_fast else "no", "yes" if is_faster else "no"]


def gpu_steps(documents: Documents) -> str:
    """Several layers and micro-batches on a GPU: a row for each kind of step."""
    runs = [run for run in _runs(documents) if run.layers > 1]
    rows = [["Megatron's layers, ms a micro-batch", *(f"{run.stock_ms:.1f}" for run in runs)]]
    rows.append(["noise", *(f"{run.noise:.1%}" for run in runs)])
    for kind in dict.fromkeys(ALL_KINDS):
        cells = [str(run.speedups.get(kind, "")) for run in runs]
        if any(cells):
            rows.append([kind, *cells])
    return markdown(["", *(f"{run.case}" for run in runs)], rows)


def _runs(documents: Documents) -> list[Comparison]:
    return [run for document in documents.values() for run in comparisons_of(document)]


def training_steps(documents: Documents) -> Iterator[tuple[str, str, Mapping[str, Any]]]:
    """Of every step that trained: its file, its family and what it found."""
    for name, document in documents.items():
        for step in steps_of(document):
            if step["kind"] == "training":
                found = step["found"]
                yield name, found.get("family", "local"), found


def gpu_losses(documents: Documents) -> str:
    """How far losses of Megatron's loop differ from stock Megatron's: at most, and in the first iteration."""
    rows = []
    for name, family, found in training_steps(documents):
        losses = found.get("losses") or {kind: each["losses"] for kind, each in found["kinds"].items()}
        for kind, curve in losses.items():
            if kind != "stock":
                of_model, of_balance = (_apart(curve, losses["stock"], place) for place in (0, 1))
                cells = [f"{max(of_model):.0e}", f"{max(of_balance):.0e}", f"{of_model[0]:.0e}"]
                rows.append(
                    [link_to(name), family, kind, *("0" if cell == "0e+00" else cell for cell in cells)]
                )
    head = [
        "file",
        "layers",
        "with AMPipe",
        "loss, at most",
        "balance loss, at most",
        "loss, first iteration",
    ]
    return markdown(head, rows)


def _apart(curve: Sequence[Sequence[float]], stock: Sequence[Sequence[float]], place: int) -> list[float]:
    """Of every iteration, the relative difference of the loss at a place."""
    return [
        abs(ours[place] - expected[place]) / abs(expected[place])
        for ours, expected in zip(curve, stock, strict=True)
    ]


def gpu_loop(documents: Documents) -> str:
    """Times of an iteration of Megatron's loop."""
    rows = []
    for name, family, found in training_steps(documents):
        times = {kind: each["ms"] for kind, each in found.get("kinds", {}).items()}
        for kind, ms in times.items():
            speedup = "" if kind == "stock" else f"{times['stock'] / ms:.2f}"
            rows.append([link_to(name), family, kind, f"{ms:.0f}", speedup])
    return markdown(["file", "layers", "kind", "ms an iteration", "speedup"], rows)


def gpu_memory(documents: Documents) -> str:
    """Peak of a layer's pass as a share of Megatron's, and how far the prediction is off."""
    rows = []
    for document in documents.values():
        for found in bench_results(document):
            for case in with_peaks(found)["cases"]:
                rows += _peaks(case)
    unique = list(dict.fromkeys(tuple(row) for row in rows))
    return markdown(["case", "chunks", "peak, of Megatron's", "predicted over measured"], unique)


def _peaks(case: Mapping[str, Any]) -> list[list[str]]:
    rows = []
    for row in case["rows"]:
        # Of padding and graphs there is no prediction.
        if row["schedule"] == "ampipe" and "predicted_peak_bytes" in row:
            share = row["peak_bytes"] / case["stock_peak_bytes"]
            off = row["predicted_peak_bytes"] / row["peak_bytes"]
            rows.append([case["name"], f"{row['degree']}", f"{share:.2f}", f"{off:.2f}"])
    return rows


def gpu_host(documents: Documents) -> str:
    """The host's time to issue a stage of one chunk."""
    rows = []
    for document in documents.values():
        for step in steps_of(document):
            if step["kind"] == "profile":
                issued = step["found"]["issued_us"]
                kinds = list(dict.fromkeys(kind for times in issued.values() for kind in times))
                for direction, times in issued.items():
                    cells = [f"{times[kind]:.0f}" if kind in times else "" for kind in kinds]
                    rows.append([direction, *cells, f"{statistics.fmean(times.values()):.0f}"])
    return markdown(["us", *kinds, "mean"], rows)


def partners_by_link(documents: Documents) -> str:
    """Partners over every link, merged over the runs."""
    by_setting: dict[tuple[str, str], list[Comparison]] = {}
    for run in _runs(documents):
        what = "training" if run.is_training else "four layers"
        by_setting.setdefault((what, run.link), []).append(run)
    kinds = [*KINDS[:2], PARTNERS, "partners in 2 chunks", "partners, listed", "partners, searched"]
    rows = []
    for (what, link), runs in by_setting.items():
        shares = [run.bound_shares["partners, searched"] for run in runs if run.bound_shares]
        noises = [run.noise for run in runs if run.noise is not None]
        rows.append(
            [
                what,
                link,
                f"{len(runs)}",
                *(str(merged(runs, kind) or "") for kind in kinds),
                _from_to(shares) if shares else "",
                f"{max(noises):.0%}",
            ]
        )
    head = ["", "link", "runs", *kinds, "searched, of the bound", "noise"]
    return without_empty(head, rows)


def _from_to(values: Sequence[float]) -> str:
    least, greatest = f"{min(values):.1%}", f"{max(values):.1%}"
    return least if least == greatest else f"{least} to {greatest}"


def memory_saved(documents: Documents) -> str:
    """Peaks of each strategy as shares of Megatron's, and what it takes longer than ``keep``."""
    peaks: dict[tuple[str, str], list[float]] = {}
    times: dict[tuple[str, str], list[float]] = {}
    off: list[float] = []
    for document in map(with_peaks, documents.values()):
        for case in document["cases"]:
            keep = next((row["samples_ms"] for row in case["rows"] if row["memory"] == "keep"), None)
            for row in case["rows"]:
                key = (row["memory"], case["name"])
                peaks.setdefault(key, []).append(row["peak_bytes"] / case["stock_peak_bytes"])
                off.append(row["predicted_peak_bytes"] / row["peak_bytes"] - 1)
                if keep and row["memory"] != "keep" and document["link"] == "200mbit":
                    more = statistics.median(b / a - 1 for a, b in zip(keep, row["samples_ms"], strict=True))
                    times.setdefault(key, []).append(more)
    dtypes = sorted({dtype for _, dtype in peaks}, reverse=True)
    rows = []
    for strategy in dict.fromkeys(strategy for strategy, _ in peaks):
        cells = []
        for dtype in dtypes:
            shares, more = peaks.get((strategy, dtype), []), times.get((strategy, dtype), [])
            cells += [_range(shares, ".0%"), _range(more, "+.1%")]
        rows.append([strategy, *cells])
    head = ["strategy", *(f"{dtype}, {what}" for dtype in dtypes for what in ("peak", "more time"))]
    error = f"\nPredicted peaks of these runs are off by {min(off):+.1%} to {max(off):+.1%}.\n"
    return without_empty(head, rows) + error


def _range(values: Sequence[float], form: str) -> str:
    if not values:
        return ""
    least, greatest = f"{min(values):{form}}", f"{max(values):{form}}"
    return least if least == greatest else f"{least} to {greatest}"


def weight_gradients(documents: Documents) -> str:
    """One chunk with ``lancet``, and the fastest number of chunks of ``ampipe``."""
    rows = []
    for document in documents.values():
        for case in document["cases"]:
            of_schedule = {
                schedule: [row for row in case["rows"] if row["schedule"] == schedule]
                for schedule in ("ampipe", "lancet")
            }
            fastest = min(of_schedule["ampipe"], key=_time)
            (uncut,) = (row for row in of_schedule["lancet"] if row["degree"] == 1)
            rows.append(
                [
                    document["link"],
                    case["name"],
                    f"{uncut['ms']:.0f}",
                    f"{fastest['ms']:.0f} ({fastest['degree']})",
                ]
            )
    return markdown(["link", "case", "`lancet`, one chunk, ms", "`ampipe`, ms (chunks)"], rows)


def _time(row: Mapping[str, Any]) -> float:
    return float(row["ms"])


def condensed(documents: Documents) -> str:
    """Final losses of trainings that send fewer or narrower rows, next to those of the exact training."""
    (document,) = documents.values()
    final: dict[tuple[str, int], float] = {}
    shares: dict[str, list[float]] = {}
    for run in document["runs"].values():
        last = run["lm_loss"][-len(run["lm_loss"]) // 10 :]
        final[run["setting"], run["seed"]] = statistics.mean(last)
        shares.setdefault(run["setting"], []).extend(run["condensed_share"])
    seeds = sorted({seed for _, seed in final})
    exact = [final["exact", seed] for seed in seeds]
    rows = [["exact, other seed", "", "", f"{max(exact) - min(exact):.3f}"]]
    for setting, share in shares.items():
        if setting != "exact":
            off = [final[setting, seed] - final["exact", seed] for seed in seeds]
            sent = f"{statistics.mean(share):.0%}" if share else ""
            rows.append([setting, sent, f"{min(off):+.3f} to {max(off):+.3f}", f"{max(map(abs, off)):.3f}"])
    return markdown(["setting", "rows not sent", "loss, minus exact", "at most apart"], rows)


def gains(documents: Documents) -> str:
    """How many times as fast one way of a run is as another, both at their best degree."""
    rows = []
    for document in documents.values():
        for case in document["cases"]:
            for what, column, before, after in GAINS:
                times = {
                    value: min((row["ms"] for row in case["rows"] if row.get(column) == value), default=None)
                    for value in (before, after)
                }
                if times[before] is not None and times[after] is not None:
                    ratio = times[before] / times[after]
                    experts = f"{case['block']['topk']} of {case['block']['experts']}"
                    cells = [f"{times[before]:.0f}", f"{times[after]:.0f}", f"{ratio:.2f}x"]
                    rows.append([what, document["link"], experts, *cells])
    rows.sort(key=lambda row: [gain[0] for gain in GAINS].index(row[0]))
    return markdown(["", "link", "experts of a token", "before, ms", "after, ms", "faster"], rows)


GAINS = (
    ("four layers in one schedule, over layer by layer", "stack", 1, 4),
    ("`ranks` over `rows`", "exchange", "rows", "ranks"),
    ("`nodes` over `rows`", "exchange", "rows", "nodes"),
)


BLOCKS = (
    Block("README.md", "results", rf"{CPU_LAYERS}|{GPU_LAYERS}|{GPU_STEPS}", results),
    Block("docs/gpu.md", "steps", GPU_CHECKS, check_steps),
    Block("docs/gpu.md", "layers", GPU_LAYERS, gpu_layers),
    Block("docs/gpu.md", "whole graphs", GPU_LAYERS, whole_graphs),
    Block("docs/gpu.md", "several layers", GPU_STEPS, gpu_steps),
    Block("docs/gpu.md", "losses", GPU_CHECKS, gpu_losses),
    Block("docs/gpu.md", "loop", "gpu-check-h200", gpu_loop),
    Block("docs/gpu.md", "memory", GPU_LAYERS, gpu_memory),
    Block("docs/gpu.md", "host", "gpu-check-h200", gpu_host),
    Block("docs/gpu.md", "plan of the check", r"(?!)", plan_table),
    Block("docs/gpu.md", "ranks", GPU_CHECKS, ranks_table),
    Block("docs/gpu.md", "order of kernels", GPU_CHECKS, queues_table),
    Block("docs/partners.md", "partners", r"partners-(?!te-).*", partners_by_link),
    Block("docs/memory.md", "saved", r"memory-.*", memory_saved),
    Block("docs/weights.md", "lancet", r"lancet-(?!covers).*", weight_gradients),
    Block("docs/wire.md", "condensed", "condense", condensed),
    Block("docs/troubleshooting.md", "long runs", r"soak-.*", long_runs.table),
    Block("docs/measured.md", "gains", r"layers-(?!training).*|exchange-.*|nodes-.*", gains),
)
