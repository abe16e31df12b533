"""Records a run: the trace of each rank, metrics at every ``--log-interval``, and the routing of tokens.

Metrics go to Megatron's log, TensorBoard and Weights & Biases. As with Megatron's metrics, the last rank
writes its own; no collective is issued for them. Its recorder is enabled only in logged iterations, in those
of ``--ampipe-measure``, or in all iterations for a trace. Recorded iterations run without CUDA graphs, so
there are no metrics with CUDA graphs: a run that logs every iteration would never use the graphs. On CUDA,
times are events. They are read after Megatron has read the losses of the same iteration, so the host does not
wait for the device.

With ``--ampipe-routing-dir``, the routing of one micro-batch is written to a file, every Nth iteration.
Forward hooks on the routers of a model, pipelined or not, count the tokens, and one rank collects the counts.
Only a few rows are compared for similarity: comparing all takes longer than a training step of a small model.
"""

from __future__ import annotations

import collections
import functools
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.utils import unwrap_model
from megatron.training import print_rank_last
from megatron.training.global_vars import get_tensorboard_writer, get_wandb_writer
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from megatron_ampipe.block.settings import Settings, parse_iterations
from megatron_ampipe.errors import RunFailed, global_rank
from megatron_ampipe.exchange.codecs import Condenser
from megatron_ampipe.files import outputs
from megatron_ampipe.files.timeline import Communication, Timeline, summary_of
from megatron_ampipe.launch.auto import print_on_first_rank
from megatron_ampipe.launch.environment import Environment
from megatron_ampipe.launch.hooks import Hook
from megatron_ampipe.launch.megatron_types import Model
from megatron_ampipe.layers.context import AMPipeContext
from megatron_ampipe.plan.recorded_routing import THRESHOLDS, LayerRouting, RoutingRecord, divisors
from megatron_ampipe.schedule import Direction

# R rows of a chunk, B sequences of a micro-batch, E experts, D hidden size, P ranks of the group.

Counted = tuple[int, tuple[int, ...], LayerRouting]
"""What a rank has counted of a layer: the rank, the number of tokens in each chunk, and their routing."""
Metric = tuple[str, float, int]
"""The name in the log, the value, and the number of digits in the log."""


