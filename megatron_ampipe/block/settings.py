"""The settings of a user: one field for each ``--ampipe-*`` flag, with all that is known about the flag.

Such a row (:class:`Setting`) defines the argument of the parser, the key in files, the checks of the value,
the row of the start-up table and the row in docs/usage.md. To add a flag, add a row and use its value. Class
names and sizes are parsed here too.
"""

from __future__ import annotations

import argparse
import dataclasses
import pkgutil
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, get_args

from megatron_ampipe.errors import BadInput, did_you_mean

AUTO = "auto"
"""The value that leaves a choice to AMPipe."""


ROUTER_FLAG, WIRE_FLAG, SCHEDULE_FLAG = "--ampipe-router", "--ampipe-wire", "--ampipe-schedule"

SHIPPED_GATES = {
    "noisy-topk": "megatron_ampipe.layers.gates:NoisyTopKRouter",
    "cosine": "megatron_ampipe.layers.gates:CosineRouter",
    "sigmoid": "megatron_ampipe.layers.gates:SigmoidRouter",
    "expert-choice": "megatron_ampipe.layers.gates:ExpertChoiceRouter",
    "hash": "megatron_ampipe.layers.gates:HashRouter",
}
"""The routers of AMPipe by the name that users give. Their papers are in docs/gates.md."""

ExchangeName = Literal["rows", "ranks", "nodes", "2dh"]
"""How the all-to-all groups copies of a token; ``schedule.Exchange`` says what each means."""
SHIPPED_WIRES = {
    "bf16": "megatron_ampipe.exchange.codecs:Bf16Wire",
    "fp8": "megatron_ampipe.exchange.codecs:Fp8Wire",
}
"""The wires of AMPipe (formats in which rows are sent) by the name that users give."""

SHIPPED_SCHEDULES = ("ampipe", "moe-only", "lancet", "joined", "sequential")
"""The schedules of AMPipe by the name that users give."""

_PATH = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*")
_ITERATIONS = re.compile(r"([0-9]{1,9})-([0-9]{1,9})", re.ASCII)
MOST_MEASURED = 100
"""The most iterations of ``--ampipe-measure``: their stages are kept in memory."""
_UNITS = {"MiB": 2**20, "GiB": 2**30}
_SIZE = re.compile(r"([0-9]{1,9}(?:\.[0-9]{1,6})?)(MiB|GiB)", re.ASCII)


def class_path(name: str, shipped: Mapping[str, str], *, flag: str) -> str:
    """``package.module:Class``, given as such or as a name in ``shipped``; :class:`BadInput` otherwise."""
    if name not in shipped and _PATH.fullmatch(name) is None:
        rule = f"is neither package.module:Class nor one of {', '.join(shipped)}"
        remedy = f"Use for example {flag} {min(shipped)} or {flag} my_package.my_module:MyClass."
        raise BadInput(flag, name or "(empty)", rule=rule, remedy=did_you_mean(name, shipped) or remedy)
    return shipped.get(name, name)


def import_class(
    name: str, shipped: Mapping[str, str], *, flag: str, fits: Callable[[type], bool], rule: str, remedy: str
) -> type:
    """Import the class of :func:`class_path`; raises :class:`BadInput` if that fails.

    A class for which ``fits`` is False is refused with ``rule`` and ``remedy``.
    """
    value = _imported(class_path(name, shipped, flag=flag), name, flag=flag)
    if not (isinstance(value, type) and fits(value)):
        raise BadInput(flag, name, rule=rule, remedy=remedy)
    return value


def _imported(path: str, name: str, *, flag: str) -> object:
    """The object of ``package.module:name``, which the user calls ``name``."""
    try:
        return pkgutil.resolve_name(path)
    except Exception as error:
        rule = f"cannot be imported: {type(error).__name__}: {error}".rstrip(".")
        remedy = "Check the name, and that its folder is in PYTHONPATH on every rank."
        raise BadInput(flag, name, rule=rule, remedy=remedy) from error


