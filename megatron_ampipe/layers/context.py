"""State shared by all pipelined layers of a process. ``launch`` creates it; layer specifications carry it."""

from __future__ import annotations

from dataclasses import dataclass, field

from megatron_ampipe.block.settings import Settings
from megatron_ampipe.exchange.budgets import FixedRows
from megatron_ampipe.exchange.codecs import Condenser, Wire
from megatron_ampipe.layers.documents import DocumentReader
from megatron_ampipe.runtime.executors import Executor
from megatron_ampipe.runtime.partners import Partners
from megatron_ampipe.runtime.recorder import Recorder
from megatron_ampipe.runtime.reductions import Reductions
from megatron_ampipe.schedule import KEEP, Pipeline, StageKind, kinds
from megatron_ampipe.schedule.pipeline import builds_layers

WHOLE_PASSES = frozenset({"full"})
"""In place of modules whose stages are captured: all stages of a pass, transfers included."""


@dataclass(slots=True)
class AMPipeContext:
    """What all pipelined layers of a process share: settings, the current pipeline, executor, recorder, ...

    Attributes:
        settings: The values of the flags ``--ampipe-*``.
        given: How blocks run at first.
        executor: Runs the stages; if None, the first layer that runs creates it.
        kernel: Name of the attention kernel; if None, each layer chooses.
        recomputed_layers: Full recompute inside the schedules: how many layers of a (virtual) pipeline stage,
            from its first, save only their input; infinity for all layers, also of multi-token prediction.
            0 otherwise.
        reductions: Gradient reductions that run as stages of the backward pass; None where data parallelism
            starts them itself.
        overlaps_reductions: Whether reductions start while a backward pass runs (``--overlap-grad-reduce``).
        shares: Whether layers can share a schedule; False if a setting outside the layer config forbids it.
        partners: Joins the passes of two micro-batches (``--ampipe-partner``); None without.
        gate: The router class of ``--ampipe-router``; None for Megatron's own.
        wire: Encodes tokens for their transfers (``--ampipe-wire``); None to send them as they are.
        graph_modules: The values of Megatron's ``--cuda-graph-modules`` whose stages are captured;
            :data:`WHOLE_PASSES` to capture whole passes.
        left_out_of_graphs: Kinds of stages that run without a graph, though their module is named.
        graph_warm_up: How many micro-batches run without graphs first.
        fixed_rows: The chunks that are sent with fixed rows (``--ampipe-rows fixed``); None for exact rows.
        condenser: Chooses which of similar tokens are sent (``--ampipe-condense``); None to send all.
        pipeline: How blocks run from the next forward pass on; at first as in ``given``.
        predicted_ms: The predicted times of a block's forward and backward pass, from a plan; only logged.
        layers_being_built: The ``ConsecutiveLayers`` of the layer that was built last.
    """

    settings: Settings
    given: Pipeline
    recorder: Recorder = field(default_factory=Recorder)
    executor: Executor | None = None
    kernel: str | None = None
    recomputed_layers: float = 0
    documents: DocumentReader = field(default_factory=DocumentReader)
    reductions: Reductions | None = None
    overlaps_reductions: bool = False
    shares: bool = True
    partners: Partners | None = None
    gate: type | None = None
    wire: Wire | None = None
    graph_modules: frozenset[str] = frozenset()
    left_out_of_graphs: frozenset[StageKind] = frozenset()
    graph_warm_up: int = 3
    fixed_rows: FixedRows | None = None
    condenser: Condenser | None = field(init=False, default=None)
    pipeline: Pipeline = field(init=False)
    predicted_ms: tuple[float, float] | None = field(init=False, default=None)
    layers_being_built: object = field(init=False, default=None, repr=False)

    def __post_init__(self) -> None:
        self.pipeline = self.given
        if self.settings.condense is not None:
            self.condenser = Condenser(self.settings.condense)

    @property
    def captures_attention(self) -> bool:
        """Whether graphs contain attention, so that they are of sequences without documents."""
        captured = kinds.GRAPH_MODULES["attn"] - self.left_out_of_graphs
        has_stages = "attn" in self.graph_modules and not captured.isdisjoint((kinds.QKV, kinds.ATTENTION))
        return has_stages or self.captures_passes

    @property
    def captures_passes(self) -> bool:
        """Whether a CUDA graph is a whole pass, rather than consecutive stages of it."""
        return self.graph_modules == WHOLE_PASSES

    @property
    def captures_budgets(self) -> bool:
        """Whether graphs contain sizes that budgets decide, so that they are of passes with budgets."""
        if self.fixed_rows is None or self.captures_passes:
            return self.captures_passes
        modules = [kinds.GRAPH_MODULES.get(name, frozenset()) for name in self.graph_modules]
        captured = frozenset().union(*modules) - self.left_out_of_graphs
        return not captured.isdisjoint((kinds.ROUTE, kinds.MERGE))

    @property
    def pipelined(self) -> bool:
        """Whether AMPipe's MoE layers are built rather than Megatron's own."""
        return builds_layers(self.settings, self.given)

    @property
    def runs_megatron_layers(self) -> bool:
        """Whether blocks run as Megatron's own layers at present, because a schedule would change nothing."""
        # A custom gate may give a token any number of experts, which Megatron's layer does not support.
        changes = self.gate, self.reductions, self.wire, self.condenser, self.partners
        return (
            self.pipeline.is_stock
            and self.pipeline.memory == KEEP
            and all(change is None for change in changes)
        )

    def __deepcopy__(self, memo: dict[int, object]) -> AMPipeContext:
        """Return the same object: Megatron deep-copies layer specifications, but the context is shared."""
        return self