class Recording(Hook):
    """Selects the iterations that are recorded, logs their metrics and writes the trace at the end."""

    def __init__(self, context: AMPipeContext, environment: Environment) -> None:
        self._context = context
        self._environment = environment
        settings = context.settings
        self._folder = None if settings.trace_dir is None else Path(settings.trace_dir)
        measured = (0, -1) if settings.measure is None else parse_iterations(settings.measure)
        self._measured = range(measured[0], measured[1] + 1)
        """The iterations of ``--ampipe-measure``; empty without."""
        self._communication: dict[int, Communication] = {}
        if self._folder is not None:
            flag = "--ampipe-trace-dir"
            outputs.check_folder(self._folder.absolute(), flag=flag, value=self._folder)
            for earlier in self._folder.glob("rank*.trace.json"):
                earlier.unlink(missing_ok=True)

    def _is_logged(self, iteration: int) -> bool:
        environment = self._environment
        is_last_rank = environment.rank == environment.world_size - 1
        is_due = is_last_rank and iteration % environment.log_interval == 0
        return is_due and not self._context.graph_modules

    def models_built(self, models: Sequence[Model]) -> None:
        for model in unwrap_model(models):
            model.register_forward_pre_hook(lambda model, _: self.before_forward(model))

    def before_forward(self, model: Model) -> None:
        """Set the recorder's iteration, or pause the recorder; also in evaluation."""
        # With --skip-train, there is no count of iterations.
        if model.training and self._records(self._environment.iteration):
            self._context.recorder.start_iteration(self._environment.iteration)
        else:
            self._context.recorder.pause()

    def _records(self, iteration: int) -> bool:
        """Whether this rank records an iteration."""
        is_traced = self._folder is not None and (not self._measured or iteration in self._measured)
        return is_traced or self._is_logged(iteration) or self._is_measured(iteration)

    def _is_measured(self, iteration: int) -> bool:
        environment = self._environment
        return iteration in self._measured and environment.rank == environment.world_size - 1

    def before_repeat(self) -> None:
        """Stages from now on are of a repeated step."""
        self._context.recorder.repeat_iteration()

    def after_log(self) -> None:
        """Write the metrics of a recorded iteration to all outputs of this run."""
        iteration = self._environment.iteration
        self._log_metrics(iteration)
        if self._is_measured(iteration):
            self._communication[iteration] = Communication.of(self._timeline(iteration))
        if self._measured and iteration == self._measured[-1]:
            self._end_measurement()

    def _end_measurement(self) -> None:
        """After the last iteration of ``--ampipe-measure``: log the medians, and write the trace."""
        if self._communication:
            # A run that goes on from a checkpoint may begin after the first.
            first, last = min(self._communication), max(self._communication)
            summary = summary_of([*self._communication.values()])
            print_rank_last(f" ampipe, iterations {first} to {last}, medians | {summary} |")
        # Later iterations would replace the recorded ones.
        self._write_trace()
        self._folder = None

    def _timeline(self, iteration: int) -> Timeline:
        recorder = self._context.recorder
        return recorder.timeline(rank=self._environment.rank, labels={}, iteration=iteration)

    def _log_metrics(self, iteration: int) -> None:
        metrics = self._metrics(iteration) if self._is_logged(iteration) else []
        if not metrics:
            return
        tensorboard, wandb = get_tensorboard_writer(), get_wandb_writer()
        tagged = {
            "ampipe/" + name.replace(" (ms)", "-ms").replace(" ", "-"): value for name, value, _ in metrics
        }
        if tensorboard:
            for tag, value in tagged.items():
                tensorboard.add_scalar(tag, value, iteration)
        if wandb:
            wandb.log(tagged, iteration)
        text = " | ".join(f"{name}: {value:.{digits}f}" for name, value, digits in metrics)
        print_rank_last(f" ampipe at iteration {iteration:8d} | {text} |")

    def _metrics(self, iteration: int) -> list[Metric]:
        """The metrics of an iteration, with a plan's predictions; none if no pipelined layer has run."""
        context = self._context
        timeline = self._timeline(iteration)
        if not timeline.spans:
            return []
        metrics: list[Metric] = [("degree", context.pipeline.degree, 0)]
        # Copies within a rank do not count as communication.
        if self._environment.expert_ranks > 1:
            metrics.append(("communication (ms)", timeline.communication_us / 1e3, 2))
            metrics.append(("hidden share", timeline.hidden_share, 3))
            exposed_us = timeline.communication_us - timeline.hidden_us
            metrics.append(("exposed communication (ms)", exposed_us / 1e3, 2))
        if context.condenser is not None and (share := context.condenser.take_share()) is not None:
            metrics.append(("condensed share", share, 3))
        if context.fixed_rows is not None:
            metrics.append(("repeated steps", context.fixed_rows.num_repeated, 0))
        times_us = context.recorder.pass_times_us(iteration)
        for direction, predicted_ms in zip(Direction, context.predicted_ms or (None, None), strict=True):
            if times_us[direction]:
                measured_ms = statistics.fmean(times_us[direction]) / 1e3
                metrics.append((f"block {direction.value} (ms)", measured_ms, 2))
                if predicted_ms:
                    metrics.append((f"block {direction.value} predicted (ms)", predicted_ms, 2))
        return metrics

    def at_end(self) -> None:
        """Write this rank's trace, if there is one, also after a failure."""
        self._write_trace()

    def _write_trace(self) -> None:
        if self._folder is not None:
            # The process group may have been destroyed already.
            rank = global_rank()
            timeline = self._context.recorder.timeline(rank=rank, labels=self._context.pipeline.labels)
            if timeline.spans:
                timeline.write_chrome(self._folder / f"rank{rank}.trace.json")