def check_schedule(name: str, *, flag: str = SCHEDULE_FLAG) -> None:
    """Raise :class:`BadInput` for a wrong value of ``--ampipe-schedule``, or of another flag like it."""
    if name not in SHIPPED_SCHEDULES and _PATH.fullmatch(name) is None:
        rule = f"is neither package.module:function nor one of {', '.join(SHIPPED_SCHEDULES)}"
        example = f"Use {flag} ampipe or {flag} my_package.my_module:my_order."
        remedy = did_you_mean(name, SHIPPED_SCHEDULES) or example
        raise BadInput(flag, name or "(empty)", rule=rule, remedy=remedy)


def import_schedule(name: str) -> Callable[..., object]:
    """Import the function that ``--ampipe-schedule`` names; raises :class:`BadInput` if that fails."""
    check_schedule(name)
    function = _imported(name, name, flag=SCHEDULE_FLAG)
    if not callable(function) or isinstance(function, type):
        remedy = "Name a function of a degree and the features of a block; see docs/schedules.md."
        raise BadInput(SCHEDULE_FLAG, name, rule="is no function", remedy=remedy)
    return function


def check_threshold(value: float) -> None:
    """Raise :class:`BadInput` for a wrong value of ``--ampipe-condense``, the cosine of similar tokens."""
    # Written so that NaN is refused.
    if not 0 < value <= 1:
        rule = "is not a cosine above 0 and at most 1, from which on two tokens are similar"
        remedy = "Use for example --ampipe-condense 0.9, or leave it out."
        raise BadInput("--ampipe-condense", f"{value:g}", rule=rule, remedy=remedy)


def check_margin(value: float, flag: str = "--ampipe-rows-margin") -> None:
    """Raise :class:`BadInput` for a wrong value of ``--ampipe-rows-margin``, or of a flag that means it."""
    # Written so that NaN is refused.
    if not 1 <= value <= 100:
        rule = "is not a factor from 1 to 100 of the largest counts"
        remedy = f"Use for example {flag} 1.5, or leave it out."
        raise BadInput(flag, f"{value:g}", rule=rule, remedy=remedy)


def parse_iterations(text: str) -> tuple[int, int]:
    """Parse the first and the last iteration of ``41-50``; :class:`BadInput` for another text."""
    parts = _ITERATIONS.fullmatch(text)
    first, last = (0, 0) if parts is None else (int(parts[1]), int(parts[2]))
    if not 1 <= first <= last or last - first >= MOST_MEASURED:
        flag = "--ampipe-measure"
        rule = f"is not FIRST-LAST, at most {MOST_MEASURED} iterations counted from 1"
        raise BadInput(flag, text or "(empty)", rule=rule, remedy=f"Use for example {flag} 41-50.")
    return first, last


def parse_size(text: str) -> int:
    """Parse a size such as ``60GiB`` to bytes; :class:`BadInput` for 0 or another text."""
    parts = _SIZE.fullmatch(text)
    size_bytes = 0 if parts is None else int(float(parts[1]) * _UNITS[parts[2]])
    if not size_bytes:
        flag = "--ampipe-memory-budget"
        remedy = f"Use for example {flag} 60GiB."
        raise BadInput(flag, text, rule="is not a size above 0 in MiB or GiB", remedy=remedy)
    return size_bytes


