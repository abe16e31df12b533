"""The configuration of a run: its settings, and the pipeline that they name. Imports neither torch nor
Megatron.

``launch`` makes it from flags; ``layers`` receive it. What it cannot be combined with is in
:mod:`megatron_ampipe.launch.refusals`.
"""

from __future__ import annotations

from dataclasses import dataclass

from megatron_ampipe.block.settings import AUTO, SETTING, Settings
from megatron_ampipe.schedule import STRATEGIES, Pipeline, of_chunks


@dataclass(frozen=True, slots=True, kw_only=True)
class AMPipeConfig(Settings):
    """How every MoE block of the model is pipelined.

    Raises:
        BadInput: a value is wrong, or excludes the pipeline.
    """

    pipeline: Pipeline = Pipeline.of(1)  # noqa: RUF009
    """How blocks run from the first pass on. One chunk builds Megatron's own layers and nothing else, unless
    ``automatic`` chooses another pipeline later, or the exchange is not Megatron's."""

    def __post_init__(self) -> None:
        for name, setting in SETTING.items():
            if (value := getattr(self, name)) != setting.default:
                setting.check_value(value)
        if self.condense is not None:
            self._check_condensed()

    def _check_condensed(self) -> None:
        """Refuse what condensed tokens cannot be combined with, whether flags or a plan say it."""
        setting, exchange, memory = SETTING["condense"], self.pipeline.exchange, self.pipeline.memory
        if not exchange.sends_every_copy:
            rule = f"with --ampipe-exchange {exchange}, a row is of several experts, and its result their sum"
            remedy = f"Use --ampipe-exchange rows, or leave {setting.flag} out."
            raise setting.refuse(self.condense, rule, remedy)
        if any("redispatch" in STRATEGIES[name] for name in of_chunks(memory)):
            rule = f"with --ampipe-memory {memory}, tokens would have to be chosen once more"
            remedy = f"Use --ampipe-memory rebuild, or leave {setting.flag} out."
            raise setting.refuse(self.condense, rule, remedy)

    @property
    def automatic(self) -> bool:
        """Whether a plan or the first iterations choose the pipeline."""
        return self.degree == AUTO

    @property
    def chooses_exchange(self) -> bool:
        """Whether they also choose how the all-to-all groups copies of a token."""
        return self.exchange == AUTO

    @property
    def pipelined(self) -> bool:
        """Whether MoE layers are built as AMPipe's; Megatron's own otherwise."""
        return self.automatic or not self.pipeline.is_stock
