"""``ampipe plan``: predicts a model's blocks on a cluster, and chooses how to run them.

Needs neither a GPU nor, except for ``--tape`` and ``--recipe``, torch. Shows what :mod:`megatron_ampipe.plan`
predicts; decides nothing itself.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

from rich.console import Console

from megatron_ampipe.block.settings import AUTO, check_schedule
from megatron_ampipe.errors import BadInput
from megatron_ampipe.files import outputs
from megatron_ampipe.files.inputs import adder, at_least, several, value_of
from megatron_ampipe.files.outputs import Report
from megatron_ampipe.files.timeline import PREDICTED
from megatron_ampipe.plan.cluster import Cluster, find_cluster, read_cluster
from megatron_ampipe.plan.host_times import HostRow, by_host_time, in_words
from megatron_ampipe.plan.model_block import StageLayers, block_of, layers_of
from megatron_ampipe.plan.model_file import ModelFile, find_model, read_model
from megatron_ampipe.plan.plan_file import Plan
from megatron_ampipe.plan.planner import (
    PlanOptions,
    Plans,
    Progress,
    alternatives,
    make_plans,
    sharing_layers,
)
from megatron_ampipe.plan.predict import Predictor
from megatron_ampipe.plan.rank_memory import memory_by_stage
from megatron_ampipe.plan.recorded_routing import with_routing
from megatron_ampipe.plan.search import DEGREES
from megatron_ampipe.plan.sensitivity import over_host_time, over_link_rate
from megatron_ampipe.plan.whole_passes import Gain, WholePasses, fastest_way, with_whole_passes
from megatron_ampipe.schedule import (
    BlockFeatures,
    Chunk,
    Exchange,
    Pipeline,
    Schedule,
    StageKind,
    parse_exchanges,
    parse_stack,
)
from megatron_ampipe.tools import pictures, plan_picture, plan_recipe, progress
from megatron_ampipe.tools.plan_answer import answer_of, host_of, show, timeline_of, whole_passes_of

_QUIET_SECONDS = 3.0
"""How long a search without a terminal prints nothing."""
_MOST_CHUNKS = 64
"""A schedule of thousands of chunks would take minutes to build."""
EPILOG = """\
examples:
  ampipe plan --model mixtral-8x7b --cluster dgx-h100
      which degree, how much it is predicted to save, and why
  ampipe plan --model deepseek-v2-lite --cluster dgx-h100 --ranks 64 --set expert-model-parallel-size=16
      another layout than the model file names
  ampipe plan --model mixtral-8x7b --cluster measured.yaml --output plan.yaml --trace predicted.json
      on figures measured on your machines; writes the plan, and the predicted timeline for ampipe draw
  ampipe plan --recipe bf16_1024GPU_TP1PP16EP64.yaml --cluster dgx-h100
      what stops a launch of a recipe of Megatron-LM, or of a job script, and what it would gain

