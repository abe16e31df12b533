"""The tables of ``docs/papers.md`` (:mod:`papers`): measured and predicted, of the cases of papers."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from raw_files import Document, Documents, bench_results, link_to, markdown, with_peaks, without_empty

Table = Callable[[Documents], str]

PREDICTED = "papers-predicted"
DEGREES = (2, 4, 8)
UNKNOWN = ""


def around(values: Sequence[float], form: str = ".2f") -> str:
    """The mean, and the least and the greatest in parentheses; nothing if there are no values."""
    if not values:
        return UNKNOWN
    mean, least, greatest = (
        f"{each:{form}}" for each in (statistics.fmean(values), min(values), max(values))
    )
    return mean if least == greatest else f"{mean} ({least} to {greatest})"


def bench_cases(
    documents: Documents, grids: Sequence[str]
) -> Iterator[tuple[str, Document, Mapping[str, Any]]]:
    """Every case of these grids that raw files hold, with the name of the file and the run that it is of."""
    for name, document in documents.items():
        for run in bench_results(document):
            if run["grid"] in grids:
                for case in run["cases"]:
                    yield name, run, case


def speedup(case: Mapping[str, Any], schedule: str, degree: int | None = None) -> float | None:
    """Megatron's time over that of a schedule; over that of its fastest degree if none is given."""
    found = [
        row["speedup"]
        for row in case["rows"]
        if row["schedule"] == schedule
        and row["degree"] == (degree or row["degree"])
        and row["degree"] > 1
        and row["backward_degree"] in (None, row["degree"])
    ]
    return max(found, default=None)


def figure_7_predicted(documents: Documents) -> str:
    """The 56 cases with three rates of the link: means, and the least and the greatest."""
    found = documents[PREDICTED]["ampipe figure 7"]
    rows = []
    for factor, cases in found["links"].items():
        times = list(cases.values())
        sent = [case["exchanges"] / case["stock"] for case in times]
        hidden = [case["stock"] / (case["stock"] - case["exchanges"]) for case in times]
        at_4 = {
            name: [case["stock"] / case[f"{name} 4"] for case in times] for name in ("ampipe", "moe-only")
        }
        best = {
            name: [max(case["stock"] / case[f"{name} {degree}"] for degree in DEGREES) for case in times]
            for name in at_4
        }
        ahead = sum(ours > theirs for ours, theirs in zip(at_4["ampipe"], at_4["moe-only"], strict=True))
        rows.append(
            [
                "as in the cluster file" if factor == "1" else f"{factor} times as long",
                f"{len(times)}",
                around(sent, ".0%"),
                around(hidden),
                around(at_4["ampipe"]),
                around(best["ampipe"]),
                around(at_4["moe-only"]),
                around(best["moe-only"]),
                f"{ahead}",
            ]
        )
    return markdown(["all-to-alls take", "cases", "share of Megatron's layer", "all hidden", *FIGURE_7], rows)


FIGURE_7 = (
    *("`ampipe`, degree 4", "best degree"),
    *("`moe-only`, degree 4", "its best degree"),
    "`ampipe` faster at degree 4",
)


def figure_7_measured(documents: Documents) -> str:
    """A row for each raw file: means over its cases, and the least and the greatest."""
    by_run: dict[tuple[str, str, str], list[Mapping[str, Any]]] = {}
    for name, run, case in bench_cases(documents, ("paper", "cpu-paper")):
        device = run["hardware"].get("gpu") or run["hardware"]["cpu"]
        by_run.setdefault((name, device, run["link"]), []).append(case)
    rows = []
    for (name, device, link), cases in by_run.items():
        columns = [[speedup(case, *which) for case in cases] for which in MEASURED]
        pairs = zip(columns[0], columns[2], strict=True)
        noises = [case["control"]["spread"] for case in cases]
        ahead = sum(
            ours > theirs * (1 + noise)
            for (ours, theirs), noise in zip(pairs, noises, strict=True)
            if ours is not None and theirs is not None
        )
        seen = sum(_difference_seen(case) for case in cases)
        rows.append(
            [
                link_to(name),
                device,
                link,
                f"{len(cases)} of 56",
                *(around([each for each in column if each is not None]) for column in columns),
                f"{ahead}",
                f"{seen}",
                f"{max(noises):.1%}",
            ]
        )
    *ways, faster = FIGURE_7
    head = ["file", "device", "link", "cases", *ways, f"{faster}, by more than noise", *SEEN]
    return without_empty(head, rows)


