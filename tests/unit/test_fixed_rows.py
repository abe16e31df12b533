"""Budgets of ``--ampipe-rows fixed``: how they are learned, and what a repeated step restores."""

import dataclasses
import os
import random
import sys
import types
from typing import Any
from unittest import mock

import pytest
import torch
from packaging.version import Version
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_ampipe import compat
from megatron_ampipe.exchange.budgets import FixedRows
from megatron_ampipe.launch import fixed_rows
from megatron_ampipe.launch.fixed_rows import FixedRowsSteps, RecordedData, StepState
from megatron_ampipe.plan.recorded_routing import RecordedRouting
from megatron_ampipe.plan.replayed_budgets import replay
from megatron_ampipe.schedule.row_budget import WARM_UP, WINDOW, Margin, budget_of, is_near
from tests.plan_cases import sized_block
from tests.unit.test_routing import LAYER, RECORD


def test_a_budget_has_room_for_what_counts_vary_by() -> None:
    assert budget_of([[0, 100], [10000, 1]], margin=1.25).rows == ((0, 165), (12900, 6))


@pytest.mark.parametrize("capacity", [None, 1.1], ids=["dropless", "capacity"])
@pytest.mark.parametrize(("ranks", "topk", "tokens"), [(1, 2, 256), (2, 1, 1024), (4, 2, 512), (8, 6, 256)])
def test_the_planner_expects_what_is_learned(
    ranks: int, topk: int, tokens: int, capacity: float | None
) -> None:
    """From eight micro-batches of independent tokens in each step of a window."""
    experts = 32
    generator = torch.Generator().manual_seed(0)
    rows = FixedRows()
    chunk = rows.new_chunk(0)
    for _ in range(WINDOW * 8):
        scores = torch.rand(ranks, tokens, experts, generator=generator)
        chosen = scores.topk(topk).indices // (experts // ranks)
        counts = torch.nn.functional.one_hot(chosen, ranks).sum(dim=(1, 2))
        if capacity is not None:
            counts = counts.clamp(max=int(capacity * tokens * topk / ranks))
        chunk.record(counts)
    rows.end_step()
    rows.learn(1.25)
    assert chunk.budget is not None
    learned = torch.tensor(chunk.budget.rows, dtype=torch.float64)
    block = sized_block(
        sequence_length=4 * tokens,
        experts=experts,
        expert=ranks,
        topk=topk,
        expert_tensor=2,
        capacity=capacity,
        rows_margin=1.25,
    )
    assert block.arriving(tokens) == pytest.approx(2 * learned.sum(dim=0).mean().item(), rel=0.03)
    assert block.sent(tokens) == pytest.approx(learned.sum(dim=1).mean().item(), rel=0.03)
    # What is computed is not padded.
    exact = dataclasses.replace(block, rows_margin=None)
    assert block.received(tokens) == exact.received(tokens) == exact.arriving(tokens)


def test_a_smaller_chunk_has_more_padding() -> None:
    block = sized_block(rows_margin=1.25)
    assert 2 * block.arriving(512) > block.arriving(1024) > 1.25 * block.received(1024)
    busiest = dataclasses.replace(block, imbalance=1.5)
    assert busiest.arriving(1024) > 1.4 * block.arriving(1024)
    assert busiest.sent(1024) == block.sent(1024)


@pytest.mark.parametrize(
    ("before", "now", "stays"),
    [
        pytest.param([[100, 400]], [[100, 400]], True, id="the same counts"),
        # Their budgets have 65 and 180 rows more, of which a quarter may be missing.
        pytest.param([[100, 400]], [[108, 420]], True, id="a little more"),
        pytest.param([[100, 400]], [[120, 400]], False, id="one pair much more"),
        pytest.param([[100, 400]], [[90, 360]], True, id="a little less"),
        pytest.param([[100, 400]], [[100, 300]], False, id="much less"),
        pytest.param([[0, 400]], [[1, 400]], False, id="rows where there were none"),
    ],
)
def test_a_budget_stays_while_counts_vary_little(
    before: list[list[int]], now: list[list[int]], stays: bool
) -> None:
    """Another budget costs the captures of CUDA graphs."""
    budget, learned = (budget_of(counts, margin=1.25) for counts in (before, now))
    assert is_near(budget, learned, now) is stays
    rows = FixedRows()
    chunk = rows.new_chunk(0)
    for counts in (before, now):
        # Ranks of a group have a row each.
        chunk.record(torch.tensor([*counts, [0, 0]]))
        rows.end_step()
        rows.learn(1.25)
        rows.begin_step()
    assert chunk.version == (1 if stays else 2)
    assert chunk.budget is not None
    assert chunk.budget.rows[0] == (budget if stays else learned).rows[0]