A model is a YAML file of Megatron's flags without dashes, a cluster a YAML file of fitted times; both are
also found by name in configs/models and configs/clusters. A recipe is a YAML file with a section ARGS, as in
Megatron-LM's examples/moe_recipes; all other files are read as job scripts. Megatron's parser reads their
flags, and nothing in them is run.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of ``ampipe plan``."""
    add = adder(parser)
    add_question = adder(parser.add_mutually_exclusive_group(required=True))
    add_question("--model", "FILE", "model file, or the name of a shipped one")
    add_question("--recipe", "FILE", "recipe with ARGS, or job script, of Megatron-LM", type=Path)
    add("--cluster", "FILE", "cluster file, or the name of a shipped one", required=True)
    override = "a Megatron flag that replaces the file's, for example seq-length=8192; repeatable"
    add("--set", "FLAG=VALUE", override, type=_override, action="append", default=[])
    without = "with --recipe: flags to leave out"
    add("--without", "FLAG,FLAG", without, type=several(str), default=[])
    ranks = "ranks of the whole run (default: as the recipe says, else those of one node)"
    add("--ranks", "N", ranks, type=at_least(1))
    add_unevenness = adder(parser.add_mutually_exclusive_group())
    busiest = "tokens of the busiest rank over the mean; 1 if experts are evenly used"
    add_unevenness("--imbalance", "X", busiest, type=float, default=1.0)
    routing = (
        "take from a training that ran with --ampipe-routing-dir how unevenly experts are used, and how many "
        "ranks or nodes get a token"
    )
    add_unevenness("--routing", "DIR", routing, type=Path)
    add("--degrees", "N,N", "numbers of chunks to try", type=_degrees, default=",".join(map(str, DEGREES)))
    stack = "how many consecutive layers may share a schedule: 1 (block by block), a number, or all"
    add("--stack", "N", stack, default="all")
    exchange = (
        f"how the all-to-all groups copies of a token, as --ampipe-exchange: {', '.join(Exchange)}, several "
        f"of these, or {AUTO} for all that the layout allows, which compares Megatron's dispatchers and "
        "grouped products too; the fastest is chosen, of equal ones the first"
    )
    add("--exchange", "E,E", exchange, default=AUTO)
    no_partner = "do not consider partners, two micro-batches at once (--ampipe-partner)"
    add("--no-partner", None, no_partner, action="store_true")
    verbose = "show memory, reductions of gradients and MPipeMoE's choice too"
    add("--verbose", None, verbose, action="store_true")
    add("--output", "FILE", "write the plan, for --ampipe-plan FILE", type=Path)
    add("--json", "FILE", "write the answer as JSON; - for stdout, in place of the table")
    suffixes = " or ".join(pictures.SUFFIXES)
    plot = (
        "draw how the speedup of the plan depends on the host's time per stage and on the rate of the links; "
        f"the suffix, {suffixes}, gives the format"
    )
    add("--plot", "FILE", plot, type=Path)
    trace = "write the predicted timeline in the form of a run's, for ampipe draw"
    add("--trace", "FILE", trace, type=Path)
    schedule = (
        "also predict this order of stages at each degree: a name of --ampipe-schedule, or a function "
        "package.module:function; --trace-of shows it"
    )
    add("--schedule", "NAME", schedule)
    shown = "degree that --trace and --tape show, in equal chunks (default: the choice)"
    add("--trace-of", "N", shown, type=at_least(1, at_most=_MOST_CHUNKS))
    tape = "write what a GPU runs: calls with what each takes, gives, waits for and frees (needs torch)"
    add("--tape", "FILE", tape, type=Path)


def _override(text: str) -> tuple[str, object]:
    key, _, value = text.partition("=")
    try:
        parsed = value_of(value)
    except ValueError:
        parsed = None
    if not key or parsed is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not FLAG=VALUE. Write for example seq-length=8192.")
    return key, parsed


def _degrees(text: str) -> tuple[int, ...]:
    return tuple(sorted({at_least(2, at_most=_MOST_CHUNKS)(word) for word in text.split(",")}))


class _Question(NamedTuple):
    """What is asked: a model on a cluster, and how it may be run."""

    model: ModelFile
    predictor: Predictor
    """Of all layers of a pipeline stage."""
    layers: StageLayers
    options: PlanOptions
    assumed: list[str]
    """A sentence for each assumption about things that no file says."""


class _Found(NamedTuple):
    """What the search has found."""

    plans: Plans
    alternatives: dict[str, Plans]
    """The plans with other flags of Megatron."""
    whole_passes: list[tuple[WholePasses, Gain]]
    """The layers with graphs of whole passes, and how they run fastest."""
    by_host: list[HostRow]


def run(arguments: argparse.Namespace) -> int:
    """Plan, and show it.

    Raises:
        BadInput: a file or a setting is wrong.
        RunFailed: an output cannot be written.
    """
    _check_outputs(arguments)
    cluster = read_cluster(find_cluster(arguments.cluster))
    recipe, judgement = None, None
    if arguments.recipe is not None:
        recipe, judgement = _judged(arguments, cluster)
    try:
        question = _question_of(arguments, cluster, recipe, judgement)
    except BadInput as refusal:
        if recipe is None or judgement is None or not judgement.stops:
            raise
        # What stops the launch is the answer.
        answer = plan_recipe.report_of(recipe, judgement, ())
        return _end(arguments, {**answer, "not_predicted": str(refusal)}, None)
    found = _search(question, arguments)
    plan = found.plans.chosen
    predictor = question.predictor.changed(exchange=plan.pipeline.exchange)
    memory = memory_by_stage(question.model, predictor.block, plan.pipeline_of(predictor.block.rows))
    assumed = [*question.assumed, *_assumed_of_partners(plan, question.layers, arguments)]
    answer = answer_of(predictor, found.plans, found.alternatives, memory, arguments, assumed)
    answer |= host_of(predictor, found.by_host)
    answer |= whole_passes_of(question.predictor, found.whole_passes)
    answer |= plan_recipe.domain_of(predictor)
    if recipe is not None and judgement is not None:
        flags = answer["flags"] or []
        if flags:
            judgement = recipe.judged(flags)
        answer |= plan_recipe.report_of(recipe, judgement, flags)
        answer |= plan_recipe.gains_of(question.predictor, found.plans, answer["layers"])
        answer["next"] = plan_recipe.next_command(recipe, judgement, flags, arguments.without)
    _write_shown(predictor, plan, arguments)
    if arguments.plot is not None:
        _plot(predictor, plan, arguments)
    if arguments.output is not None:
        plan.write(arguments.output, head=arguments.command_line)
        print(f"wrote {arguments.output}", file=sys.stderr)
    return _end(arguments, answer, plan)


def _judged(
    arguments: argparse.Namespace, cluster: Cluster
) -> tuple[plan_recipe.AskedRecipe, plan_recipe.Judgement]:
    """The recipe of a command line, and what its launch says."""
    recipe = plan_recipe.asked(arguments, cluster)
    with _shown_progress() as tell:
        tell("Megatron's parser and checks")
        return recipe, recipe.judged()


def _end(arguments: argparse.Namespace, answer: Report, plan: Plan | None) -> int:
    """Print or write the answer."""
    text = json.dumps(answer, indent=1) + "\n"
    if arguments.json == "-":
        print(text, end="")
        return 0
    if arguments.json is not None:
        outputs.write_text(Path(arguments.json), text)
    console = Console()
    if "recipe" in answer:
        for sentence in plan_recipe.sentences_of(answer):
            console.print(sentence, soft_wrap=True, markup=False, highlight=False)
    if plan is not None:
        show(answer, plan, console, verbose=arguments.verbose)
    return 0


def _plot(predictor: Predictor, plan: Plan, arguments: argparse.Namespace) -> None:
    """Draw the speedup of the plan, or of two chunks where Megatron's layers are chosen, as ``--plot``."""
    pipeline = plan.pipeline_of(predictor.block.rows)
    chosen = in_words(pipeline)
    if not plan.helps:
        stack = parse_stack(arguments.stack, flag="--stack")
        pipeline = Pipeline.of(min(arguments.degrees), stack=stack)
        chosen = f"Megatron's layers are chosen; drawn: {in_words(pipeline)}"
    with _shown_progress() as tell:
        tell("other hosts and links for --plot")
        both = (over_host_time(predictor, pipeline), over_link_rate(predictor, pipeline))
    lines = [line for line in both if line is not None]
    if not lines:
        arguments.refuse("--plot has nothing to show: one rank has all experts, and no host issues stages")
    title = f"{arguments.model or arguments.recipe} on {arguments.cluster}"
    plan_picture.draw(lines, target=arguments.plot, title=title, plan=chosen)
    print(f"wrote {arguments.plot}", file=sys.stderr)