SEEN = ("difference from Megatron's seen at degree 4", "noise, at most")
MEASURED: tuple[tuple[Any, ...], ...] = (("ampipe", 4), ("ampipe",), ("moe-only", 4), ("moe-only",))


def _difference_seen(case: Mapping[str, Any]) -> bool:
    """Whether the row of ``ampipe`` at degree 4 is farther from 1 than the control's spread."""
    return any(
        row["difference_seen"] for row in case["rows"] if (row["schedule"], row["degree"]) == ("ampipe", 4)
    )


PAPER_TABLE_2 = {
    "medium-24k": (2230.3, 2090.7, 1959.5),
    "medium-32k": (3207.7, 3048.5, 2767.8),
    "large-24k": (2893.4, 2730.3, 2511.1),
    "large-32k": (4082.4, 3972.8, 3650.2),
}
"""AMPipe's table 2: ms of an iteration without AMPipe, with degree 2 and with degree 4."""


def table_2_predicted(documents: Documents) -> str:
    """The paper's speedups of an iteration, and the predicted ones of twelve layers."""
    cases = documents[PREDICTED]["ampipe table 2"]["cases"]
    rows = []
    for name, (without, degree_2, degree_4) in PAPER_TABLE_2.items():
        times = cases[name]
        ours = (times["stock"] / times[way] for way in ("ampipe 2", "ampipe 4", "stack 2", "stack 4"))
        rows.append(
            [
                name,
                *(f"{without / ms:.2f}" for ms in (degree_2, degree_4)),
                *(f"{ratio:.2f}" for ratio in ours),
            ]
        )
    head = ["model", "paper, degree 2", "paper, degree 4", "block by block, 2", "4", "one schedule, 2", "4"]
    return markdown(head, rows)


def table_2_measured(documents: Documents) -> str:
    """Twelve layers on a device."""
    rows = []
    for name, _, case in bench_cases(documents, ("paper-layers",)):
        cells = []
        for stack in (1, case["layers"]):
            for degree in (2, 4):
                (row,) = (
                    row
                    for row in case["rows"]
                    if (row["schedule"], row["degree"], row["stack"]) == ("ampipe", degree, stack)
                )
                cells.append(f"{row['speedup']:.2f}" + ", no difference seen" * (not row["difference_seen"]))
        rows.append([link_to(name), case["name"], *cells, f"{case['control']['spread']:.1%}"])
    return markdown(
        ["file", "case", "block by block, 2", "4", "one schedule, 2", "4", "noise"],
        rows,
    )


STRATEGIES = ("keep", "S1", "S2", "S3", "S4")


def memory_predicted(documents: Documents) -> str:
    """The paper's bound, and how much less than Megatron's the predicted peaks are."""
    rows = []
    cases = documents[PREDICTED]["mpipemoe"]["cases"]
    for degree in dict.fromkeys(case["degree"] for case in cases):
        chosen = [case for case in cases if case["degree"] == degree]
        cells = [around([each["bound"] for each in chosen], ".0%")]
        for name in STRATEGIES:
            cells.append(around([1 - each["bytes"][name] / each["stock_bytes"] for each in chosen], ".0%"))
        rows.append([f"{degree}", f"{len(chosen)}", *cells])
    return markdown(
        ["chunks", "cases", "the paper's bound", *(f"saved: {STRATEGIES[0]}", *STRATEGIES[1:])], rows
    )


