"""What the check runs, in order of what it tells: what has never run on a GPU comes first.

The one place that knows the order, the limits and the meaning of the steps: ``--help`` and docs/gpu.md are
written from it. Begins with Python's own library alone.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from gpu_check.families import FAMILIES
from megatron_ampipe.errors import BadInput, nearest

REPOSITORY = Path(__file__).resolve().parents[2]
BUDGET_S = 560
"""For a call: under ten minutes, with the start and the table."""
DEVICE_S = 900
"""For all calls, with the starts of the machine."""
START_S = 75
"""Of a machine, at the beginning of each call."""
DEGREES = "2,4"
LINK = "emulated:20GB/s"
FAST_LINK = "emulated:50GB/s"
LINK_OF_NCCL = f"{LINK}:nccl"
"""Its transfers cost the device what NCCL's kernels cost it."""
LINK_WITH_SKEW = f"{LINK}:skew2ms"
RUN = "packaging", "ruamel.yaml", "numpy", "torch", "megatron.core"
"""Modules that every step imports."""
_TEST = (*RUN, "pytest", "pytest_timeout")
_TRAIN = (*RUN, "rich", "tqdm", "pydantic")
COMPILER = "a C compiler with Python.h and triton"
"""What Triton needs to compile; all other needs are modules."""
_ENGINE = "transformer_engine.pytorch"


@dataclass(frozen=True, slots=True)
class Step:
    """One process.

    Attributes:
        kind: How its findings are read: ``tests``, ``training``, ``profile``, ``attention``, ``partners``,
            ``bench``, ``ranks`` or ``queues``.
        name: In the table.
        command: What is run, in the checkout.
        result: The file that it writes.
        limit_s: It is cut after so many seconds.
        shows: What it tells, for readers.
        needs: Modules that it imports, and :data:`COMPILER`; a GPU is needed by all.
        environment: Variables of its process.
        ranks: Processes that share the GPU.
    """

    kind: str
    name: str
    command: tuple[str, ...]
    result: Path
    limit_s: float
    shows: str = ""
    needs: tuple[str, ...] = RUN
    environment: Mapping[str, str] = field(default_factory=lambda: {"TORCHDYNAMO_DISABLE": "1"})
    ranks: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class TestStep:
    """Parts of ``tests/gpu``.

    Attributes:
        modules: Files.
        limit_s: As of a step.
        shows: As of a step.
        chosen: An expression of names of tests; empty for all.
        needs: Beyond those of all tests.
    """

    modules: tuple[str, ...]
    limit_s: float
    shows: str
    chosen: str = ""
    needs: tuple[str, ...] = ()


TESTS = {
    "cases": TestStep(
        modules=("test_cuda.py", "test_gradients.py"),
        chosen="not transformer and not compiled",
        limit_s=110,
        shows="layers of the CPU tests equal Megatron's, fp32 and bf16; host waits; gradients under "
        "`--overlap-grad-reduce`",
    ),
    "partners": TestStep(
        modules=("test_partners.py",), limit_s=110, shows="partners equal Megatron's layers"
    ),
    "graphs": TestStep(
        modules=("test_graphs.py",),
        chosen="not transformer_engine",
        limit_s=60,
        shows="captured stages equal Megatron's layers; what the host does",
    ),
    "stress": TestStep(
        modules=("test_stress.py",),
        limit_s=110,
        shows="blocks of real sizes [under stress](#the-stress-test)",
    ),
    "link": TestStep(
        modules=("test_link.py",),
        limit_s=60,
        shows="how long the kernel of an `:nccl` [link](#one-gpu-instead-of-several) lasts, and what it "
        "moves",
    ),
    "attention": TestStep(
        modules=("test_attention.py",),
        limit_s=110,
        shows="every attention kernel of this GPU and of installed packages of "
        "[FlashAttention](install.md#flashattention), compared with fp64: outputs, log-sum-exp, gradients; "
        "windows, documents, latent attention, sinks; whether backward drops the weights that forward "
        "dropped",
    ),
    "transformer engine": TestStep(
        modules=("test_gradients.py", "test_graphs.py"),
        chosen="transformer_engine",
        limit_s=110,
        needs=(_ENGINE,),
        shows="gradients of its layers under `--overlap-grad-reduce`, also as [separate stages](weights.md), "
        "in bf16 and [FP8](#fp8), and in graphs; over "
        "[fixed rows](exchange.md#experts-of-transformer-engine), where it takes their numbers from the "
        "device",
    ),
    "compiled": TestStep(
        modules=("test_cuda.py",),
        chosen="compiled",
        limit_s=110,
        needs=(COMPILER,),
        shows="layers with a function that Megatron compiles",
    ),
}
"""By step: run together, since nothing is timed."""


