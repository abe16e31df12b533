"""What a user sets. Imports neither torch nor Megatron.

``launch`` builds the configuration from flags; ``layers`` receive it. What it cannot be combined with is in
:mod:`megatron_ampipe.refusals`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from megatron_ampipe.errors import BadInput
from megatron_ampipe.gate_names import ROUTER_SCOPES, class_path
from megatron_ampipe.schedule import SCHEDULE_NAMES, STRATEGIES, Pipeline, of_chunks
from megatron_ampipe.wire_names import CONDENSE_FLAG, WIRE_FLAG, check_threshold, check_wire

AUTO: Final = "auto"
"""The value of ``--ampipe-degree`` and ``--ampipe-exchange`` that leaves the choice to AMPipe."""

CAPACITY_SCOPES = ("sequence", "chunk")
"""Over which tokens an expert's capacity counts."""

GRAD_REDUCES = ("stock", "placed")
"""When the reductions of ``--overlap-grad-reduce`` start."""

TRACED_ITERATIONS = 3
"""How many iterations, counted from the end of the run, a trace holds."""

ROUTING_INTERVAL = 100
"""Every which iteration ``--ampipe-routing-dir`` records, unless the user says otherwise."""

SETTING_NAMES = (
    "degree",
    "backward-degree",
    "chunks",
    "cluster",
    "plan",
    "save-plan",
    "schedule",
    "stack",
    "memory",
    "memory-budget",
    "exchange",
    "grad-reduce",
    "ranks-per-node",
    "capacity-scope",
    "router",
    "router-scope",
    "wire",
    "condense",
    "trace-dir",
    "routing-dir",
    "routing-interval",
)
"""The settings as users name them: ``--ampipe-degree``, or ``degree`` in a section ``ampipe:`` of a file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AMPipeConfig:
    """How every MoE block of the model is pipelined."""

    pipeline: Pipeline = Pipeline.of(1)  # noqa: RUF009
    """How blocks run from the first pass on. One chunk builds Megatron's own layers and nothing else, unless
    ``automatic`` chooses another pipeline later, or the exchange is not Megatron's."""
    automatic: bool = False
    """Whether a plan or the first iterations choose the pipeline (``--ampipe-degree auto``)."""
    chooses_exchange: bool = False
    """Whether they also choose how often a token is sent (``--ampipe-exchange auto``)."""
    ranks_per_node: int | None = None
    """Ranks of a node, which follow one another, for an exchange in two hops; None if that is not known."""
    cluster: str | None = None
    """Cluster file from which ``automatic`` plans; None to try degrees in the first iterations. Its
    figures also decide what is kept by ``memory_budget``."""
    plan: str | None = None
    """Plan file that the pipeline was read from."""
    save_plan: str | None = None
    """File that receives what ``automatic`` chose, as a plan; None to keep it in the log alone."""
    memory_budget: str | None = None
    """Size, such as ``60GiB``, into which the activations must fit; it chooses what the experts keep."""
    grad_reduce: str = "stock"
    """When the reductions of ``--overlap-grad-reduce`` start; one of :data:`GRAD_REDUCES`. ``stock``: when
    the last gradient of a bucket is complete; ``placed``: where the schedule has room after that."""
    capacity_scope: str = "sequence"
    """Over which tokens an expert's capacity counts; one of :data:`CAPACITY_SCOPES`. ``chunk`` drops other
    tokens than a stock run."""
    router: str | None = None
    """The router of every MoE layer, at any degree: a shipped gate or ``package.module:Class``; None for
    Megatron's own."""
    router_scope: str = "sequence"
    """Over which tokens a router may compare tokens with each other; one of
    :data:`~megatron_ampipe.gate_names.ROUTER_SCOPES`. ``chunk`` is another function than a stock run's."""
    wire: str | None = None
    """What rows become while they travel: one of :data:`~megatron_ampipe.wire_names.SHIPPED_WIRES` or
    ``package.module:Class``; None to send them as they are."""
    condense: float | None = None
    """Cosine from which on tokens of a sequence go to an expert once; None to send all tokens. Another
    function than a stock run's."""
    trace_dir: str | None = None
    """Folder that receives one Chrome trace per rank at the end of the run; None records nothing."""
    routing_dir: str | None = None
    """Folder that receives who goes where, one file per recorded iteration, at any degree; None records
    nothing."""
    routing_interval: int = ROUTING_INTERVAL
    """Every which iteration is recorded there."""

    def __post_init__(self) -> None:
        for flag, value, chooses in (
            ("--ampipe-cluster", self.cluster, self.automatic or self.memory_budget is not None),
            ("--ampipe-save-plan", self.save_plan, self.automatic),
        ):
            if value is not None and not chooses:
                raise BadInput(
                    flag,
                    value,
                    rule=f"has no effect at --ampipe-degree {self.degree}, which is not chosen by us",
                    remedy="Use --ampipe-degree auto, or leave it out.",
                )
        if self.pipeline.schedule not in SCHEDULE_NAMES:
            raise BadInput(
                "--ampipe-schedule",
                self.pipeline.schedule,
                rule=f"is not one of {', '.join(SCHEDULE_NAMES)}",
                remedy="Use --ampipe-schedule ampipe.",
            )
        if self.capacity_scope not in CAPACITY_SCOPES:
            raise BadInput(
                "--ampipe-capacity-scope",
                self.capacity_scope,
                rule=f"is not one of {', '.join(CAPACITY_SCOPES)}",
                remedy="Use --ampipe-capacity-scope sequence, which drops the tokens that a stock run drops.",
            )
        if self.router is not None:
            class_path(self.router)
        if self.router_scope not in ROUTER_SCOPES:
            raise BadInput(
                "--ampipe-router-scope",
                self.router_scope,
                rule=f"is not one of {', '.join(ROUTER_SCOPES)}",
                remedy="Leave it out: most routers look at one token at a time.",
            )

        if self.wire is not None:
            check_wire(self.wire)
        if self.condense is not None:
            check_threshold(self.condense)
        for flag, given in ((WIRE_FLAG, self.wire), (CONDENSE_FLAG, self.condense)):
            if given is not None and (self.automatic or self.pipeline.is_stock):
                rule = f"has no effect at --ampipe-degree {self.degree}, which builds Megatron's own layers"
                if self.automatic:
                    rule = "changes numbers, so degrees that are tried in training would differ in them"
                raise BadInput(flag, given, rule=rule, remedy=f"Add --ampipe-degree 4, or leave {flag} out.")
        if self.condense is not None:
            self._check_condensed()

    def _check_condensed(self) -> None:
        """Refuse what condensed tokens cannot be combined with, whether flags or a plan say it."""
        if not self.pipeline.exchange.sends_every_copy:
            raise BadInput(
                CONDENSE_FLAG,
                self.condense,
                rule=f"with --ampipe-exchange {self.pipeline.exchange}, a row is of several experts, and its "
                "result their sum",
                remedy=f"Use --ampipe-exchange rows, or leave {CONDENSE_FLAG} out.",
            )
        if any("redispatch" in STRATEGIES[name] for name in of_chunks(self.pipeline.memory)):
            raise BadInput(
                CONDENSE_FLAG,
                self.condense,
                rule=f"with --ampipe-memory {self.pipeline.memory}, tokens would have to be chosen once more",
                remedy=f"Use --ampipe-memory rebuild, or leave {CONDENSE_FLAG} out.",
            )

    @property
    def degree(self) -> int | str:
        """The value of ``--ampipe-degree`` for this configuration."""
        return AUTO if self.automatic else self.pipeline.degree

    @property
    def pipelined(self) -> bool:
        """Whether MoE layers are built as AMPipe's; Megatron's own otherwise."""
        return self.automatic or not self.pipeline.is_stock
