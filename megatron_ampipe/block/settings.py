"""What a user sets: one field for each ``--ampipe-*`` flag, which is also its row of the table of settings.

From a row follow the parser and ``--help``, the keys of files, the configuration with its defaults, the
checks of values, what a flag requires and where it has an effect, combinations that are refused, the row of
the start-up table, and the tables in docs/usage.md and docs/supported.md. A new flag is a row and its use.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from megatron_ampipe.block.named_values import (
    SHIPPED_GATES,
    SHIPPED_WIRES,
    check_threshold,
    check_wire,
    class_path,
    parse_size,
)
from megatron_ampipe.block.setting import AUTO, Exclusion, Setting

TRACED_ITERATIONS = 3
"""How many iterations, counted from the end of the run, a trace holds."""

_CHOSEN = "is what --ampipe-degree auto chooses"
_DIFFERS = "changes numbers, so degrees that are tried in training would differ in them"
_NO_SCOPE = "nothing: there is nothing that a scope would change"


def _row(default: Any = None, **columns: Any) -> Any:
    """A field of :class:`Settings` with the columns of its :class:`Setting`."""
    return field(default=default, metadata=columns)


def _degree(text: str) -> int | str:
    if text == AUTO:
        return text
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"is neither a whole number nor {AUTO}: {text!r}") from None


def has_capacity(arguments: Any) -> bool:
    """Whether experts have a capacity limit; Megatron treats a negative factor as none."""
    factor = getattr(arguments, "moe_expert_capacity_factor", None)
    return factor is not None and factor >= 0


def balances_with_sinkhorn(arguments: Any) -> bool:
    """Whether Megatron's routing compares tokens with each other."""
    chosen = getattr(arguments, "moe_router_load_balancing_type", None)
    return "sinkhorn" in (chosen if isinstance(chosen, list) else [chosen])


def _sends_rows(arguments: Any) -> bool:
    """Whether the dispatcher sends each row to the ranks that need it, in a collective of AMPipe's."""
    return getattr(arguments, "moe_token_dispatcher_type", "alltoall") == "alltoall"


def _is_recomputed(memory: str, arguments: Any) -> bool:
    granularity = getattr(arguments, "recompute_granularity", None)
    modules = getattr(arguments, "recompute_modules", None) or []
    return memory != "keep" and (granularity == "full" or (granularity == "selective" and "moe" in modules))


def _cannot_be_cast(wire: str, arguments: Any) -> bool:
    of_16_bit = getattr(arguments, "bf16", False) or getattr(arguments, "fp16", False)
    return not _sends_rows(arguments) or (wire == "bf16" and of_16_bit)


def _cannot_be_condensed(_: float, arguments: Any) -> bool:
    apart = ("moe_apply_probs_on_input", "sft", "reset_attention_mask", "dataloader_inter_document_masking")
    return not _sends_rows(arguments) or any(getattr(arguments, name, False) for name in apart)


def _router_row(config: Any) -> tuple[str, ...]:
    path = class_path(config.router)
    return "router", path.rpartition(":")[2], f"{path}, in place of Megatron's; 'ampipe gate' checks it"


def _router_scope_row(config: Any) -> tuple[str, ...]:
    name = "Sinkhorn" if config.router is None else class_path(config.router).rpartition(":")[2]
    return "warning", (
        f"--ampipe-router-scope chunk: {name} compares the tokens of a chunk, which is another function for "
        "each degree, and later tokens of a chunk influence earlier ones"
    )


def _wire_row(config: Any) -> tuple[str, ...]:
    reasons = {
        "bf16": "rows and their gradients travel in bf16",
        "fp8": "rows and their gradients travel in fp8 (e4m3) with a scale per row",
    }
    reason = reasons.get(config.wire, "rows and their gradients go through this class")
    if config.pipeline.exchange.has_two_hops:
        reason += ", between nodes alone"
    return "wire", config.wire, f"{reason}; numbers are rounded, so losses differ from a stock run's"