@dataclass(frozen=True, slots=True)
class Bench:
    """Cases of ``ampipe bench`` over a link, all ranks but one emulated."""

    grid: str
    cases: str
    ranks: int
    link: str
    limit_s: float
    has_graphs: bool = False
    """Also with fixed rows, with CUDA graphs, and with both: whole passes."""


_WITH_GRAPHS = (
    # Six blocks. Experts in grouped products have exact rows in the benchmark.
    Bench("mixtral", "mixtral-8k", 8, LINK, 65, has_graphs=True),
    Bench("deepseek", "deepseek-8k", 8, LINK, 65, has_graphs=True),
    # Of the paper's sizes a middle and a large one.
    Bench("paper", "large-16k-b1-c2,xl-32k-b1-c1", 4, LINK, 85, has_graphs=True),
    Bench("mixtral", "mixtral-8k", 8, FAST_LINK, 55, has_graphs=True),
    Bench("deepseek", "deepseek-8k", 8, FAST_LINK, 55, has_graphs=True),
)
_BENCHES = (
    # Over the link that costs the GPU what NCCL does.
    Bench("mixtral", "mixtral-8k", 8, LINK_OF_NCCL, 65, has_graphs=True),
    Bench("paper", "large-16k-b1-c2,xl-32k-b1-c1", 4, LINK_OF_NCCL, 85, has_graphs=True),
    Bench("deepseek", "deepseek-8k-grouped", 8, LINK_OF_NCCL, 40),
    Bench("deepseek", "deepseek-8k-grouped", 8, LINK, 35),
    Bench("mixtral", "mixtral-8k", 8, LINK_WITH_SKEW, 45),
    Bench("deepseek", "deepseek-8k-grouped", 8, FAST_LINK, 35),
)
_PARTNERS_CASE = ("mixtral", "mixtral-4k")
_PARTNERS_START_S, _PARTNERS_KIND_S = 40.0, 6.5
"""Of the step that times several layers: before any kind of step, and for each of them. On an H200 32 and 4.5
(docs/measured/results/gpu-check-h200.json)."""
_PROFILE_S, _ATTENTION_S, _TRAINING_S, _QUEUES_S = 45.0, 40.0, 150.0, 170.0
_CASES_S = {2: 150.0, 4: 120.0}
"""Seconds for all cases of so many ranks."""
_TRAINED = {
    "two ranks": 160.0,
    "two ranks, weight gradients": 100.0,
    "two ranks, fixed rows": 130.0,
    "two ranks, FP8": 100.0,
    "four ranks, pipeline": 120.0,
}
"""Families of several ranks that share the GPU, with their seconds."""


def partners_limit_s(num_kinds: int) -> float:
    """Of the step that times several layers, which runs so many kinds of steps."""
    return _PARTNERS_START_S + _PARTNERS_KIND_S * num_kinds


def plan(scratch: Path, output: Path) -> list[list[Step]]:
    """All steps, the most telling first; those of a list run together.

    Args:
        scratch: Folder for what the steps write.
        output: Folder that the user keeps.
    """
    together = [_tests(name, scratch) for name in TESTS]
    together += [_training(name, scratch) for name, family in FAMILIES.items() if family.ranks == 1]
    mixtral, deepseek, paper, *fast = (_bench(bench, scratch) for bench in _WITH_GRAPHS)
    first_bench, *other_benches = (_bench(bench, scratch) for bench in _BENCHES)
    return [
        # Whole passes as graphs.
        [mixtral],
        [_partners(LINK, scratch)],
        [_training("two ranks, fixed rows", scratch)],
        [deepseek],
        [paper],
        *([step] for step in fast),
        [_ranks(2, scratch, output)],
        # The rest of what has never run.
        [_training("two ranks", scratch)],
        [_ranks(4, scratch, output)],
        together,
        [first_bench],
        [_partners(LINK_OF_NCCL, scratch)],
        [_training("two ranks, weight gradients", scratch)],
        [_training("two ranks, FP8", scratch)],
        *([step] for step in other_benches),
        [_queues(scratch, output)],
        [_profile(scratch, output)],
        [_attention(scratch)],
        [_training("four ranks, pipeline", scratch)],
    ]