def test_recorded_data_begins_again_for_every_model_of_a_rank() -> None:
    data = RecordedData.of([iter([{"tokens": 1}, {"tokens": 2}, {"tokens": 3}]), None])
    seen = [next(data[0]), next(data[0])]
    seen[0]["tokens"] = "changed by the script"
    RecordedData.rewind_all(data)
    assert [next(data[0]), next(data[0])] == [{"tokens": 1}, {"tokens": 2}]
    assert RecordedData.of(None) is None


def test_a_repeated_step_begins_with_the_logged_losses_that_it_had() -> None:
    # Megatron's own loop clears them after every step, whatever its --log-interval. They are sums over
    # several steps in another loop, and over several runs of a step with --rerun-mode.
    losses = {"z_loss": torch.tensor([1.0, 2.0])}
    model: Any = torch.nn.BatchNorm1d(2)
    with (
        mock.patch.object(compat, "logged_losses", lambda: losses),
        mock.patch.object(fixed_rows, "random") as random,
    ):
        random._get_all_rng_states.return_value = ("states",)
        state = StepState([model])
        model(torch.randn(3, 2))
        losses["z_loss"] += 5
        losses["first logged in this step"] = torch.tensor([3.0])
        state.restore()
    assert {name: loss.tolist() for name, loss in losses.items()} == {
        "z_loss": [1.0, 2.0],
        "first logged in this step": [0.0],
    }
    assert model.running_mean.tolist() == [0.0, 0.0] and model.num_batches_tracked == 0
    random._set_all_rng_states.assert_called_once_with("states")


class Step:
    """A training whose passes count these rows from rank 0 to rank 0."""

    def __init__(self, *, margin: float) -> None:
        self.rows = FixedRows()
        self.chunk = self.rows.new_chunk(0)
        environment: Any = types.SimpleNamespace(iteration=1, on_gpu=False)
        self.before_repeat = mock.Mock()
        self.hook = FixedRowsSteps(self.rows, environment, margin=margin, before_repeat=self.before_repeat)
        model: Any = torch.nn.Linear(1, 1)
        model.zero_grad_buffer = mock.Mock()
        self.hook.models_built([model])
        self.optimizer = mock.Mock()
        self.batches: list[list[int]] = []
        self.restored: list[int] = []

    def run(self, count: int) -> None:
        """One step; its micro-batch is the count."""

        def passes(*, data_iterator: Any) -> int:
            self.batches.append([next(data_iterator)])
            self.chunk.record(torch.tensor([[count]]))
            return len(self.batches)

        of_hook = "megatron_ampipe.launch.fixed_rows"
        with mock.patch("torch.distributed.all_reduce"), mock.patch(f"{of_hook}.StepState") as state:
            self.hook.wrap_passes(passes, self.optimizer)(data_iterator=iter([count]))
        self.restored.append(state.return_value.restore.call_count)
        self.hook.after_step()

    @property
    def budget(self) -> int:
        """Rows of the only pair."""
        assert self.chunk.budget is not None
        return self.chunk.budget.rows[0][0]


def test_budgets_are_learned_after_the_warm_up_and_grow_with_a_repeated_step() -> None:
    step = Step(margin=1.0)
    for _ in range(WARM_UP):
        assert step.chunk.budget is None
        step.run(100)
    assert step.budget == 140 and step.rows.num_steps == 0
    step.run(140)
    assert (step.rows.num_steps, step.rows.num_repeated, step.budget) == (1, 0, 140)
    step.run(141)
    assert (step.rows.num_steps, step.rows.num_repeated) == (2, 1)
    assert step.batches[-2:] == [[141], [141]], "the same data"
    step.optimizer.zero_grad.assert_called_once()
    step.before_repeat.assert_called_once()
    assert step.restored[-2:] == [0, 1]
    assert step.budget == budget_of([[141]], margin=1.0).rows[0][0]
    assert not step.rows.is_active


