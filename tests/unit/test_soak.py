"""How the soak test judges a training, and that it ends what it has started."""

import itertools
import signal
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

from soak import launches
from soak.__main__ import main, turns
from soak.disturbances import AMPIPE_ENDS, DISTURBANCES, MEGATRON_EXITS
from soak.judgement import (
    FEWEST_SAMPLES,
    Log,
    Samples,
    SoakFailed,
    Undisturbed,
    check_samples,
    check_values,
    count_lines,
    count_repeated,
    read_log,
)
from tests.forked import alive, until

NUM_ITERATIONS = 8
LINE = (
    " [2026-11-29 04:46:09] iteration {0:8d}/       8 | consumed samples: {0:12d} | elapsed time per "
    "iteration (ms): 757.6 | learning rate: 1.000000E-03 | lm loss: {1:.6E} | loss scale: 1.0 | grad norm: "
    "{2:.3f} | number of skipped iterations:   0 |\n"
)
VALIDATION = " validation loss at iteration 4 | lm loss value: 4.5E+00 | lm loss PPL: 9.0E+01 | \n"


def loss_of(iteration: int) -> float:
    return 5.25 / iteration


def log_of(first: int, last: int, *, text: str = "") -> Log:
    """A launch; its second line has the mean of its first two losses, as Megatron's has."""
    for iteration in range(first, last + 1):
        loss = loss_of(iteration)
        if iteration == first + 1:
            loss = (loss_of(first) + loss) / 2
        text += LINE.format(iteration, loss, 1 / iteration)
        text += VALIDATION if iteration == 4 else ""
    return read_log(f"from-{first}.log", text)


@pytest.fixture
def undisturbed() -> Undisturbed:
    return Undisturbed(log_of(1, NUM_ITERATIONS), NUM_ITERATIONS)


@pytest.mark.parametrize("first", range(1, NUM_ITERATIONS + 1))
def test_a_training_that_went_on_has_the_same_digits(first: int, undisturbed: Undisturbed) -> None:
    log = log_of(first, NUM_ITERATIONS)
    assert list(log.values) == list(range(first, NUM_ITERATIONS + 1))
    assert log.values[first] == {"lm loss": f"{loss_of(first):.6E}", "grad norm": f"{1 / first:.3f}"}
    check_values(log, undisturbed)


@pytest.mark.parametrize("first", [1, 2, 4])
@pytest.mark.parametrize("place", range(3))
@pytest.mark.parametrize("name", ["lm loss", "grad norm"])
def test_another_last_digit_is_a_failure(first: int, place: int, name: str, undisturbed: Undisturbed) -> None:
    log = log_of(first, NUM_ITERATIONS)
    value = log.values[first + place][name]
    digit = value[:8][-1] if name == "lm loss" else value[-1]
    other = str((int(digit) + 5) % 10)
    log.values[first + place][name] = (
        f"{value[:7]}{other}{value[8:]}" if name == "lm loss" else value[:-1] + other
    )
    with pytest.raises(SoakFailed, match=f"iteration {first + place} has"):
        check_values(log, undisturbed)


def test_no_number_is_a_failure(undisturbed: Undisturbed) -> None:
    log = log_of(3, NUM_ITERATIONS)
    log.values[4]["lm loss"] = "nan"
    with pytest.raises(SoakFailed, match="iteration 4 has"):
        check_values(log, undisturbed)


def test_a_missing_value_is_a_failure(undisturbed: Undisturbed) -> None:
    log = log_of(3, NUM_ITERATIONS)
    del log.values[4]["lm loss"]
    with pytest.raises(SoakFailed, match="iteration 4 has"):
        check_values(log, undisturbed)


def test_iterations_after_the_last_one_are_a_failure(undisturbed: Undisturbed) -> None:
    with pytest.raises(SoakFailed, match="iteration 9 has"):
        check_values(log_of(5, NUM_ITERATIONS + 1), undisturbed)


def test_another_validation_loss_is_a_failure(undisturbed: Undisturbed) -> None:
    log = log_of(2, NUM_ITERATIONS)
    assert log.validation == {"iteration 4": "4.5E+00"}
    log.validation["iteration 4"] = "4.6E+00"
    with pytest.raises(SoakFailed, match=r"iteration 4 gives 4\.6E\+00, undisturbed 4\.5E\+00"):
        check_values(log, undisturbed)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "has not logged iterations 1 to 8"),
        ("".join(LINE.format(each, 1.0, 1.0) for each in (1, 2, 3, 5, 6, 7, 8)), "has not logged"),
        ("".join(LINE.format(each, 1.0, 1.0) for each in range(1, 10)), "has not logged"),
        ("".join(LINE.format(each, float("nan"), 1.0) for each in range(1, 9)), "iteration 1 has"),
        (
            "".join(LINE.format(each, 1.0, 1.0).replace("grad", "g") for each in range(1, 9)),
            "iteration 1 has",
        ),
    ],
    ids=["empty", "lacks one", "one too many", "nan", "no gradient norm"],
)
def test_nothing_is_compared_with_a_training_that_failed(text: str, message: str) -> None:
    with pytest.raises(SoakFailed, match=message):
        Undisturbed(read_log("undisturbed.log", text), NUM_ITERATIONS)


