"""What a block does not save between forward and backward, and how its backward pass gets that back.

One policy for each stage that can save less than everything it computes (:class:`SavedPolicy`). It is decided
here, before a schedule is compiled, from the memory strategy (``--ampipe-memory``, Megatron's offloading, or
what fits into ``--ampipe-memory-budget``) and from Megatron's recompute flags. ``schedule.kinds`` adds the
stages that it needs; ``runtime.saved_tensors`` executes it, stages on the tape what comes back through them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from megatron_ampipe.errors import BadInput


class Saved(StrEnum):
    """How the backward pass gets activations that the forward pass has computed."""

    KEEP = "keep"
    """They stay in device memory."""
    RECOMPUTE = "recompute"
    """They are dropped, and computed again."""
    HOST = "host"
    """They are copied to host memory, and back."""
    RESEND = "resend"
    """They are dropped, and other ranks send them again."""


class ExpertsSaved(NamedTuple):
    """The policy for the experts of one chunk. A tuple, because features are keys of many tables.

    In MPipeMoE, section III-D, received tokens are T_DI and inner tensors T_M.
    """

    tokens: Saved = Saved.KEEP
    """Received tokens."""
    inner: Saved = Saved.KEEP
    """Inner tensors: outputs of the first linear layer, and the activation."""

    @property
    def stores_tokens(self) -> bool:
        """Whether received tokens are copied to host memory by a separate stage.

        If inner tensors are copied as well, they include the sorted tokens.
        """
        return self.tokens is Saved.HOST and self.inner is not Saved.HOST

    @property
    def only_recomputes(self) -> bool:
        """Whether tokens stay on the device, and inner tensors are recomputed."""
        return self.tokens is Saved.KEEP and self.inner is Saved.RECOMPUTE


KEEP = "keep"
"""The strategy that saves everything and restores nothing."""

STRATEGIES: Mapping[str, ExpertsSaved] = {
    KEEP: ExpertsSaved(),
    "rebuild": ExpertsSaved(inner=Saved.RECOMPUTE),
    "redispatch": ExpertsSaved(tokens=Saved.RESEND, inner=Saved.RECOMPUTE),
    "offload": ExpertsSaved(tokens=Saved.HOST, inner=Saved.HOST),
    "S2": ExpertsSaved(tokens=Saved.RESEND, inner=Saved.HOST),
    "S3": ExpertsSaved(tokens=Saved.HOST, inner=Saved.RECOMPUTE),
}
"""The policy for each value of ``--ampipe-memory``.