def test_every_number_of_chunks_learns_its_budgets_from_steps_of_its_own() -> None:
    """As ``--ampipe-degree auto`` tries them. What a window did not run keeps its budgets."""
    step = Step(margin=1.0)
    first, later = step.chunk, step.rows.new_chunk(0)
    for _ in range(WARM_UP):
        step.run(100)
    step.chunk = later
    step.run(50)
    assert first.budget is not None and later.budget is None, "after its second step"
    step.run(60)
    assert later.budget == budget_of([[60]], margin=1.0) and first.version == later.version == 1
    assert (step.rows.num_steps, step.rows.num_repeated) == (2, 0)
    # A repeat of another chunk's step teaches it nothing.
    third = step.chunk = step.rows.new_chunk(0)
    step.run(70)
    step.chunk = later
    step.run(1000)
    assert step.rows.num_repeated == 1 and third.budget is None
    step.chunk = first
    for _ in range(2 * WINDOW):
        step.run(100)
    assert step.rows.num_repeated == 1 and first.budget == budget_of([[100]], margin=1.0)
    assert later.budget is not None and later.budget.rows[0][0] >= 1000


def test_a_budget_becomes_smaller_only_after_a_window() -> None:
    step = Step(margin=1.0)
    for _ in range(WINDOW - 1):
        step.run(100)
    step.run(10)
    assert step.budget == 140, "the largest of the window"
    for _ in range(WINDOW - 1):
        step.run(10)
        assert step.budget == 140
    step.run(10)
    assert step.budget == 23


def test_windows_with_several_repeats_widen_the_margin() -> None:
    margin = Margin(1.25)

    def window(num_repeated: int) -> float:
        for _ in range(num_repeated):
            margin.after_repeat()
        margin.after_window()
        return margin.factor

    assert window(9) == 1.25, "the first one"
    assert [window(num_repeated) for num_repeated in (1, 2, 1, 5)] == [1.25, 1.375, 1.375, 1.5625]
    assert [window(2) for _ in range(6)][-2:] == [4.0, 4.0]
    narrower = [window(0) for _ in range(8)]
    assert narrower[:2] == [3.0, 1 + 4 / 3] and narrower[-2:] == [1.25, 1.25]


def test_a_recorded_routing_has_the_budgets_of_a_training() -> None:
    draws = random.Random(1)
    # The largest count grows after two windows, and steps are then repeated.
    counts = [draws.randint(50, 100 if number < 2 * WINDOW else 400) for number in range(5 * WINDOW)]
    step, sent = Step(margin=1.01), 0
    for count in counts:
        sent += step.budget if step.chunk.budget is not None else 0
        step.run(count)
    layers = [dataclasses.replace(LAYER, counts=(((count,),),), arrivals={}) for count in counts]
    record = dataclasses.replace(RECORD, num_experts=1, ranks=1, tokens=(400,))
    records = [dataclasses.replace(record, layers=(layer,)) for layer in layers]
    replayed = replay(RecordedRouting(tuple(records)), ranks=1, margin=1.01, joins_sources=False)
    assert (replayed.num_steps, replayed.num_repeated) == (step.rows.num_steps, step.rows.num_repeated)
    assert replayed.num_repeated >= 2 and replayed.num_changes == step.chunk.version - 1
    assert replayed.padding == sent / sum(counts[WARM_UP:])


@pytest.mark.parametrize("given", [1.0, 7.0])
def test_a_margin_is_never_narrower_than_the_given_one(given: float) -> None:
    margin = Margin(given)
    margin.after_window()
    for _ in range(9):
        margin.after_repeat()
        margin.after_repeat()
        margin.after_window()
    assert margin.factor == max(given, 4.0)


def test_a_step_learns_with_the_margin_of_its_window() -> None:
    step = Step(margin=1.25)
    for count in (100, 100, 1000, 2000, *[100] * (WINDOW - 4)):
        step.run(count)
    assert step.rows.num_repeated == 2 and step.budget == budget_of([[2000]], margin=1.25).rows[0][0]
    for count in (3000, 5000, *[100] * (WINDOW - 2)):
        step.run(count)
    assert step.rows.num_repeated == 4 and step.budget == budget_of([[5000]], margin=1.375).rows[0][0]


