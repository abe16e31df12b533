"""State shared by all pipelined layers of a process; ``launch`` creates it, layer specifications carry it."""

from __future__ import annotations

from dataclasses import dataclass, field

from megatron_ampipe.exchange.codecs import Condenser, Wire
from megatron_ampipe.layers.document_reader import DocumentReader
from megatron_ampipe.layers.recompute import FullRecompute
from megatron_ampipe.runtime.executors import CudaExecutor, Executor, ThreadExecutor
from megatron_ampipe.runtime.recorder import Recorder
from megatron_ampipe.runtime.reductions import Reductions
from megatron_ampipe.schedule import KEEP, Pipeline
from megatron_ampipe.schedule.pipeline import AMPipeConfig


@dataclass(slots=True)
class AMPipeContext:
    """Settings, executor and recorder of a process.

    Attributes:
        executor: Runs the stages; if None, chosen by the first layer that runs.
        kernel: Name of the attention kernel; if None, chosen by each layer.
        recompute: Full recompute inside the schedules, in every block that is built from then on; None where
            Megatron recomputes around the layers, or not at all.
        reductions: Of gradients, held back for stages of the backward passes; None where data parallelism
            starts them itself.
        gate: The router class of ``--ampipe-router``, a subclass of Megatron's ``TopKRouter``; None for
            Megatron's own.
        wire: Around the transfers of tokens (``--ampipe-wire``); None to send them as they are.
        condenser: Chooses which of similar tokens are sent (``--ampipe-condense``); None to send all.
        pipeline: How blocks run from the next forward pass on; initially as in ``config``.
        predicted_ms: Durations that a plan predicts for the forward and backward pass of a block with
            ``pipeline``, from its first stage to its last; None without a plan. Only logged.
    """

    config: AMPipeConfig
    recorder: Recorder = field(default_factory=Recorder)
    executor: Executor | None = None
    kernel: str | None = None
    recompute: FullRecompute | None = None
    documents: DocumentReader = field(default_factory=DocumentReader)
    reductions: Reductions | None = None
    gate: type | None = None
    wire: Wire | None = None
    condenser: Condenser | None = field(init=False, default=None)
    pipeline: Pipeline = field(init=False)
    predicted_ms: tuple[float, float] | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        self.pipeline = self.config.pipeline
        if self.config.condense is not None:
            self.condenser = Condenser(self.config.condense)

    @property
    def runs_megatron_layers(self) -> bool:
        """Whether blocks are Megatron's own layers at present: a schedule would only repeat what they do.

        A gate of the user's may give a token any number of experts, which Megatron's layer does not take.
        """
        return (
            self.pipeline.is_stock
            and self.pipeline.memory == KEEP
            and self.gate is None
            and self.reductions is None
            and self.wire is None
            and self.condenser is None
        )

    def executor_for(self, *, on_gpu: bool) -> Executor:
        """The executor of the process; created at the first call."""
        if self.executor is None:
            self.executor = CudaExecutor() if on_gpu else ThreadExecutor()
        return self.executor

    def __deepcopy__(self, memo: dict[int, object]) -> AMPipeContext:
        """Return the same object: Megatron deep-copies layer specifications, but the context is shared."""
        return self