``S2`` and ``S3`` are from the paper's table II. ``rebuild`` is not in it. Of the first three strategies, each
saves less than the one before.
"""
PAPER_NAMES: Mapping[str, str] = {"S1": "offload", "S4": "redispatch"}
"""Names in the same table for other strategies."""
COPYING = tuple(name for name, saved in STRATEGIES.items() if Saved.HOST in saved)
"""The strategies that copy to host memory."""


def chunk_strategies(memory: str) -> tuple[str, ...]:
    """The strategy of each chunk of the backward pass, first chunk first; or one strategy for all."""
    return tuple(PAPER_NAMES.get(name, name) for name in memory.split("/"))


def memory_to_text(names: Sequence[str]) -> str:
    """The text that :func:`chunk_strategies` parses; one name if all chunks have the same strategy."""
    return names[0] if len(set(names)) == 1 else "/".join(names)


def check_memory(memory: str, *, backward_degree: int | None = None, flag: str = "--ampipe-memory") -> None:
    """Raise :class:`BadInput` unless the text names strategies, one for all chunks or one for each.

    Their number is not checked if ``backward_degree`` is not known yet (None).
    """
    names = chunk_strategies(memory)
    for name in names:
        if name not in STRATEGIES:
            rule = f"is not one of {', '.join((*STRATEGIES, *PAPER_NAMES))}"
            remedy = f"Use {flag} rebuild, or leave it out to keep everything."
            raise BadInput(flag, name or "(empty)", rule=rule, remedy=remedy)
    if backward_degree is not None and len(names) not in (1, backward_degree):
        rule = f"names strategies of {len(names)} chunks, and the backward pass has {backward_degree}"
        example = "/".join([KEEP, *["rebuild"] * (backward_degree - 1)])
        remedy = f"Name one of all chunks, or one of each: {flag} {example}."
        raise BadInput(flag, memory, rule=rule, remedy=remedy)


class SavedPolicy(NamedTuple):
    """The policy for each stage of a block. A tuple, because features are keys of many tables."""

    block: Saved = Saved.KEEP
    """Everything between the input of the block and its output. ``RECOMPUTE``: its forward stages run again
    as stages of the backward program (``Stage.is_recompute``)."""
    input_norm: Saved = Saved.KEEP
    """``input-norm`` or ``qkv``: the output of the norm before attention."""
    gathered_rows: Saved = Saved.RESEND
    """``qkv``: the rows that ``gather-rows`` gets from other ranks. ``RESEND``: by ``regather-rows``."""
    core_attention: Saved = Saved.KEEP
    """``attention``: what core attention saves."""
    normed: Saved = Saved.KEEP
    """``attention`` or ``add-norm``: the output of the norm before the router and the experts, which
    ``choose``, ``route``, ``shared`` and ``mlp`` take."""
    activation: Saved = Saved.KEEP
    """``expert``: what the operations between its linear layers save; for chunks whose inner tensors stay."""
    stages: frozenset[str] = frozenset()
    """Names of the kinds of stages that save only their inputs, and run again right before their backward."""
    experts: tuple[ExpertsSaved, ...] = ()
    """``expert``, for each chunk of the backward pass, or one entry for all chunks; empty to keep all."""

    @property
    def recomputes_block(self) -> bool:
        """Whether the stages of the forward pass run again in the backward pass."""
        return self.block is Saved.RECOMPUTE

    @property
    def resends_rows(self) -> bool:
        """Whether gathered rows are gathered again by a separate stage; a recomputed block does so anyway."""
        return self.gathered_rows is Saved.RESEND and not self.recomputes_block

    def restores(self, *, tokens: Saved | None = None, inner: Saved | None = None) -> bool:
        """Whether the experts of any chunk have this policy for tokens and inner tensors (None: any)."""
        return any(tokens in (None, saved.tokens) and inner in (None, saved.inner) for saved in self.experts)

    def with_memory(self, memory: str) -> SavedPolicy:
        """The policy with a memory strategy, which has no effect if the whole block is recomputed."""
        if self.recomputes_block:
            return self
        experts = tuple(STRATEGIES[name] for name in chunk_strategies(memory))
        keeps_all = all(saved == ExpertsSaved() for saved in experts)
        return self._replace(experts=() if keeps_all else experts)

    def of_chunk(self, chunk: int, degree: int | None = None) -> SavedPolicy:
        """The policy for one chunk, in a pass of this degree (None: the backward degree).

        A forward chunk that covers several backward chunks has the policies of each of them.
        """
        count = len(self.experts)
        if count <= 1:
            return self
        degree = count if degree is None else degree
        first = chunk * count // degree
        end = -(-(chunk + 1) * count // degree)
        return self._replace(experts=self.experts[first:end])


SAVES_ALL = SavedPolicy()
"""Without any flag."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecomputeRequest:
    """What Megatron's recompute flags ask of one layer.

    Attributes:
        full: The current pass trains, and ``--recompute-granularity full``, as far as AMPipe has taken it
            over, includes the layer.
        modules: The values of ``--recompute-modules`` that the layer recomputes, without ``layernorm``.
        input_norm: ``layernorm`` applies to the norm before attention: it is not fused with a projection.
        pre_mlp_norm: Likewise to the norm before the router and the experts.
    """

    full: bool = False
    modules: frozenset[str] = frozenset()
    input_norm: bool = False
    pre_mlp_norm: bool = False


STAGES_OF_MODULES: Mapping[str, tuple[str, ...]] = {
    "mla_up_proj": ("qkv",),
    "moe": ("expert", "shared"),
    "shared_experts": ("shared",),
    "mlp": ("mlp",),
}
"""The values of ``--recompute-modules`` for which whole stages run again, with the names of their kinds."""


def decide(request: RecomputeRequest, *, memory: str = KEEP, uses_ring: bool = False) -> SavedPolicy:
    """The policy of a block.

    Args:
        request: What Megatron's flags ask for.
        memory: The memory strategy of the experts (``Pipeline.memory``).
        uses_ring: Whether attention runs in steps (``attend``), whose backward recomputes it anyway.
    """
    modules = request.modules
    stages = frozenset(stage for module in modules for stage in STAGES_OF_MODULES.get(module, ()))

    def recompute_if(condition: bool) -> Saved:
        return Saved.RECOMPUTE if condition else Saved.KEEP

    policy = SavedPolicy(
        block=recompute_if(request.full),
        input_norm=recompute_if(request.input_norm and "qkv" not in stages),
        core_attention=recompute_if("core_attn" in modules and not uses_ring),
        normed=recompute_if(request.pre_mlp_norm),
        activation=recompute_if("moe_act" in modules and "expert" not in stages),
        stages=stages,
    )
    return policy.with_memory(memory)