def _check_outputs(arguments: argparse.Namespace) -> None:
    """Refuse outputs that could not be written after a search of minutes."""
    for name in ("output", "trace", "tape", "json"):
        path = getattr(arguments, name)
        if path not in (None, "-"):
            outputs.check(Path(path), flag=f"--{name}")
    if arguments.plot is not None:
        pictures.check(arguments.plot, flag="--plot")
    if arguments.trace_of is not None and arguments.trace is arguments.tape is None:
        arguments.refuse("--trace-of needs --trace FILE or --tape FILE")


def _question_of(
    arguments: argparse.Namespace,
    cluster: Cluster,
    recipe: plan_recipe.AskedRecipe | None,
    judgement: plan_recipe.Judgement | None,
) -> _Question:
    """Read the files of a command line."""
    if arguments.schedule is not None:
        check_schedule(arguments.schedule, flag="--schedule")
    stack = parse_stack(arguments.stack, flag="--stack")
    exchanges = parse_exchanges(arguments.exchange, flag="--exchange")
    ranks, assumed = arguments.ranks, []
    if recipe is not None and judgement is not None:
        model = plan_recipe.model_of(recipe.file, judgement)
        ranks = recipe.ranks
        assumed += [*recipe.assumed, *judgement.notes]
    else:
        if arguments.without:
            arguments.refuse("--without leaves out flags of a recipe; add --recipe FILE")
        model = read_model(find_model(arguments.model), overrides=dict(arguments.set))
    block, notes = block_of(model, cluster, ranks=ranks, imbalance=arguments.imbalance)
    assumed += notes
    if arguments.routing is not None:
        block, recorded = with_routing(block, arguments.routing)
        assumed += recorded
    if not set(exchanges) & set(block.exchanges(cluster.ranks_per_node)):
        arguments.refuse(
            f"--exchange {arguments.exchange} saves nothing in this layout: no rank or node gets a token "
            "twice, or ranks are not spread equally over several nodes with several of them on each; use "
            f"--exchange {AUTO}, which leaves out what does not apply"
        )
    layers = layers_of(model)
    options: PlanOptions = {
        "degrees": arguments.degrees,
        "stack": stack,
        "exchanges": exchanges,
        "with_partner": 0.0 if arguments.no_partner or layers.waits else 1.0,
    }
    predictor = Predictor(block, cluster, num_layers=layers.num_layers, dense=layers.dense)
    return _Question(model, predictor, layers, options, assumed)