@pytest.mark.parametrize(
    ("ends", "most", "found"),
    [
        ([(1, 8)], 0, 0),
        ([(1, 5), (6, 8)], 0, 0),
        ([(1, 5), (5, 8)], 2, 1),
        ([(1, 5), (4, 6), (5, 8)], 4, 4),
        ([(1, 5), (0, -1), (4, 8)], 2, 2),
        ([(1, 5), (5, 8)], 0, "1 iterations were lost"),
        ([(1, 5), (3, 8)], 2, "3 iterations were lost"),
        ([(1, 5), (7, 8)], 9, "has iterations"),
        ([(2, 8)], 9, "has iterations"),
        ([(1, 7)], 9, "ended with iteration 7 of 8"),
        ([(1, 5), (0, -1)], 9, "ended with iteration 5 of 8"),
    ],
)
def test_lost_iterations(ends: Sequence[tuple[int, int]], most: int, found: int | str) -> None:
    logs = [log_of(first, last) for first, last in ends]
    if isinstance(found, int):
        assert count_repeated(logs, num_iterations=NUM_ITERATIONS, most=most) == found
    else:
        with pytest.raises(SoakFailed, match=found):
            count_repeated(logs, num_iterations=NUM_ITERATIONS, most=most)


def test_an_iteration_that_a_launch_leaves_out_is_lost() -> None:
    log = log_of(1, NUM_ITERATIONS)
    del log.values[4]
    with pytest.raises(SoakFailed, match="has iterations"):
        count_repeated([log], num_iterations=NUM_ITERATIONS, most=9)


def test_a_launch_says_once_why_it_has_ended() -> None:
    cause, peer = (
        "error: the checkpoint cannot be loaded\n",
        "error: rank 1 failed: it has lost a peer, see\n",
    )
    assert count_lines(cause + peer, AMPIPE_ENDS) == 1
    assert count_lines("error: rank 0 failed; above\n" * 2, AMPIPE_ENDS, most=2) == 2
    assert count_lines("[exiting program after receiving SIGTERM.] datetime: 1\n", MEGATRON_EXITS) == 1
    for text in ("", peer, cause + cause, f"  {cause}"):
        with pytest.raises(SoakFailed, match="lines match"):
            count_lines(text, AMPIPE_ENDS)


def samples_of(memory_mib: Sequence[float], num_threads: Sequence[int]) -> Samples:
    samples = Samples()
    for memory, threads in zip(memory_mib, num_threads, strict=True):
        samples.add(1, memory_mib=400, num_threads=9)
        samples.add(2, memory_mib=memory, num_threads=threads)
    return samples


def test_memory_and_threads_of_a_rank_may_not_grow() -> None:
    count = 4 * FEWEST_SAMPLES
    steady, threads = [400.0 + index % 3 for index in range(count)], [9] * count
    assert check_samples(samples_of(steady, threads)) == {
        "samples": count,
        "memory_growth": 1.0,
        "new_threads": 0,
    }
    # While caches fill, and at the end.
    check_samples(samples_of([200.0] * 30 + steady[30:-20] + [900.0] * 20, [20] * 30 + threads[30:]))
    leaks = [400 + 20 * index / count for index in range(count)]
    for growing in (samples_of(leaks, threads), samples_of(steady, [9] * (count // 2) + [10] * (count // 2))):
        with pytest.raises(SoakFailed, match="memory or threads of a rank grow"):
            check_samples(growing)


def test_too_few_samples_show_no_growth() -> None:
    few = samples_of([400.0, 500.0] * (FEWEST_SAMPLES // 2 - 1), [9] * (FEWEST_SAMPLES - 2))
    assert check_samples(few) == {"samples": FEWEST_SAMPLES - 2, "memory_growth": None, "new_threads": None}
    assert check_samples(Samples())["samples"] == 0


def test_every_kind_comes_before_one_is_repeated_and_every_shape_has_all() -> None:
    kinds, shapes = list(DISTURBANCES), list(launches.SHAPES)
    order = list(itertools.islice(turns(kinds, shapes), len(kinds) * len(shapes)))
    assert [kind for kind, _ in order[: len(kinds)]] == kinds
    expected = {
        (kind, shape)
        for kind, shape in itertools.product(kinds, shapes)
        if kind == "slow-rank" or shape != "ep4-dp8"
    }
    assert set(order) == expected


def test_no_checkpoint_of_a_sharded_optimizer_is_loaded(capsys: pytest.CaptureFixture[str]) -> None:
    order = itertools.islice(turns(["sigterm", "slow-rank"], ["ep4-dp8"]), 2)
    assert list(order) == [("slow-rank", "ep4-dp8")] * 2
    with pytest.raises(SystemExit):
        main(["--only", "sigterm", "--shape", "ep4-dp8"])
    assert "--only: no --shape of ep4-dp8 can load its checkpoints" in capsys.readouterr().err


@pytest.fixture
def training(tmp_path: Path) -> launches.Training:
    """A launcher that waits for a rank, which leads a session as those of torchrun do."""
    log = tmp_path / "a.log"
    log.touch()
    words = ["bash", "-c", "setsid sleep 300 & wait"]
    process = subprocess.Popen(words, start_new_session=True)
    made = launches.Training(process, log, warm_up=0)
    until(lambda: bool(made.ranks()), "a rank", timeout_s=60)
    return made


def test_ranks_end_with_their_launcher(training: launches.Training) -> None:
    (rank,) = training.ranks()
    assert alive(rank)
    # Its children are not known any more when it has ended.
    training.process.kill()
    training.process.wait()
    training.kill()
    until(lambda: not alive(rank), "the end of the rank", timeout_s=60)
    assert training.process.returncode == -signal.SIGKILL


def test_a_log_that_stands_still_is_a_hang(
    training: launches.Training, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launches, "STANDSTILL_S", 0.2)
    training.log.write_text(LINE.format(3, 1.0, 1.0))
    training.wait_for(3)
    for wait in (training.finish, lambda: training.wait_for(4)):
        with pytest.raises(SoakFailed, match="hangs after iteration 3"):
            wait()
    assert training.samples.fewest > 0 or training.samples.memory_mib == {}
    training.kill()
    with pytest.raises(SoakFailed, match="ended before iteration 4"):
        training.wait_for(4)