def size_to_text(size_bytes: float) -> str:
    """The text that :func:`parse_size` parses, rounded up to two digits."""
    unit = "GiB" if size_bytes >= 2**30 else "MiB"
    hundredths = -int(-size_bytes * 100 // _UNITS[unit])
    return f"{hundredths / 100:.2f}{unit}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """One ``--ampipe-*`` flag."""

    name: str
    """The field of ``Settings``: ``memory_budget`` is ``--ampipe-memory-budget``, and the key
    ``memory-budget`` in a section ``ampipe:`` of a file."""
    default: object
    help: str
    """The effect of the flag, in Markdown for docs/usage.md; ``--help`` prints it as plain text."""
    shown_default: str = "none"
    """The text for a default of None in both; ``metavar`` is the name of the value in both."""
    metavar: str = "N"
    type: Callable[[str], object] = str
    choices: tuple[str, ...] | None = None
    minimum: int | None = None
    check: Callable[[Any], object] | None = None
    """Raises :class:`BadInput` for a value of the wrong form."""
    acts: Literal["always", "layers", "chunks"] = "always"
    """When it has an effect: always, in AMPipe's layers, or only with several chunks."""
    with_auto: str | None = None
    """Why it cannot be combined with ``--ampipe-degree auto``; None if it can."""
    of_chunks: object = None
    """The value with which results depend on the chunks; ``...`` for every value. Such a value cannot be
    combined with ``--ampipe-partner``, where passes have different chunks."""
    in_plan: bool = False
    """Whether a plan file contains it, so that it cannot be combined with a plan."""
    requires: tuple[str, ...] = ()
    """At least one of these settings must be given too, written as the user would add them. A value
    ``auto`` is required; other values are examples."""
    requires_for: object = None
    """The value that has these requirements; None for every value."""
    says: str | None = None
    """The explanation in the start-up table if the value is not the default; None for no row."""

    @property
    def key(self) -> str:
        """The name in a file."""
        return self.name.replace("_", "-")

    @property
    def flag(self) -> str:
        """The name on a command line."""
        return f"--ampipe-{self.key}"

    @property
    def plain_help(self) -> str:
        """The text of ``--help``."""
        text = re.sub(r"\[([^]]+)\]\([^)]+\)", r"\1", self.help).replace("`", "")
        default = self.shown_default if self.default in (None, False) else self.default
        return f"{text} (default: {default})"

    def refuse(self, value: object, rule: str, remedy: str) -> BadInput:
        """The error for a wrong value of the flag."""
        return BadInput(self.flag, value, rule=rule, remedy=remedy)

    def check_required(self, given: Mapping[str, object]) -> None:
        """Raise :class:`BadInput` if ``given``, the user's values by name, has none of :attr:`requires`."""
        if self.requires_for not in (None, given[self.name]):
            return
        wanted = []
        for words in self.requires:
            flag, _, example = words.partition(" ")
            value = given.get(flag.removeprefix("--ampipe-").replace("-", "_"))
            if value == AUTO or (example != AUTO and value is not None):
                return
            wanted.append(words if example == AUTO else flag)
        if wanted:
            remedy = f"Add {self.requires[0]}, or leave {self.flag} out."
            raise self.refuse(given[self.name], f"requires {' or '.join(wanted)}", remedy)


PARTNER_ORDERS = ("listed", "megatron-1f1b")
"""Joint orders of two micro-batches: by list scheduling, or as Megatron's."""
TRACED_ITERATIONS = 3
"""Number of iterations in a trace: the last ones of the run."""

_CHOSEN = "is what --ampipe-degree auto chooses"
_DIFFERS = "changes numbers, so degrees that are tried in training would differ in them"


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The values of all flags, as the user gives them or by default."""

    degree: int | str | None = _row(
        shown_default="1",
        help="number of chunks of the sequence; 1 alone builds Megatron's own layers, 2 is a "
        "[good first choice](tuning.md#by-hand), `auto` [tries several](tuning.md#by-trying) in the first "
        "iterations and keeps the fastest",
        type=_degree,
        in_plan=True,
    )
    backward_degree: int | None = _row(
        shown_default="as forward",
        help="number of chunks of the backward pass; one of the two degrees divides the other",
        type=int,
        acts="chunks",
        with_auto=_CHOSEN,
        in_plan=True,
    )
    chunks: str | None = _row(
        metavar="SHARE,SHARE",
        shown_default="equal",
        help="share of the sequence of each chunk, such as `0.4,0.3,0.3`; implies the degree",
        acts="chunks",
        with_auto=_CHOSEN,
        in_plan=True,
    )
    cluster: str | None = _row(
        metavar="FILE",
        help="figures of `ampipe profile`, a file or the name of an included one: `--ampipe-degree auto` "
        "plans instead of trying, and `--ampipe-memory auto` compares by them",
        in_plan=True,
        requires=("--ampipe-degree auto", "--ampipe-memory-budget 60GiB"),
    )
    plan: str | None = _row(
        metavar="FILE",
        help="run the plan that `ampipe plan --output` wrote: degrees, chunks, order of stages",
    )
    save_plan: str | None = _row(
        metavar="FILE",
        help="write what `--ampipe-degree auto` chooses as a plan; a restart of the same command line runs "
        "it",
        requires=("--ampipe-degree auto",),
        says="the choice is written there; a restart reads it",
    )
    schedule: str = _row(
        "ampipe",
        metavar="NAME",
        help="order of the stages: `ampipe` overlaps communication with attention and experts, `moe-only` "
        "with experts, [`lancet`](weights.md) also with weight gradients, at degree 1 too; "
        "[`joined`](weights.md#all-chunks-at-once) computes those of all chunks at once; `sequential` "
        "overlaps nothing; or [a custom order](schedules.md), a function `package.module:function`",
        check=check_schedule,
        acts="chunks",
        in_plan=True,
    )
    partner: bool = _row(
        False,
        shown_default="off",
        help="run the backward pass of a micro-batch and the forward pass of the next one "
        "[together](partners.md), at degree 1 too: neither is cut into chunks, the rest is",
        type=bool,
        in_plan=True,
    )
    partner_degree: int = _row(
        1,
        help="number of chunks of passes with a partner; more than 1 where transfers take longer than "
        "computation",
        type=int,
        minimum=1,
        in_plan=True,
        requires=("--ampipe-partner",),
    )
    partner_order: str | None = _row(
        shown_default="megatron-1f1b, or listed where these passes are cut",
        help="how both passes share the lanes, where no plan says it: `megatron-1f1b`, a layer forward and a "
        "layer backward in turns as with Megatron's `--overlap-moe-expert-parallel-comm`, or `listed`, list "
        "scheduling by typical times",
        choices=PARTNER_ORDERS,
        in_plan=True,
        requires=("--ampipe-partner",),
    )
    stack: str = _row(
        "all",
        help="consecutive layers that [share a schedule](#several-layers-in-one-schedule): `all` of a "
        "pipeline stage, or a number; 1: layer by layer. Changes no result",
        acts="chunks",
        in_plan=True,
    )
    memory: str = _row(
        "keep",
        metavar="STRATEGY",
        help="[what experts save for their backward pass](memory.md): `keep` everything; `rebuild`, "
        "`redispatch` or `offload` the rest; `S1` to `S4` of MPipeMoE; one for each chunk (`keep/rebuild`); "
        "`auto`, the fastest that fits `--ampipe-memory-budget`. `offload` and `S1` to `S3` need "
        "[pinned host memory](memory.md#copies-to-host-memory). Changes no bit of any result",
        acts="layers",
        in_plan=True,
        requires=("--ampipe-memory-budget 60GiB",),
        requires_for=AUTO,
    )
    memory_budget: str | None = _row(
        metavar="SIZE",
        help="for `--ampipe-memory auto`: memory for the activations of the layers of a pipeline stage, "
        "such as `60GiB`",
        check=parse_size,
        acts="layers",
        in_plan=True,
        requires=("--ampipe-memory auto",),
    )
    exchange: str = _row(
        "rows",
        metavar="KIND",
        help="how the all-to-all groups copies of a token: `rows` per expert, as Megatron; "
        "[`ranks`](exchange.md) per rank, at degree 1 too; "
        "[`nodes`](exchange.md#two-classes-of-links) per node; "
        "[`2dh`](exchange.md#every-copy-in-two-hops) as `rows`, in two hops; `auto` leaves it to "
        "`--ampipe-degree auto`",
        choices=(*get_args(ExchangeName), AUTO),
        in_plan=True,
        requires=("--ampipe-degree auto",),
        requires_for=AUTO,
    )
    rows: str = _row(
        "exact",
        metavar="KIND",
        help="how many rows a chunk sends to each rank: `exact`, as routed, which the host waits for; "
        "[`fixed`](exchange.md#fixed-rows), a budget learned from the last iterations, with counts on the "
        "device; a step that exceeds one is repeated with exact rows. With `--cuda-graph-impl local`, "
        "[whole passes](gpu.md#whole-passes) are CUDA graphs, or stages [in their "
        "place](gpu.md#in-place-of-whole-passes)",
        choices=("exact", "fixed"),
        acts="layers",
        says="numbers of rows stay on the device; the log says if a step was repeated",
    )
    rows_margin: float = _row(
        1.25,
        metavar="FACTOR",
        help="budget of `--ampipe-rows fixed`, relative to the largest counts of the last iterations",
        type=float,
        check=check_margin,
        acts="layers",
    )
    ranks_per_node: int | None = _row(
        shown_default="torchrun's",
        help="consecutive ranks that share [faster links](exchange.md#two-classes-of-links), for the "
        "exchanges `nodes` and `2dh` and for tensor-parallel experts and attention",
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
        says="after the last all-to-all of the next layer's backward pass",
    )
    capacity_scope: str = _row(
        "sequence",
        metavar="SCOPE",
        help="tokens over which an expert's capacity counts: `sequence` drops the tokens that Megatron "
        "drops; `chunk` gives each chunk its share, which is another function",
        choices=("sequence", "chunk"),
        of_chunks="chunk",
        acts="layers",
    )
    router: str | None = _row(
        metavar="NAME",
        shown_default="Megatron's",
        help="[router](gates.md) of every MoE layer, at degree 1 too: "
        f"{', '.join(f'`{name}`' for name in SHIPPED_GATES)}, or a subclass of Megatron's `TopKRouter` as "
        "`package.module:Class`, which `ampipe gate` checks",
        check=partial(class_path, shipped=SHIPPED_GATES, flag=ROUTER_FLAG),
        says="'ampipe gate' checks it",
    )
    router_scope: str = _row(
        "sequence",
        metavar="SCOPE",
        help="for a [router that compares tokens](gates.md#routers-that-compare-tokens): `chunk` compares "
        "those of a chunk, which is another function; `sequence` refuses it, except Megatron's sinkhorn, "
        "which runs after all attention",
        choices=("sequence", "chunk"),
        of_chunks="chunk",
        acts="layers",
        says="another function for each degree: later tokens of a chunk influence earlier ones",
    )
    wire: str | None = _row(
        metavar="NAME",
        help="what rows of tokens and their gradients become [while they travel](wire.md): "
        f"{', '.join(f'`{name}`' for name in SHIPPED_WIRES)}, or `package.module:Class`. Fewer bytes, "
        "rounded numbers",
        check=partial(class_path, shipped=SHIPPED_WIRES, flag=WIRE_FLAG),
        acts="layers",
        with_auto=_DIFFERS,
        says="rows and their gradients are cast, so losses differ from a stock run's",
    )
    condense: float | None = _row(
        metavar="THRESHOLD",
        shown_default="off",
        help="[similar tokens go to an expert once](wire.md#condensed-tokens), from this cosine on, such as "
        "0.9: another function",
        type=float,
        check=check_threshold,
        of_chunks=...,
        acts="layers",
        with_auto=_DIFFERS,
        says="another function than a stock run's; the log says how many tokens are not sent",
    )
    measure: str | None = _row(
        metavar="FIRST-LAST",
        shown_default="off",
        help="after the last of these iterations, such as `41-50`, log their "
        "[communication and its share under computation](metrics.md#over-several-iterations); "
        "`--ampipe-trace-dir` then records them",
        check=parse_iterations,
        acts="layers",
        says="then the log says how long they communicate, and how much of it is under computation",
    )
    trace_dir: str | None = _row(
        metavar="DIR",
        shown_default="off",
        help=f"record when every stage of the last {TRACED_ITERATIONS} iterations, or those of "
        "`--ampipe-measure`, ran, one Chrome/Perfetto "
        "trace per rank; `ampipe draw DIR` makes a picture of it",
        acts="layers",
        says="'ampipe draw' makes a picture of it",
    )
    routing_dir: str | None = _row(
        metavar="DIR",
        shown_default="off",
        help="record [how tokens are routed](routing.md), at any degree, for `ampipe routing` and `ampipe "
        "plan --routing`",
        says="how tokens are routed; 'ampipe routing' shows it",
    )
    routing_interval: int = _row(
        100,
        help="record one of N iterations in `--ampipe-routing-dir`",
        type=int,
        minimum=1,
        requires=("--ampipe-routing-dir routing",),
    )

    @property
    def automatic(self) -> bool:
        """Whether a planner or the first iterations choose the pipeline."""
        return self.degree == AUTO

    @property
    def chooses_exchange(self) -> bool:
        """Whether they also choose the exchange."""
        return self.exchange == AUTO

    def startup_rows(self, *, stock: bool) -> list[tuple[str, ...]]:
        """Rows of the start-up table for all values that differ from the default and have an effect."""
        return [
            (setting.key, str(value), setting.says)
            for setting in SETTING.values()
            if setting.says and (setting.acts == "always" or not stock)
            if (value := getattr(self, setting.name)) != setting.default
        ]


SETTING: Mapping[str, Setting] = {
    row.name: Setting(name=row.name, default=row.default, **row.metadata)
    for row in dataclasses.fields(Settings)
}
"""The rows of the table, by name."""


Given = dict[str, Any]
"""The values that a user gives, by the name of their setting."""


def given_settings(arguments: object) -> Given:
    """The values of parsed arguments that the user gives; all others are None there."""
    values = {name: getattr(arguments, f"ampipe_{name}", None) for name in SETTING}
    return {name: value for name, value in values.items() if value is not None}


def settings_of(arguments: object) -> Settings:
    """The settings of parsed arguments."""
    return Settings(**given_settings(arguments))


def check_given(given: Given) -> None:
    """Raise :class:`BadInput` for the first wrong value, or settings that cannot be given together."""
    for name, value in given.items():
        setting = SETTING[name]
        if value == "":
            raise setting.refuse("(empty)", "is empty", "Give a value, or leave it out.")
        if setting.minimum is not None and value < setting.minimum:
            remedy = f"Use {setting.minimum} or more, or leave it out."
            raise setting.refuse(value, f"must be at least {setting.minimum}", remedy)
        if setting.check is not None:
            setting.check(value)
    for name, value in given.items():
        setting = SETTING[name]
        if "plan" in given and setting.in_plan:
            remedy = f"Leave {setting.flag} or --ampipe-plan out."
            raise setting.refuse(value, f"the plan {given['plan']} already sets this", remedy)
        if setting.with_auto is not None and given.get("degree") == AUTO:
            remedy = f"Leave {setting.flag} out, or name the degree: --ampipe-degree 2."
            raise setting.refuse(value, setting.with_auto, remedy)
        if given.get("partner") and setting.of_chunks in (..., value):
            rule = "passes with a partner have other chunks, so it would be another function in them"
            raise setting.refuse(value, rule, f"Leave {setting.flag} or --ampipe-partner out.")
    for name in given:
        SETTING[name].check_required(given)
