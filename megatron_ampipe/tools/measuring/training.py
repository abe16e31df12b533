"""``ampipe bench --end-to-end``: run whole trainings in turns, stock and AMPipe's, and compare their losses.

Every training is Megatron's own loop as ``-m megatron_ampipe.pretrain_gpt`` runs it, on CPUs, from the same
seed. A round trains every variant once, in an order that is rotated from round to round, so that a machine
that becomes slower affects all equally. Times are those of Megatron's log. :func:`run` also trains for the
quick start and for measuring scripts. Needs torch in the ranks only.
"""

from __future__ import annotations

import itertools
import math
import re
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from megatron_ampipe.errors import DifferenceFound, RunFailed
from megatron_ampipe.files.outputs import Report
from megatron_ampipe.tools.measuring.bench_job import BenchJob, Variant
from megatron_ampipe.tools.measuring.grid import Case, model_flags
from megatron_ampipe.tools.measuring.ranks import Rank, RankJob, run_ranks, signals_as_interrupts
from megatron_ampipe.tools.measuring.result import TRAINING_FORMAT, described, speedup, with_control

FORMAT = TRAINING_FORMAT
TOLERANCE = 1e-5
"""Largest relative difference of the losses that still counts as the same curve."""
ITERATION = re.compile(
    r" iteration +(?P<number>\d+)/ *\d+ \|.*"
    r" elapsed time per iteration \(ms\): (?P<ms>[0-9.]+) \|.* lm loss: (?P<lm_loss>\S+) \|"
)
"""A line of Megatron's log about an iteration."""

_VOCABULARY = 256
# A learning rate and an epsilon that do not amplify rounding: see docs/log.
_OPTIMIZER = "--lr 5e-4 --adam-eps 1e-5 --lr-decay-style constant --lr-warmup-iters 0 --clip-grad 1.0"


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingJob(RankJob):
    """One training, on CPUs. An emulated link slows only its all-to-alls.

    Attributes:
        flags: The command line of ``megatron_ampipe.pretrain_gpt``.
        stock_attends_as: For a stock training: give it the attention kernel that AMPipe's layers use in this
            precision. None for a training with AMPipe, which has that kernel.
    """

    flags: tuple[str, ...]
    stock_attends_as: str | None


@dataclass(frozen=True, slots=True)
class Curve:
    """The log of one training, by iteration: milliseconds, and the loss."""

    ms: tuple[float, ...]
    lm_loss: tuple[float, ...]


def training_flags(
    case: Case, *, layers: int, num_ranks: int, iterations: int, seed: int, micro_batches: int = 2
) -> tuple[str, ...]:
    """Megatron's flags for training a model of blocks as :mod:`.blocks` builds them, on made-up data."""
    model = model_flags(case, num_ranks=num_ranks).items()
    flags = [
        *(
            word
            for flag, value in model
            for word in ([f"--{flag}"] if value is True else [f"--{flag}", value])
        ),
        *("--num-layers", layers, "--disable-bias-linear", "--no-bias-gelu-fusion"),
        *("--seq-length", case.sequence_length, "--max-position-embeddings", case.sequence_length),
        # A table of positions would be reduced over the link in every iteration, as large as all attention.
        *("--position-embedding-type", "rope"),
        *("--micro-batch-size", case.batch, "--global-batch-size", case.batch * micro_batches * num_ranks),
        *("--mock-data", "--tokenizer-type", "NullTokenizer", "--vocab-size", _VOCABULARY),
        *("--train-iters", iterations, "--seed", seed, *_OPTIMIZER.split()),
        # AMPipe uses no mask; stock gets a kernel that needs none.
        "--no-create-attention-mask-in-dataloader",
        *("--log-interval", 1, "--eval-interval", 1_000_000, "--eval-iters", 0),
    ]
    return tuple(str(flag) for flag in flags)


def train(rank: Rank[TrainingJob]) -> None:
    """Train in a rank through the entry point that users launch; sends a message ``iteration`` for each.

    For a fair comparison a stock run gets two things that AMPipe has: its local layers use the attention
    kernel of AMPipe's layers, and gloo's event loops are batch threads.
    """
    job = rank.job
    rank.connect()
    from megatron_ampipe.launch import host, pretrain

    host.install()

    if job.stock_attends_as is not None:
        _use_kernel_of_ampipe(job.stock_attends_as)
    _tell_iterations(rank)
    code = pretrain.main(job.flags)
    if code != 0:
        raise RunFailed(f"the training ended with code {code}")


def _tell_iterations(rank: Rank[TrainingJob]) -> None:
    """Have the last rank, which prints iterations, also send them to the command."""
    from megatron.training import training

    show = training.print_rank_last

    def print_rank_last(text: str) -> None:
        show(text)
        logged = ITERATION.search(text)
        if logged and rank.number == rank.job.num_ranks - 1:
            rank.say("iteration", {name: float(value) for name, value in logged.groupdict().items()})

    training.print_rank_last = print_rank_last


def _use_kernel_of_ampipe(dtype: str) -> None:
    """Have Megatron's local layers use the attention kernel of AMPipe's layers, on the whole sequence."""
    from megatron.core.models.backends import LocalSpecProvider
    from megatron.core.transformer.spec_utils import ModuleSpec

    from megatron_ampipe.attention.kernels import pinned_kernel
    from megatron_ampipe.runtime.executors import demote_gloo_threads
    from megatron_ampipe.tools.measuring.blocks import DTYPES, KernelAttention

    def core_attention(_: LocalSpecProvider) -> ModuleSpec:
        # The process groups exist, and no pass has begun.
        demote_gloo_threads()
        kernel = pinned_kernel(on_gpu=False, dtype=DTYPES[dtype])
        return ModuleSpec(module=KernelAttention, params={"kernel": kernel})

    LocalSpecProvider.core_attention = core_attention