def memory_measured(documents: Documents) -> str:
    """How much less than Megatron's measured peaks are, and how far predicted peaks are off."""
    by_run: dict[tuple[str, str, int], list[Mapping[str, Any]]] = {}
    predicted_now = {name: with_peaks(document) for name, document in documents.items()}
    for name, run, case in bench_cases(predicted_now, ("mpipemoe",)):
        device = run["hardware"].get("gpu") or run["hardware"]["cpu"]
        for degree in dict.fromkeys(row["degree"] for row in case["rows"]):
            by_run.setdefault((name, device, degree), []).append(case)
    rows = []
    for (name, device, degree), cases in by_run.items():
        cells = []
        off: list[float] = []
        for strategy in STRATEGIES:
            found = [(_strategy_row(case, degree, strategy), case["stock_peak_bytes"]) for case in cases]
            cells.append(around([1 - row["peak_bytes"] / stock for row, stock in found], ".0%"))
            off += [row["predicted_peak_bytes"] / row["peak_bytes"] - 1 for row, _ in found]
        cells.append(f"{min(off):+.0%} to {max(off):+.0%}")
        cells += [_slower(cases, degree, name) for name in STRATEGIES[1:]]
        rows.append([link_to(name), device, f"{len(cases)}", f"{degree}", *cells])
    times = (f"time of {name}, of `keep`" for name in STRATEGIES[1:])
    return without_empty(["file", "device", "cases", "chunks", *SAVED, OFF, *times], rows)


SAVED = ("saved: keep", *STRATEGIES[1:])
OFF = "predicted peaks are off by"


def memory_on_cpus(documents: Documents) -> str:
    """The same of the block of ``docs/memory.md``, over all runs: bytes do not depend on the machine."""
    saved: dict[tuple[str, int], dict[str, list[float]]] = {}
    off: dict[tuple[str, int], list[float]] = {}
    predicted_now = {name: with_peaks(document) for name, document in documents.items()}
    for _, _, case in bench_cases(predicted_now, ("memory-grid",)):
        for row in case["rows"]:
            strategy = NAMED.get(row["memory"], row["memory"])
            if strategy in STRATEGIES:
                key = (case["name"], row["degree"])
                share = 1 - row["peak_bytes"] / case["stock_peak_bytes"]
                saved.setdefault(key, {}).setdefault(strategy, []).append(share)
                error = row["predicted_peak_bytes"] / row["peak_bytes"] - 1
                off.setdefault(key, []).append(error)
    rows = []
    for key, by_strategy in saved.items():
        name, degree = key
        cells = [around(by_strategy[strategy], ".0%") for strategy in STRATEGIES]
        rows.append([name, f"{degree}", *cells, f"{min(off[key]):+.1%} to {max(off[key]):+.1%}"])
    return markdown(["precision", "chunks", *SAVED, OFF], rows)


NAMED = {"offload": "S1", "redispatch": "S4"}
"""Strategies that have another name in the paper."""


def _slower(cases: Sequence[Mapping[str, Any]], degree: int, strategy: str) -> str:
    pairs = [(_strategy_row(case, degree, strategy), _strategy_row(case, degree, "keep")) for case in cases]
    return around([row["ms"] / keep["ms"] for row, keep in pairs])


def _strategy_row(case: Mapping[str, Any], degree: int, strategy: str) -> Mapping[str, Any]:
    (row,) = (row for row in case["rows"] if (row["degree"], row["memory"]) == (degree, strategy))
    return row  # type: ignore[no-any-return]


def strategy_times(documents: Documents) -> str:
    """Predicted times of strategies over ``keep``, of ``auto`` over each, and what equation 10 chooses."""
    rows = []
    cases = documents[PREDICTED]["mpipemoe"]["cases"]
    for ranks in dict.fromkeys(case["ranks"] for case in cases):
        chosen = [case for case in cases if case["ranks"] == ranks]
        for name in STRATEGIES[1:]:
            slower = [case["us"][name] / case["us"]["keep"] for case in chosen]
            auto = [case["us"][name] / case["auto"][name]["us"] for case in chosen]
            fastest = sum(min(STRATEGIES[1:], key=case["us"].__getitem__) == name for case in chosen)
            picked = sum(case["equation 10"] == name for case in chosen)
            rows.append([f"{ranks}", name, around(slower), around(auto), f"{fastest}", f"{picked}"])
    head = [
        *("ranks", "strategy", "time, of `keep`", "`auto` in as much memory: times as fast"),
        *("cases in which it is the fastest of four", "in which equation 10 picks it"),
    ]
    lost = [
        case["us"][case["equation 10"]] / min(case["us"][name] for name in STRATEGIES[1:]) - 1
        for case in cases
    ]
    keep = [case["stock_us"] / case["us"]["keep"] for case in cases]
    return (
        f"{markdown(head, rows)}\nWhat equation 10 picks is slower than the fastest of the four by "
        f"{around(lost, '.0%')}. `keep` itself is {around(keep)} times as fast as Megatron's layer.\n"
    )