def _condense_row(config: Any) -> tuple[str, ...]:
    reason = (
        "another function than a stock run's: of the tokens of a sequence and chunk that go to one expert, "
        "one whose cosine with an earlier one is at least this takes its result; the log says how many do"
    )
    return "condensed tokens", f"{config.condense:g}", reason


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The values of all flags, as the user gives them or by default."""

    degree: int | str | None = _row(
        metavar="N",
        shown_default="1",
        help="number of chunks of the sequence; 1 builds Megatron's own layers, 4 is a good first choice, "
        "`auto` [tries several](tuning.md) in the first iterations and keeps the fastest",
        type=_degree,
        of_plan=True,
    )
    backward_degree: int | None = _row(
        metavar="N",
        shown_default="as forward",
        help="number of chunks of the backward pass; one of the two degrees divides the other",
        type=int,
        acts="chunks",
        with_auto=_CHOSEN,
        of_plan=True,
    )
    chunks: str | None = _row(
        metavar="SHARE,SHARE",
        shown_default="equal",
        help="share of the sequence of each chunk, such as `0.4,0.3,0.3`; implies the degree",
        acts="chunks",
        with_auto=_CHOSEN,
        of_plan=True,
    )
    cluster: str | None = _row(
        metavar="FILE",
        shown_default="none",
        help="figures of `ampipe profile`, a file or the name of an included one: `--ampipe-degree auto` "
        "plans instead of trying, and `--ampipe-memory auto` compares by them",
        of_plan=True,
        requires=("--ampipe-degree auto", "--ampipe-memory-budget 60GiB"),
    )
    plan: str | None = _row(
        metavar="FILE",
        shown_default="none",
        help="run the plan that `ampipe plan --output` wrote: degrees, chunks, order of stages",
    )
    save_plan: str | None = _row(
        metavar="FILE",
        shown_default="none",
        help="write what `--ampipe-degree auto` chooses as a plan; a restart of the same command line runs "
        "it",
        requires=("--ampipe-degree auto",),
        startup=lambda config: (
            "plan",
            f"the choice is written to {config.save_plan}; a restart reads it there",
        ),
    )
    schedule: str = _row(
        "ampipe",
        metavar="NAME",
        help="order of the stages: `ampipe` overlaps communication with attention and experts, `moe-only` "
        "with experts, [`lancet`](weights.md) also with weight gradients, at degree 1 too; "
        "[`joined`](weights.md#all-chunks-at-once) computes those of all chunks at once; `sequential` "
        "overlaps nothing. `lancet` and `joined` need `--transformer-impl local`",
        choices=("ampipe", "moe-only", "lancet", "joined", "sequential"),
        acts="chunks",
        of_plan=True,
    )
    stack: str = _row(
        "all",
        metavar="N",
        help="consecutive layers that [share a schedule](#several-layers-in-one-schedule): `all` of a "
        "pipeline stage, or a number; 1: layer by layer. Changes no result",
        acts="chunks",
        of_plan=True,
    )
    memory: str = _row(
        "keep",
        metavar="STRATEGY",
        help="[what experts save for their backward pass](memory.md): `keep` everything; `rebuild`, "
        "`redispatch` or `offload` the rest; `S1` to `S4` of MPipeMoE; one for each chunk (`keep/rebuild`); "
        "`auto`, the fastest that fits `--ampipe-memory-budget`. Changes no bit of any result",
        acts="layers",
        of_plan=True,
        requires=("--ampipe-memory-budget 60GiB",),
        requires_for=AUTO,
        excludes=Exclusion(
            _is_recomputed,
            "--recompute-granularity full and --recompute-modules moe keep less of the experts than this",
            "Leave it out, or recompute other modules: --recompute-granularity selective --recompute-modules "
            "core_attn.",
            "nothing: there is nothing left to save",
        ),
    )
    memory_budget: str | None = _row(
        metavar="SIZE",
        shown_default="none",
        help="for `--ampipe-memory auto`: memory for the activations of the layers of a pipeline stage, "
        "such as `60GiB`",
        check=parse_size,
        acts="layers",
        of_plan=True,
        requires=("--ampipe-memory auto",),
    )
    exchange: str = _row(
        "rows",
        metavar="KIND",
        help="how the all-to-all groups copies of a token: `rows` per expert, as Megatron; "
        "[`ranks`](exchange.md) per rank, at degree 1 too; [`nodes`](nodes.md) per node; "
        "[`2dh`](nodes.md#every-copy-in-two-hops) as `rows`, in two hops; `auto` leaves it to "
        "`--ampipe-degree auto`",
        choices=("rows", "ranks", "nodes", "2dh", AUTO),
        of_plan=True,
        requires=("--ampipe-degree auto",),
        requires_for=AUTO,
    )
    ranks_per_node: int | None = _row(
        metavar="N",
        shown_default="torchrun's",
        help="consecutive ranks that share [faster links](nodes.md), for the exchanges `nodes` and `2dh` "
        "and for tensor-parallel experts and attention",
        type=int,
        minimum=1,
    )
    grad_reduce: str = _row(
        "stock",
        metavar="WHEN",
        help="when reductions of `--overlap-grad-reduce` start: `stock` when a bucket is complete, `placed` "
        "[between all-to-alls](reductions.md). Changes no bit of any gradient",
        choices=("stock", "placed"),
        acts="layers",
        excludes=Exclusion(
            lambda value, args: value == "placed" and not getattr(args, "overlap_grad_reduce", False),
            "has no effect without --overlap-grad-reduce: gradients are then reduced after all backward "
            "passes",
            "Add --overlap-grad-reduce, or leave it out.",
            "nothing: there is nothing left to place",
        ),
        startup=lambda config: (
            "gradient reduction",
            config.grad_reduce,
            "after the last all-to-all of the next layer's backward pass",
        ),
    )
    capacity_scope: str = _row(
        "sequence",
        metavar="SCOPE",
        help="tokens over which an expert's capacity counts: `sequence` drops the tokens that Megatron "
        "drops; `chunk` gives each chunk its share, which is another function",
        choices=("sequence", "chunk"),
        acts="layers",
        excludes=Exclusion(
            lambda value, args: value == "chunk" and not has_capacity(args),
            "has no effect without an expert capacity",
            "Add --moe-expert-capacity-factor, or leave it out.",
            _NO_SCOPE,
        ),
    )
    router: str | None = _row(
        metavar="NAME",
        shown_default="Megatron's",
        help="[router](gates.md) of every MoE layer, at degree 1 too: "
        f"{', '.join(f'`{name}`' for name in SHIPPED_GATES)}, or a subclass of Megatron's `TopKRouter` as "
        "`package.module:Class`, which `ampipe gate` checks",
        check=class_path,
        startup=_router_row,
    )
    router_scope: str = _row(
        "sequence",
        metavar="SCOPE",
        help="for a [router that compares tokens](gates.md#routers-that-compare-tokens): `chunk` compares "
        "those of a chunk, which is another function; `sequence` refuses it, except Megatron's sinkhorn, "
        "which runs after all attention",
        choices=("sequence", "chunk"),
        acts="layers",
        excludes=Exclusion(
            # Of a user's class, only the class can tell.
            lambda value, args: (
                value == "chunk"
                and getattr(args, "ampipe_router", None) is None
                and not balances_with_sinkhorn(args)
            ),
            "has no effect: of Megatron's own routing, only sinkhorn can balance each chunk",
            "Leave it out, or choose a router that compares tokens, such as --ampipe-router expert-choice.",
            _NO_SCOPE,
        ),
        startup=_router_scope_row,
    )
    wire: str | None = _row(
        metavar="NAME",
        shown_default="none",
        help="what rows of tokens and their gradients become [while they travel](wire.md): "
        f"{', '.join(f'`{name}`' for name in SHIPPED_WIRES)}, or `package.module:Class`. Fewer bytes, "
        "rounded numbers",
        check=check_wire,
        acts="layers",
        with_auto=_DIFFERS,
        excludes=Exclusion(
            _cannot_be_cast,
            "it needs the dispatcher alltoall, which alone sends rows as they are; and bf16 needs rows of 32 "
            "bit",
            "Use --moe-token-dispatcher-type alltoall; with --bf16 or --fp16 also --ampipe-wire fp8.",
            "an encoding of the rows of the other dispatchers, whose libraries send them",
        ),
        startup=_wire_row,
    )
    condense: float | None = _row(
        metavar="THRESHOLD",
        shown_default="off",
        help="[similar tokens go to an expert once](wire.md#condensed-tokens), from this cosine on, such as "
        "0.9: another function",
        type=float,
        check=check_threshold,
        acts="layers",
        with_auto=_DIFFERS,
        excludes=Exclusion(
            _cannot_be_condensed,
            "it needs the dispatcher alltoall, sequences of one document, and experts whose results are "
            "weighted, not their inputs",
            "Use --moe-token-dispatcher-type alltoall without --moe-apply-probs-on-input, --sft, "
            "--reset-attention-mask and --dataloader-inter-document-masking, or leave it out.",
            "a comparison of tokens that knows where documents begin, and the rows of other dispatchers",
        ),
        startup=_condense_row,
    )
    trace_dir: str | None = _row(
        metavar="DIR",
        shown_default="off",
        help=f"record when every stage of the last {TRACED_ITERATIONS} iterations ran, one Chrome/Perfetto "
        "trace per rank; `ampipe draw DIR` makes a picture of it",
        acts="layers",
        excludes=Exclusion(
            lambda _, args: bool(getattr(args, "skip_train", False)),
            "has no effect with --skip-train: only training iterations are recorded",
            "Leave it out.",
            "a trace of evaluations",
        ),
        startup=lambda config: ("trace", config.trace_dir),
        is_folder=True,
    )
    routing_dir: str | None = _row(
        metavar="DIR",
        shown_default="off",
        help="record [how tokens are routed](routing.md), at any degree, for `ampipe routing` and `ampipe "
        "plan --routing`",
        startup=lambda config: (
            "routing",
            config.routing_dir,
            f"who goes where, in one of {config.routing_interval} iterations; 'ampipe routing' shows it",
        ),
        is_folder=True,
    )
    routing_interval: int = _row(
        100,
        metavar="N",
        help="record one of N iterations in `--ampipe-routing-dir`",
        type=int,
        minimum=1,
        requires=("--ampipe-routing-dir routing",),
    )

    def startup_rows(self, *, stock: bool) -> list[tuple[str, ...]]:
        """Rows of the start-up table for the settings that are not the default.

        Args:
            stock: The layers are Megatron's own, and most settings have no effect.
        """
        return [
            setting.startup(self)
            for setting in SETTING.values()
            if setting.startup is not None
            and getattr(self, setting.name) != setting.default
            and (setting.acts == "always" or not stock)
        ]


SETTING: Mapping[str, Setting] = {
    one.name: Setting(name=one.name, default=one.default, **one.metadata)
    for one in dataclasses.fields(Settings)
}
"""The table, by name."""


def given_settings(arguments: Any) -> dict[str, Any]:
    """What the user sets, by name; parsed arguments hold None for the rest."""
    found = {name: getattr(arguments, setting.dest, None) for name, setting in SETTING.items()}
    return {name: value for name, value in found.items() if value is not None}


def settings_of(arguments: Any) -> Settings:
    """The settings of parsed arguments."""
    return Settings(**given_settings(arguments))


def check_given(given: dict[str, Any]) -> None:
    """Refuse wrong values, and settings that cannot be given together, whatever they resolve to.

    Raises:
        BadInput: the first of them.
    """
    for name, value in given.items():
        SETTING[name].check_value(value)
    plan = given.get("plan")
    for name, value in given.items():
        setting = SETTING[name]
        if plan is not None and setting.of_plan:
            remedy = f"Leave {setting.flag} or --ampipe-plan out."
            raise setting.refuse(value, f"is what the plan {plan} says", remedy)
        if setting.with_auto is not None and given.get("degree") == AUTO:
            remedy = f"Leave {setting.flag} out, or name the degree: --ampipe-degree 4."
            raise setting.refuse(value, setting.with_auto, remedy)
    for name in given:
        SETTING[name].check_required(given)