def _search(question: _Question, arguments: argparse.Namespace) -> _Found:
    """Search for the fastest way to run, with other flags of Megatron too, and on slower hosts."""
    predictor = question.predictor
    with _shown_progress() as tell:
        options: PlanOptions = {**question.options, "progress": tell}
        plans = make_plans(predictor, **options)
        others = {}
        if arguments.exchange == AUTO:
            others = alternatives(predictor, **options)
        further = with_whole_passes(predictor, other_dispatcher=arguments.exchange == AUTO)
        whole_passes = []
        for whole in further:
            tell(whole.name)
            whole_passes.append((whole, fastest_way(whole, **options)))
        tell("slower hosts")
        by_host = by_host_time(
            predictor,
            plans.chosen.pipeline,
            further=[whole for whole in further if whole.has_same_dispatcher],
            degrees=arguments.degrees,
            stack=options["stack"],
            with_partner=options["with_partner"],
        )
    return _Found(plans, others, whole_passes, by_host)


def _assumed_of_partners(plan: Plan, layers: StageLayers, arguments: argparse.Namespace) -> list[str]:
    if plan.pipeline.partner is not None:
        return ["steps have many micro-batches: the first forward, last backward pass run alone"]
    if layers.waits and not arguments.no_partner:
        return ["no partners: they need virtual stages (--num-layers-per-virtual-pipeline-stage)"]
    return []


@contextlib.contextmanager
def _shown_progress() -> Iterator[Progress]:
    """Shows on stderr what is searched: in place on a terminal, else a line for what begins late."""
    console, begun = Console(stderr=True), time.monotonic()
    if not console.is_terminal:

        def print_late(text: str) -> None:
            passed = time.monotonic() - begun
            if passed > _QUIET_SECONDS:
                console.print(f"ampipe plan: {passed:.0f} s, searching {text}", highlight=False)

        yield print_late
        return
    with progress.shown("ampipe plan: searching", console=console) as tell:
        yield lambda text: tell(f"ampipe plan: searching {text}")


def _write_shown(predictor: Predictor, plan: Plan, arguments: argparse.Namespace) -> None:
    """Write what ``--trace`` and ``--tape`` show: the plan, or ``--trace-of`` chunks of equal length."""
    pipeline = plan.pipeline_of(predictor.block.rows)
    if arguments.trace_of is not None:
        stack = parse_stack(arguments.stack, flag="--stack")
        named = {} if arguments.schedule is None else {"schedule": arguments.schedule}
        pipeline = Pipeline.of(arguments.trace_of, stack=stack, **named)
    if arguments.trace is not None:
        asked = f"{arguments.model or arguments.recipe} on {arguments.cluster}"
        labels = {PREDICTED: asked, **pipeline.labels}
        timeline_of(predictor, pipeline, labels=labels).write_chrome(arguments.trace)
    if arguments.tape is not None:
        layers = sharing_layers(predictor, pipeline.stack).layers
        tape = tape_text(pipeline.schedule_of(layers), layers, pipeline.chunks(predictor.block.rows))
        outputs.write_text(arguments.tape, tape)


class PrintedFunctions:
    """Stands for the functions of a block whose tape is only printed (``runtime.block_functions``)."""

    stage_parameters: Mapping[StageKind, Sequence[object]] = MappingProxyType({})

    def function_of(self, kind: StageKind) -> tuple[int, None]:
        """Nothing that could be called; the tape only shows that there is a function."""
        return 0, None

    def differentiate(self, kind: StageKind) -> tuple[int, None]:
        """As :meth:`function_of`."""
        return 0, None

    def delay_wgrad(self, kind: StageKind, products: object) -> None:
        """No weight gradients."""


def tape_text(schedule: Schedule, layers: Sequence[BlockFeatures], chunks: Sequence[Chunk]) -> str:
    """The tapes of both passes, as text."""
    # By name: planning itself needs no torch.
    compiler = importlib.import_module("megatron_ampipe.runtime.compile")
    options = compiler.TapeOptions(keep_graph=True, host_waits=True, threads=False)
    functions = [PrintedFunctions()] * len(layers)
    return f"{compiler.compiled(schedule, layers, chunks=chunks, functions=functions, options=options)}\n"