def fsmoe_predicted(documents: Documents) -> str:
    """Both testbeds: two degrees, the best equal ones, and ``moe-only``."""
    rows = []
    for name, found in documents[PREDICTED]["fsmoe"].items():
        layers = [dict(zip(found["columns"], layer, strict=True)) for layer in found["layers"]]
        two_over_equal = [layer["equal_us"] / layer["two_us"] for layer in layers]
        rows.append(
            [
                name,
                f"{len(layers)}",
                around([layer["stock_us"] / layer["two_us"] for layer in layers]),
                around([layer["moe_only_us"] / layer["two_us"] for layer in layers]),
                around(two_over_equal, ".3f"),
                f"{sum(layer['forward'] != layer['backward'] for layer in layers)}",
                f"{sum(layer['forward_alone'] != layer['backward_alone'] for layer in layers)}",
            ]
        )
    head = [
        *(
            "testbed",
            "layers",
            "over Megatron's",
            "over `moe-only`, best degree",
            "over the best equal degree",
        ),
        *("layers whose best pair differs", "whose best degrees of each direction alone differ"),
    ]
    return markdown(head, rows)


def fsmoe_measured(documents: Documents) -> str:
    """Rows with two degrees, next to the best equal ones."""
    rows = []
    for name, run, case in bench_cases(documents, ("fsmoe",)):
        ways = [row for row in case["rows"] if row["schedule"] == "ampipe" and row["degree"] > 1]
        equal = max(row["speedup"] for row in ways if row["backward_degree"] in (None, row["degree"]))
        two = max(row["speedup"] for row in ways if row["backward_degree"] not in (None, row["degree"]))
        spread = case["control"]["spread"]
        seen = f"{two / equal:.2f}" if abs(two / equal - 1) > spread else "no difference seen"
        device = run["hardware"].get("gpu") or run["hardware"]["cpu"]
        cells = [f"{equal:.2f}", f"{two:.2f}", seen, f"{spread:.1%}"]
        rows.append([link_to(name), device, case["name"], *cells])
    head = ["file", "device", "case", "best equal degree", "best two degrees", "two over equal", "noise"]
    return markdown(head, rows)


def exposed_predicted(documents: Documents) -> str:
    """Communication that computation does not hide, and how much less it is than with ``moe-only``."""
    rows = []
    for found in documents[PREDICTED]["lancet"]:
        ways = found["ways"]
        before = ways["moe-only"]["exposed_us"]
        cells = [f"{found['exchanges_us'] / 1e3:.0f}"]
        for name in ("moe-only", "lancet", "ampipe", "joined"):
            cells.append(f"{ways[name]['exposed_us'] / 1e3:.1f} ({ways[name]['degree']})")
        best = min(ways[name]["exposed_us"] for name in ("lancet", "ampipe", "joined"))
        cells.append(f"{1 - best / before:.0%}")
        cells += [f"{found['stock_us'] / ways[name]['us']:.2f}" for name in ("moe-only", "ampipe", "joined")]
        rows.append([found["cluster"], found["model"].removeprefix("gpt-moe-"), *cells])
    head = [
        *("cluster", "GPT-MoE", "all-to-alls, ms"),
        *("`moe-only`, exposed ms (degree)", "`lancet`", "`ampipe`", "`joined`"),
        *("less exposed than `moe-only`", "speedup: `moe-only`", "`ampipe`", "`joined`"),
    ]
    return markdown(head, rows)


def exposed_measured(documents: Documents) -> str:
    """Exposed time of measured rows: the pass, less what its compute stages take alone."""
    rows = []
    for name, run, case in bench_cases(documents, EXPOSED_GRIDS):
        timed = [row for row in case["rows"] if row.get("stages_us_by_rank") is not None]
        exposed: dict[bool, float] = {}
        sent = 0.0
        for is_ours in (False, True):
            found = [row for row in timed if (row["schedule"] != "moe-only") == is_ours]
            if found:
                fastest = min(found, key=_ms)
                computed_ms, sent_ms = _alone_ms(fastest)
                exposed[is_ours] = max(0.0, fastest["ms"] - computed_ms)
                sent = max(sent, sent_ms)
        if len(exposed) == 2 and exposed[False]:
            theirs, ours = exposed[False], exposed[True]
            device = run["hardware"].get("gpu") or run["hardware"]["cpu"]
            cells = [f"{sent:.1f}", f"{theirs:.1f}", f"{ours:.1f}", f"{1 - ours / theirs:.0%}"]
            rows.append([link_to(name), device, run["link"], case["name"], *cells])
    head = [
        *("file", "device", "link", "case", "transfers alone, ms"),
        *("fastest `moe-only`, exposed ms", "fastest other, exposed ms", "less exposed than `moe-only`"),
    ]
    return markdown(head, rows)