def test_experts_whose_products_read_sizes_on_the_host_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("megatron.core")
    from megatron.core.transformer.moe.experts import SequentialMLP, TEGroupedMLP

    from megatron_ampipe.errors import BadInput
    from megatron_ampipe.layers import fixed_experts, grouped_experts

    grouped = TEGroupedMLP.__new__(TEGroupedMLP)
    torch.nn.Module.__init__(grouped)
    grouped.config = types.SimpleNamespace(fp8=None)
    local = SequentialMLP.__new__(SequentialMLP)
    torch.nn.Module.__init__(local)
    local.linear_fc1, local.linear_fc2 = torch.nn.Linear(1, 1), torch.nn.Linear(1, 1)
    grouped_experts.require_fixed_experts(grouped)
    with pytest.raises(BadInput, match="the products of SequentialMLP take numbers of rows from the host"):
        grouped_experts.require_fixed_experts(local)
    monkeypatch.setattr(fixed_experts, "LOCAL_LINEARS", (torch.nn.Linear,))
    grouped_experts.require_fixed_experts(local)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda: (9, 0))
    grouped_experts.require_fixed_experts(local)
    with pytest.raises(BadInput, match=r"Transformer Engine before 2\.17 reads .* on the host, and none is"):
        grouped_experts.require_fixed_experts(grouped)
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda: (8, 6))
    with pytest.raises(BadInput, match=r"capability 9 and 10, and this one has 8\.6"):
        grouped_experts.require_fixed_experts(local)


def test_where_transformer_engine_takes_numbers_of_rows_from_the_device(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In its release, on which GPU, and with which library: by precision."""
    library = types.SimpleNamespace(get_cublasLt_version=lambda: 130600)
    monkeypatch.setitem(sys.modules, "transformer_engine_torch", library)
    monkeypatch.delenv(compat.GROUPED_LINEAR_SWITCH, raising=False)
    releases = {"transformer-engine": Version("2.18.0")}
    monkeypatch.setattr(compat, "found_version", releases.get)

    def runs(*capabilities: tuple[int, int]) -> dict[tuple[int, int], list[str | None]]:
        recipes = (None, "tensorwise", "blockwise", "mxfp8")
        return {
            at: [recipe for recipe in recipes if compat.grouped_linear_problem(recipe, at) is None]
            for at in capabilities
        }

    hopper, blackwell = (9, 0), (10, 3)
    assert runs((8, 9), hopper, blackwell, (12, 0)) == {
        (8, 9): [],
        hopper: [None, "tensorwise", "blockwise"],
        blackwell: [None, "tensorwise", "mxfp8"],
        (12, 0): [],
    }
    library.get_cublasLt_version = lambda: 130400
    assert runs(hopper, blackwell) == {hopper: [None], blackwell: [None, "tensorwise", "mxfp8"]}
    library.get_cublasLt_version = lambda: 130300
    assert runs(hopper, blackwell) == {hopper: [], blackwell: [None, "tensorwise", "mxfp8"]}
    library.get_cublasLt_version = lambda: 130600
    releases["transformer-engine"] = Version("2.17.1")
    assert runs(hopper, blackwell) == {hopper: [None], blackwell: [None, "mxfp8"]}
    assert str(compat.grouped_linear_problem("blockwise", hopper)).endswith("and 2.17.1 is installed")
    monkeypatch.setenv(compat.GROUPED_LINEAR_SWITCH, "0")
    assert str(compat.grouped_linear_problem(None, hopper)).startswith("with NVTE_GROUPED_LINEAR_USE")
    with compat.rows_from_device():
        assert compat.grouped_linear_problem(None, hopper) is None
    assert os.environ[compat.GROUPED_LINEAR_SWITCH] == "0"


class Added(TorchDispatchMode):
    """Records in which precision rows are added to sums."""

    def __init__(self) -> None:
        super().__init__()
        self.dtypes: list[torch.dtype] = []

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "index_add" in str(operator):
            self.dtypes.append(args[0].dtype)
        return operator(*args, **(kwargs or {}))


def test_gradients_of_biases_of_16_bits_are_summed_in_32() -> None:
    """On a GPU, where 256 and 1 are 256 in bf16: here torch's function adds in fp32 anyway."""
    pytest.importorskip("megatron.core")
    from megatron_ampipe.layers.fixed_experts import biases_of_rows

    biases = [torch.zeros(3, dtype=torch.bfloat16, requires_grad=True) for _ in range(2)]
    rows = biases_of_rows(biases, torch.tensor([1000, 3000], dtype=torch.int32), 3100)
    assert rows.dtype == torch.bfloat16
    gradient = torch.ones_like(rows)
    gradient[3000:] = float("nan")
    with Added() as added:
        found = torch.autograd.grad(rows, biases, gradient)
    assert added.dtypes == [torch.float32]
    assert [one.tolist() for one in found] == [[1000.0] * 3, [2000.0] * 3]