def measure(job: BenchJob, *, rounds: int, on_iteration: Callable[[], object]) -> Iterator[Report]:
    """Train every case with every variant in ``rounds`` rounds; yields the entries ``cases`` of the document.

    ``job.warmup`` iterations of a training are not counted, the ``job.repeats`` after them are. RunFailed
    if a training does not finish, DifferenceFound if a loss differs from the stock training's.
    """
    iterations = job.warmup + job.repeats
    # An interrupt between two trainings needs no cleaning up, but must give the same exit code.
    with signals_as_interrupts():
        for case, variants in zip(job.cases, job.variants, strict=True):
            flags = training_flags(
                case,
                layers=job.layers,
                num_ranks=job.num_ranks,
                iterations=iterations,
                seed=job.seed,
                micro_batches=job.micro_batches,
            )
            curves: list[list[Curve]] = [[] for _ in variants]
            for round_, step in itertools.product(range(rounds), range(len(variants))):
                index = (round_ + step) % len(variants)
                variant = variants[index]
                training = TrainingJob(
                    flags=(*flags, *variant.pipeline.flags),
                    stock_attends_as=None if variant.pipelined else case.dtype,
                    link=job.link,
                    num_ranks=job.num_ranks,
                    ranks_per_node=job.ranks_per_node,
                )
                title = f"case {case.name}: the training of {variant}"
                curve = run(training, iterations=iterations, title=title, on_iteration=on_iteration)
                curves[index].append(curve)
                # The first training of all is stock's.
                check_same(curves[0][0], curve, what=f"case {case.name}: the loss of {variant}")
            yield case_result(case, job, variants, curves) | {"flags": list(flags)}


def run[Job: TrainingJob](
    training: Job,
    *,
    iterations: int,
    title: str,
    on_iteration: Callable[[], object] = lambda: None,
    work: Callable[[Rank[Job]], None] = train,
    log: Path | None = None,
) -> Curve:
    """Run one training to its end; RunFailed if a rank failed, or an iteration is missing.

    Args:
        training: What to run.
        iterations: How many it must log; ``on_iteration`` is called at each.
        title: Its name in error messages.
        work: The function of each rank.
        log: As in :func:`.run_ranks`.
    """
    logged: list[tuple[float, float]] = []

    def on_message(_rank: int, event: str, value: Mapping[str, float] | None) -> None:
        if event == "iteration":
            assert value is not None
            logged.append((value["ms"], value["lm_loss"]))
            on_iteration()

    try:
        run_ranks(training, work, on_message=on_message, log=log)
    except RunFailed as error:
        raise RunFailed(f"{title}: {error}" + (f"\nThe whole log is {log}" if log else "")) from error
    if len(logged) != iterations:
        raise RunFailed(f"{title} logged {len(logged)} of {iterations} iterations")
    return Curve(*map(tuple, zip(*logged, strict=True)))


def check_same(stock: Curve, curve: Curve, *, what: str) -> None:
    """Raise DifferenceFound if losses differ from the stock training's by more than :data:`TOLERANCE`."""
    difference, iteration = loss_difference(stock, curve)
    # Written so that NaN is a difference.
    if not difference <= TOLERANCE:
        raise DifferenceFound(
            f"{what} differs from the stock training's by {difference:.1e} at iteration {iteration}, allowed "
            f"is {TOLERANCE:.0e}. Over many iterations a tie between experts can do this: use fewer, or "
            "another seed"
        )


def loss_difference(stock: Curve, other: Curve) -> tuple[float, int]:
    """The largest relative difference of the losses, and the iteration, from 1, that has it."""
    losses = zip(stock.lm_loss, other.lm_loss, strict=True)
    differences = [(abs(b - a) / max(abs(a), 1e-12), iteration) for iteration, (a, b) in enumerate(losses, 1)]
    # NaN is the largest.
    return max(differences, key=lambda pair: (math.isnan(pair[0]), pair[0]))


def case_result(
    case: Case, job: BenchJob, variants: Sequence[Variant], curves: Sequence[Sequence[Curve]]
) -> Report:
    """One entry of ``cases`` in the document; ``curves`` are by variant, stock first, and by round."""
    stock, *timed = ([ms for curve in rounds for ms in curve.ms[job.warmup :]] for rounds in curves)
    rows = [
        {
            **described(variant, job),
            **_speed(samples),
            **speedup(stock, samples),
            "loss_difference": max(loss_difference(curves[0][0], curve)[0] for curve in rounds),
            "trainings": [asdict(curve) for curve in rounds],
        }
        for variant, samples, rounds in zip(variants[1:], timed, curves[1:], strict=True)
    ]
    return {
        "name": case.name,
        "block": asdict(case),
        "layers": job.layers,
        "stock": {**_speed(stock), "trainings": [asdict(curve) for curve in curves[0]]},
        **with_control(rows),
    }


def _speed(samples_ms: Sequence[float]) -> dict[str, float]:
    median = statistics.median(samples_ms)
    return {"ms": round(median, 2), "iterations_per_s": round(1e3 / median, 4)}