def _ms(row: Mapping[str, Any]) -> float:
    return float(row["ms"])


EXPOSED_GRIDS = ("cpu-small", "cpu-lengths", "mixtral", "deepseek", "paper", "paper-layers")
TRANSFERS = ("counts", "dispatch", "combine")


def _alone_ms(row: Mapping[str, Any]) -> tuple[float, float]:
    """What compute stages and transfers of a row take alone, on the slowest rank; medians over passes."""
    sums = []
    for rank in row["stages_us_by_rank"]:
        computed = sent = 0.0
        for stages in rank.values():
            for stage, samples in stages.items():
                if stage.partition(".")[0] in TRANSFERS:
                    sent += statistics.median(samples)
                else:
                    computed += statistics.median(samples)
        sums.append((computed / 1e3, sent / 1e3))
    return max(computed for computed, _ in sums), max(sent for _, sent in sums)


def condensed(documents: Documents) -> str:
    """Bytes and speed of trainings with condensed tokens, and their losses."""
    runs = documents["condense_speed_small"]["runs"].values()
    by_setting: dict[str, list[Mapping[str, Any]]] = {}
    for run in runs:
        by_setting.setdefault(run["setting"], []).append(run)
    exact = by_setting["exact"]
    losses = _last_losses(documents["condense"])
    rows, faster, apart = [], 0, 0.0
    for setting, found in by_setting.items():
        if not setting.startswith("condense"):
            continue
        pairs = list(zip(found, exact, strict=True))
        sent = [run["bytes_per_iteration"] / base["bytes_per_iteration"] for run, base in pairs]
        speeds = [statistics.median(base["ms"]) / statistics.median(run["ms"]) for run, base in pairs]
        off = [loss - losses["exact"][seed] for seed, loss in losses[setting].items()]
        shares = [share for run in found for share in run["condensed_share"]]
        rows.append(
            [
                setting.removeprefix("condense "),
                f"{statistics.mean(shares):.0%}",
                f"{1 - statistics.fmean(sent):.0%}",
                " and ".join(f"{each:.2f}" for each in speeds),
                f"{min(off):+.3f} to {max(off):+.3f}",
            ]
        )
        faster += min(speeds) > 1
        apart = max(apart, max(speeds) / min(speeds) - 1)
    head = ["threshold", "tokens not sent", "fewer bytes in an iteration", "speed over exact, two repeats"]
    return (
        f"{markdown([*head, 'loss, minus exact'], rows)}\n{faster} of {len(rows)} settings are faster than "
        f"exact training in both repeats; repeats of one setting differ by up to {apart:.0%}.\n"
    )


def _last_losses(document: Document) -> dict[str, dict[int, float]]:
    found: dict[str, dict[int, float]] = {}
    for run in document["runs"].values():
        last = run["lm_loss"][-len(run["lm_loss"]) // 10 :]
        found.setdefault(run["setting"], {})[run["seed"]] = statistics.mean(last)
    return found


def migrated(documents: Documents) -> str:
    """Rows that moving sequences would save, least and greatest over trainings, phases and ranks."""
    (document,) = documents.values()
    rows = []
    for residual in ("all", "missing"):
        found: dict[str, list[float]] = {}
        for training in document["trainings"].values():
            for phase, of_phase in training["phases"].items():
                for of_ranks in of_phase["ranks"].values():
                    found.setdefault(phase, []).append(of_ranks["saved"][f"rows, {residual}"]["of both"])
        for phase, shares in found.items():
            rows.append([RESIDUALS[residual], phase, around(shares, "+.0%")])
    return markdown(["residual rows that move", "of the training", "fewer rows in both all-to-alls"], rows)


RESIDUALS = {"all": "all", "missing": "missing ones (changes Megatron's numbers)"}