def chosen(groups: Sequence[Sequence[Step]], words: Sequence[str], num_ranks: int | None) -> list[list[Step]]:
    """The steps that ``--only`` and ``--ranks`` choose.

    Args:
        groups: All of them.
        words: Each chooses the step of this name; if there is none, those whose name contains it. Empty for
            all.
        num_ranks: Ranks that share the GPU; None for any number.

    Raises:
        BadInput: A word chooses nothing.
    """
    names = [step.name for group in groups for step in group if num_ranks in (None, step.ranks)]
    wanted: set[str] = set()
    for word in words:
        found = {word} & set(names) or {name for name in names if word in name}
        if not found:
            of_ranks = "" if num_ranks is None else f" of --ranks {num_ranks}"
            raise BadInput(
                "--only", word, rule=f"is in no step's name{of_ranks}", remedy=nearest(word, names)
            )
        wanted |= found
    wanted = wanted if words else set(names)
    left = [[step for step in group if step.name in wanted] for group in groups]
    return [group for group in left if group]


def _of_ranks(num_ranks: int, file: Path, output: Path) -> tuple[str, ...]:
    """A command that writes a file, and for ranks that hang an archive of the same name."""
    return (
        *(sys.executable, "-m", "gpu_check.ranks", "--ranks", str(num_ranks)),
        *("--json", str(file), "--dumps", str(output / f"{file.stem}-dumps.zip")),
    )


def _ranks(num_ranks: int, scratch: Path, output: Path) -> Step:
    lines = scratch / f"{num_ranks}-ranks.jsonl"
    command = _of_ranks(num_ranks, lines, output)
    shows = {
        2: "layers on two ranks equal Megatron's: EP, TP, CP, interleaved pipeline stages, the exchange "
        "`ranks`, fp32 and bf16, two degrees, placed reductions, partners, graphs in 1F1B order (of stages; "
        "of whole passes, also with partners, with a budget that is exceeded), after an exception, after an "
        "evaluation, Transformer Engine with its separate weight gradients (accumulated over chunks, with "
        "and without fusion); whether the host waits with tensor parallelism",
        4: "the same for the exchanges `nodes` and `2dh`, TP x EP, PP x EP, experts over tensor-parallel "
        "ranks, CP on four ranks",
    }
    return Step(
        "ranks",
        f"{num_ranks} ranks",
        command,
        lines,
        _CASES_S[num_ranks],
        shows[num_ranks],
        needs=_TEST,
        ranks=num_ranks,
    )


def _queues(scratch: Path, output: Path) -> Step:
    queues = scratch / "queues.jsonl"
    command = (*_of_ranks(2, queues, output), "--queues", "6")
    shows = (
        "which of `CUDA_DEVICE_MAX_CONNECTIONS` 1, 8, 32 with `NCCL_LAUNCH_ORDER_IMPLICIT` 0, 1 hang with "
        "two ranks: a finding, not a failure"
    )
    return Step("queues", "order of kernels", command, queues, _QUEUES_S, shows, needs=_TEST, ranks=2)


def _training(name: str, scratch: Path) -> Step:
    family, file = FAMILIES[name], scratch / f"training-{name.replace(' ', '-').replace(',', '')}.json"
    words = (sys.executable, "-m", "gpu_check.trained", name, "--json", str(file))
    return Step(
        "training",
        f"training, {name}",
        words,
        file,
        _TRAINED.get(name, _TRAINING_S),
        f"losses and gradient norms of Megatron's loop are those of stock: {', '.join(family.kinds)}",
        needs=(*_TRAIN, *family.needs),
        ranks=family.ranks,
    )


