"""What all pipelined layers of a process share. Made by ``launch``, carried by layer specifications."""

from __future__ import annotations

from dataclasses import dataclass, field

from megatron_ampipe.config import AMPipeConfig
from megatron_ampipe.runtime.cuda_executor import CudaExecutor
from megatron_ampipe.runtime.executors import Executor, ThreadExecutor
from megatron_ampipe.runtime.recorder import Recorder
from megatron_ampipe.schedule import Pipeline


@dataclass(slots=True)
class AMPipeContext:
    """Settings and machinery.

    Attributes:
        config: The user's settings.
        recorder: Told of every stage.
        executor: What runs the stages; chosen by the first layer that runs if None.
        kernel: Name of the attention kernel; chosen by each layer if None.
        pipeline: How blocks are run from the next forward pass on; at first what ``config`` says.
        predicted_ms: What a plan predicts of a pass through a block by ``pipeline``, forward and backward,
            from its first stage to its last; None without a plan. For the log alone.
    """

    config: AMPipeConfig
    recorder: Recorder = field(default_factory=Recorder)
    executor: Executor | None = None
    kernel: str | None = None
    pipeline: Pipeline = field(init=False)
    predicted_ms: tuple[float, float] | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        self.pipeline = self.config.pipeline

    def executor_for(self, *, on_gpu: bool) -> Executor:
        """The one executor of the process."""
        if self.executor is None:
            self.executor = CudaExecutor() if on_gpu else ThreadExecutor()
        return self.executor

    def __deepcopy__(self, memo: dict[int, object]) -> AMPipeContext:
        """Megatron copies layer specifications; the context in them stays the one of the process."""
        return self