class RoutingRecording(Hook):
    """Records the first micro-batch of every Nth training step.

    Each time, a rank compares the rows of one expert in one of its layers: in turn all layers, then the next
    expert. There is no context at degree 1.
    """

    def __init__(self, environment: Environment, settings: Settings, context: AMPipeContext | None) -> None:
        assert settings.routing_dir is not None and environment.num_experts is not None
        self._environment = environment
        self._num_experts = environment.num_experts
        self._interval = settings.routing_interval
        self._context = context
        self._folder = Path(settings.routing_dir)
        condensed = [] if settings.condense is None else [settings.condense]
        self._thresholds = tuple(sorted({*THRESHOLDS, *condensed}))
        self._routers: list[TopKRouter] = []
        self._handles: list[RemovableHandle] = []
        self._seen: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}

    @property
    def _iteration(self) -> int:
        return self._environment.iteration

    def models_built(self, models: Sequence[Model]) -> None:
        """Collect the routers, except those of multi-token prediction."""
        self._routers = [
            module
            for model in models
            for name, module in model.named_modules()
            if isinstance(module, TopKRouter) and "mtp" not in name.split(".")
        ]

    def before_step(self) -> None:
        """Count, in every Nth step."""
        # Only the first expert-data-parallel rank contributes.
        if self._iteration % self._interval or parallel_state.get_expert_data_parallel_rank() > 0:
            return
        turn = self._iteration // self._interval - 1
        for index, router in enumerate(self._routers):
            pick = None
            if index == turn % len(self._routers):
                # Each rank compares the rows of another expert.
                rank = parallel_state.get_expert_tensor_and_model_parallel_group().rank()
                pick = turn // len(self._routers) + rank
            see = functools.partial(self._see, pick)
            # ``always_call``: other hooks of a router are called once for all chunks, this form for each.
            self._handles.append(router.register_forward_hook(see, with_kwargs=True, always_call=True))

    def _see(
        self,
        pick: int | None,
        router: TopKRouter,
        inputs: tuple[Tensor, ...],
        options: Mapping[str, int],
        outputs: tuple[Tensor, ...],
    ) -> None:
        """A forward hook: keep what a router has chosen for a chunk."""
        place = router.layer_number, options.get("chunk", 0)
        # Later micro-batches, and the recompute of the first one, are not counted.
        if router.training and place not in self._seen:
            with torch.no_grad():
                hidden = inputs[0]
                chosen = outputs[1].bool().view(*hidden.shape[:2], -1)
                self._seen[place] = chosen, compared_rows(hidden, chosen, self._thresholds, pick=pick)

    def before_repeat(self) -> None:
        """Forget the first passes, in which rows were missing."""
        self._seen = {}

    def after_step(self) -> None:
        """Gather the counts of all ranks, and write them on rank 0."""
        if self._iteration % self._interval:
            return
        for handle in self._handles:
            handle.remove()
        rank = parallel_state.get_expert_tensor_and_model_parallel_group().rank()
        counted = [(rank, *self._counted(layer)) for layer in {layer for layer, _ in self._seen}]
        self._handles, self._seen = [], {}
        gathered: list[list[Counted]] = [[] for _ in range(dist.get_world_size())]
        dist.gather_object(counted, gathered if dist.get_rank() == 0 else None)
        if dist.get_rank() != 0:
            return
        num_chunks = 1 if self._context is None else self._context.pipeline.num_chunks
        tokens: tuple[int, ...] = ()
        parts: dict[int, list[LayerRouting]] = collections.defaultdict(list)
        entries = sorted((entry for counts in gathered for entry in counts), key=lambda entry: entry[0])
        for _, lengths, part in entries:
            # A layer that Megatron runs has no chunks.
            if len(lengths) == num_chunks:
                tokens = lengths
                parts[part.layer].append(part)
        if not parts:
            return
        environment = self._environment
        try:
            RoutingRecord(
                iteration=self._iteration,
                num_experts=self._num_experts,
                ranks=parallel_state.get_expert_model_parallel_world_size(),
                batch=environment.batch,
                ranks_per_sequence=environment.tensor_ranks * environment.layout.context_ranks,
                hidden_size=environment.hidden_size,
                tokens=tokens,
                layers=tuple(_joined(parts[layer]) for layer in sorted(parts)),
            ).write(self._folder)
        except RunFailed as error:
            # Do not end the training for its statistics.
            print_on_first_rank(f"the routing of iteration {self._iteration} was not recorded: {error}")

    def _counted(self, layer: int) -> tuple[tuple[int, ...], LayerRouting]:
        """The number of tokens in each chunk of a layer on this rank, and their routing."""
        chosen, rows = zip(*(self._seen[key] for key in sorted(self._seen) if key[0] == layer), strict=True)
        whole = torch.cat(chosen)
        compared, *left = torch.stack(rows).sum(dim=0).tolist()
        by_chunk = [chunk.sum(dim=0) for chunk in chosen]
        routing = LayerRouting(
            layer=layer,
            counts=tuple(_table(sequence) for sequence in torch.stack(by_chunk, dim=1)),
            arrivals={
                places: _table(whole.unflatten(2, (places, -1)).any(dim=3).sum(dim=0))
                for places in divisors(self._num_experts)[1:-1]
            },
            rows_compared=compared,
            rows_left=dict(zip(self._thresholds, left, strict=True)),
        )
        return tuple(map(len, chosen)), routing


def _joined(parts: Sequence[LayerRouting]) -> LayerRouting:
    """The routing of one layer, joined from the parts of all ranks in rank order."""
    first = parts[0]
    return LayerRouting(
        layer=first.layer,
        counts=sum((part.counts for part in parts), ()),
        arrivals={places: sum((part.arrivals[places] for part in parts), ()) for places in first.arrivals},
        rows_compared=sum(part.rows_compared for part in parts),
        rows_left={cosine: sum(part.rows_left[cosine] for part in parts) for cosine in first.rows_left},
    )


def _table(counts: Tensor) -> tuple[tuple[int, ...], ...]:
    """A matrix of counts as plain numbers."""
    rows: list[list[int]] = counts.tolist()
    return tuple(tuple(row) for row in rows)


def compared_rows(hidden: Tensor, chosen: Tensor, thresholds: Sequence[float], *, pick: int | None) -> Tensor:
    """Number of rows of one expert, and how many of them a :class:`Condenser` would send at each threshold.

    Takes the tokens of a chunk ``[R, B, D]`` and their experts ``[R, B, E]`` bool; returns
    ``[1 + thresholds]`` int64. ``pick`` selects one of the experts with tokens; None compares nothing.
    """
    used = [] if pick is None else chosen.flatten(0, 1).any(dim=0).nonzero()[:, 0].tolist()
    if pick is None or not used:
        return torch.zeros(1 + len(thresholds), dtype=torch.int64, device=hidden.device)
    taken, batch = chosen[:, :, used[pick % len(used)]], hidden.shape[1]
    left = [
        Condenser(threshold).condense(hidden[taken], taken.view(-1, 1), batch=batch, counted=False).counts
        for threshold in thresholds
    ]
    return torch.cat([taken.sum().view(1), *left])