def _tests(name: str, scratch: Path) -> Step:
    tests, lines = TESTS[name], scratch / f"{name.replace(' ', '-')}.jsonl"
    command = (
        *(sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"),
        *("-p", "gpu_check.case_lines", "--case-lines", str(lines)),
        *(f"tests/gpu/{module}" for module in tests.modules),
        *(("-k", tests.chosen) if tests.chosen else ()),
    )
    return Step(
        "tests",
        name,
        command,
        lines,
        tests.limit_s,
        tests.shows,
        needs=(*_TEST, *tests.needs),
        environment={"TORCHDYNAMO_DISABLE": "0" if COMPILER in tests.needs else "1"},
    )


def _partners(link: str, scratch: Path) -> Step:
    # Next to the script that runs them.
    from step_kinds import KINDS, left_out

    file = scratch / f"partners-{_of_link(link)}.json"
    words = (sys.executable, "docs/measured/partners.py", str(file), link, *_PARTNERS_CASE)
    num_kinds = len(KINDS) - len(left_out(on_gpu=True, in_16_bit=True, of_engine=False))
    return Step(
        "partners",
        f"partners, {link}",
        words,
        file,
        partners_limit_s(num_kinds),
        "four layers and eight micro-batches: the [results](#results), next to what Megatron alone has",
        needs=_TRAIN,
    )


def _bench(bench: Bench, scratch: Path) -> Step:
    grouped = ", grouped" if "grouped" in bench.cases else ""
    file = scratch / f"{bench.grid}{grouped.replace(', ', '-')}-{_of_link(bench.link)}.json"
    words = (
        *(sys.executable, "-m", "megatron_ampipe.cli", "bench"),
        *("--grid", bench.grid, "--cases", bench.cases, "--link", bench.link, "--ranks", str(bench.ranks)),
        *("--emulate-peers", "--degrees", DEGREES, "--repeats", "5", "--warmup", "1", "--json", str(file)),
        *(("--rows", "exact,fixed", "--cuda-graph-impl", "none,local") if bench.has_graphs else ()),
    )
    name = f"bench {bench.grid}{grouped}, {bench.link}"
    shows = f"one layer ({bench.cases.replace(',', ', ')}): the [results](#results)"
    if bench.has_graphs:
        shows += ", with fixed rows, whole passes as graphs, and Megatron's own graphs"
    return Step("bench", name, words, file, bench.limit_s, shows, needs=_TRAIN)


def _of_link(link: str) -> str:
    """A link as a part of a file's name."""
    return link.partition(":")[2].replace("/", "-per-").replace(":", "-")


def _profile(scratch: Path, output: Path) -> Step:
    file = scratch / "profile.json"
    words = (
        *(sys.executable, "-m", "gpu_check.profiled", "--link", LINK),
        *("--trace", str(output / "trace.json.gz"), "--json", str(file)),
    )
    shows = (
        "a Mixtral block at degree 4 under torch's profiler: overlap (half of what equal chunks allow is "
        "required), host waits and time; memory at degrees 1 to 8"
    )
    return Step("profile", "profile", words, file, _PROFILE_S, shows, needs=_TRAIN)


def _attention(scratch: Path) -> Step:
    file = scratch / "attention-times.json"
    words = (sys.executable, "-m", "gpu_check.attention_times", "--json", str(file))
    shows = (
        "the same kernels in 16 bits, timed and compared with each other: a sequence, a chunk of it, a "
        "window, documents, latent attention; why others are not used"
    )
    return Step("attention", "attention times", words, file, _ATTENTION_S, shows, needs=_TRAIN)


@dataclass(frozen=True, slots=True)
class Planned:
    """A line of the plan of all calls.

    Attributes:
        steps: Those that run together.
        until_s: By the limits, when they have ended, after the machine's start and all steps before them.
        call: The number of the call, from 1; None if no time is left by then.
    """

    steps: Sequence[Step]
    until_s: float
    call: int | None


def calls(groups: Sequence[Sequence[Step]]) -> list[Planned]:
    """Which call runs which steps if each takes all of its limit, until :data:`DEVICE_S` are over."""
    found: list[Planned] = []
    call, of_call_s, before_s = 1, 0.0, 0.0
    for group in groups:
        limit_s = max(step.limit_s for step in group)
        if of_call_s and of_call_s + limit_s > BUDGET_S:
            before_s += START_S + of_call_s
            call, of_call_s = call + 1, 0.0
        of_call_s += limit_s
        until_s = before_s + START_S + of_call_s
        found.append(Planned(group, until_s, call if until_s <= DEVICE_S else None))
    return found
