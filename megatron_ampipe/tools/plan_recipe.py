"""``ampipe plan --recipe``: the question that a recipe or a job script asks, and what its launch would say.

Megatron's parser reads the flags, so Megatron and torch are imported, by :mod:`megatron_ampipe.launch`.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from megatron_ampipe.files import outputs
from megatron_ampipe.files.flag_files import FlagFile, read_flag_file
from megatron_ampipe.files.outputs import Report, ReportView
from megatron_ampipe.plan.cluster import Cluster
from megatron_ampipe.plan.host_times import in_words, with_graphs
from megatron_ampipe.plan.model_file import ModelFile
from megatron_ampipe.plan.model_flags import TRAINING_FLAGS
from megatron_ampipe.plan.plan_file import Plan
from megatron_ampipe.plan.planner import Plans, make_plans
from megatron_ampipe.plan.predict import GRAPH_LAUNCH_US, Predictor
from megatron_ampipe.schedule import Exchange

if TYPE_CHECKING:
    from megatron_ampipe.launch.recipe_check import Judgement as Judgement

_DOMAIN_VARIABLE = "NVLINK_DOMAIN_SIZE"
"""Variable in NVIDIA's recipes: GPUs that NVLink joins."""
_OF_GRAPHS = (2, 3, 4)
"""The degrees that are compared with graphs."""


@dataclass(frozen=True, slots=True)
class AskedRecipe:
    """A recipe with the changes of a command line.

    Attributes:
        file: The recipe.
        words: Flags of ``--set``.
        ranks: Ranks of the run.
        cluster: The cluster.
        assumed: A sentence for each assumption.
    """

    file: FlagFile
    words: tuple[str, ...]
    ranks: int
    cluster: Cluster
    assumed: tuple[str, ...]

    def judged(self, flags: Sequence[str] = ()) -> Judgement:
        """What a launch says, with further flags of AMPipe."""
        # Only here is Megatron needed.
        from megatron_ampipe.launch import recipe_check

        words = [*self.words, *flags]
        per_node = min(self.ranks, self.cluster.ranks_per_node)
        return recipe_check.judge(self.file, words, ranks=self.ranks, ranks_per_node=per_node)


def asked(arguments: argparse.Namespace, cluster: Cluster) -> AskedRecipe:
    """Read the recipe of a command line."""
    file = read_flag_file(arguments.recipe)
    words: list[str] = []
    left_out = list(arguments.without)
    for key, value in arguments.set:
        given = words_of(key, value)
        words += given
        if not given:
            left_out.append(key)
    if left_out:
        file = file.without(left_out, flag="--without" if arguments.without else "--set")
    assumed = list(file.notes)
    ranks, why = _ranks(arguments.ranks, file, words, cluster)
    assumed.append(f"{ranks} ranks: {why}")
    domain = file.environment.get(_DOMAIN_VARIABLE)
    if domain is not None and domain != str(cluster.ranks_per_node):
        assumed.append(
            f"{cluster.ranks_per_node} ranks of a node: as in the cluster file; the recipe sets "
            f"{_DOMAIN_VARIABLE}={domain}"
        )
    return AskedRecipe(file, tuple(words), ranks, cluster, tuple(assumed))


def words_of(key: str, value: object) -> list[str]:
    """A value of ``--set`` as words of a command line; none for a switch that is off."""
    flag = f"--{key}"
    if value is None or value is False:
        return []
    if value is True:
        return [flag]
    return [flag, *(str(item) for item in (value if isinstance(value, list) else [value]))]


def _ranks(given: int | None, file: FlagFile, words: Sequence[str], cluster: Cluster) -> tuple[int, str]:
    """The number of ranks, and what says so."""
    if given is not None:
        return given, "--ranks"
    if file.ranks is not None:
        return file.ranks, f"{file.path.name} says so; --ranks N for another number"
    sizes = _layout((*file.words, *words))
    smallest = math.lcm(
        sizes["tensor-model-parallel-size"]
        * sizes["pipeline-model-parallel-size"]
        * sizes["context-parallel-size"],
        sizes["expert-tensor-parallel-size"]
        * sizes["expert-model-parallel-size"]
        * sizes["pipeline-model-parallel-size"],
        cluster.ranks_per_node,
    )
    return (
        smallest,
        f"the fewest whole nodes for the layout, as {file.path.name} names no number; see --ranks",
    )


def _layout(words: Sequence[str]) -> dict[str, int]:
    """The parallel sizes of a command line."""
    sizes: dict[str, int] = {}
    for name in ("tensor", "pipeline", "expert"):
        sizes[f"{name}-model-parallel-size"] = _number(words, f"--{name}-model-parallel-size", 1)
    sizes["context-parallel-size"] = _number(words, "--context-parallel-size", 1)
    tensor = sizes["tensor-model-parallel-size"]
    sizes["expert-tensor-parallel-size"] = _number(words, "--expert-tensor-parallel-size", tensor)
    return sizes


def _number(words: Sequence[str], flag: str, default: int) -> int:
    """The last value of a flag; the default if it has none that is a number above 0."""
    number = default
    for index, word in enumerate(words):
        name, separator, attached = word.partition("=")
        value = attached if separator else "".join(words[index + 1 : index + 2])
        if name == flag and value.isdecimal() and int(value) > 0:
            number = int(value)
    return number


def model_of(file: FlagFile, judgement: Judgement) -> ModelFile:
    """The sizes of the arguments, as a model file has them; errors name lines of the recipe."""
    # It reads Megatron's arguments, and imports neither.
    from megatron_ampipe.block.settings import Settings
    from megatron_ampipe.launch.environment import model_of_args

    run = judgement.run
    recomputes = run is not None and run.recomputed_layers > 0
    settings = Settings() if run is None else run.settings
    model = model_of_args(judgement.args, settings, recomputes=recomputes, keys=TRAINING_FLAGS)
    if run is not None and run.graphs.of_passes:
        model = replace(model, values={**model.values, "cuda-graph-impl": "local"})
    lines = {given.flag[2:]: int(given.place.rpartition(":")[2]) for given in file.flags}
    return replace(model, path=file.path, lines=lines)


def report_of(recipe: AskedRecipe, judgement: Judgement, flags: Sequence[str]) -> Report:
    """What the launch says, as plain data."""
    return {
        "recipe": {
            "file": str(recipe.file.path),
            "flags": len(recipe.file.flags),
            "words": list(recipe.file.words),
            "ranks": recipe.ranks,
            "checked_with": list(flags),
            "accepted": not judgement.stops,
            "stops": list(judgement.stops),
            "notes": list(judgement.notes),
        }
    }


def gains_of(predictor: Predictor, plans: Plans, layers: Sequence[ReportView]) -> Report:
    """The speed over Megatron's layers by chunks, partners, exchange and graphs, each for itself."""
    partnered = [row for row in layers if row["way"].startswith("partners")]
    stock_ms = predictor.stock().total / 1e3
    gains: Report = {"chunks": {"speedup": stock_ms / plans.blocks_ms, "way": _chunks(plans.alone)}}
    shared = plans.shared
    if shared is not None and shared.predicted_ms is not None and shared.predicted_ms < plans.blocks_ms:
        gains["chunks"] = {"speedup": stock_ms / shared.predicted_ms, "way": _chunks(shared)}
    if partnered:
        best = max(partnered, key=lambda row: float(row["speedup"]))
        gains["partners"] = {"speedup": best["speedup"], "way": best["way"]}
    rows_ms = plans.by_exchange.get(Exchange.ROWS)
    exchange, time_ms = min(plans.by_exchange.items(), key=lambda item: item[1])
    if rows_ms is not None and exchange is not Exchange.ROWS:
        gains["exchange"] = {"speedup": rows_ms / time_ms, "way": f"{exchange}, over rows"}
    if predictor.cluster.host.issue.forward_us:
        gains["graphs"] = _with_graphs(predictor)
    return {"gains": gains}


def _chunks(plan: Plan) -> str:
    """The chunks of a plan without partners, and whether layers share a schedule."""
    together = "block by block" if plan.num_layers == 1 else f"{plan.num_layers} layers as one schedule"
    return f"{in_words(plan.pipeline)}, {together}"


def _with_graphs(predictor: Predictor) -> Report:
    """Chunks with captured stages, over Megatron's layers with the same modules captured."""
    captured = predictor.on(with_graphs(predictor.cluster))
    plan = make_plans(captured, full=False, degrees=_OF_GRAPHS).chosen
    stock_us = captured.stock().total
    return {
        "speedup": plan.predicted_speedup,
        "way": f"{in_words(plan.pipeline)}, over Megatron's layers with the same modules captured",
        "stock_speedup": predictor.stock().total / stock_us,
        "launch_us": GRAPH_LAUNCH_US,
    }


def domain_of(predictor: Predictor) -> Report:
    """How many ranks exchange tokens, if NVLink joins all of them; else None."""
    block, cluster = predictor.block, predictor.cluster
    ranks = block.expert * block.expert_tensor
    is_inside = cluster.nvlink and 1 < ranks <= cluster.ranks_per_node
    return {"nvlink_domain": ranks if is_inside else None}


def domain_sentence(answer: ReportView) -> str | None:
    """What to use where all-to-alls stay in one NVLink domain; without what a recipe already has."""
    ranks = answer["nvlink_domain"]
    if ranks is None:
        return None
    words = answer["recipe"]["words"] if "recipe" in answer else ()
    instead: Mapping[str, str] = {
        "--overlap-moe-expert-parallel-comm": "Megatron's overlap of two micro-batches "
        "(--overlap-moe-expert-parallel-comm)",
        "--moe-flex-dispatcher-backend": "HybridEP (--moe-token-dispatcher-type flex "
        "--moe-flex-dispatcher-backend hybridep)",
        "full_iteration": "graphs of whole iterations (--cuda-graph-impl full_iteration)",
    }
    missing = [text for word, text in instead.items() if word not in words]
    advice = f"use {', '.join(missing)} in place of chunks" if missing else "it already has what helps there"
    return f"no: your all-to-alls stay in one NVLink domain, of {ranks} ranks; {advice}"


def sentences_of(answer: ReportView) -> Iterator[str]:
    """What the launch says, and the gains."""
    recipe = answer["recipe"]
    flags = " ".join(recipe["checked_with"]) or "--ampipe-degree 2"
    head = f"{recipe['file']}: {recipe['flags']} flags, {recipe['ranks']} ranks, with {flags}"
    if recipe["accepted"]:
        yield f"{head}: accepted"
    else:
        count = len(recipe["stops"])
        yield f"{head}: {count} {'thing stops' if count == 1 else 'things stop'} the launch"
    for number, stop in enumerate(recipe["stops"], 1):
        yield f"  {number}. {stop}"
    if "not_predicted" in answer:
        yield f"nothing is predicted: {answer['not_predicted']}"
    for name, gain in answer.get("gains", {}).items():
        yield f"gain by {name}: {gain['speedup']:.2f} ({gain['way']})"
    graphs = answer.get("gains", {}).get("graphs")
    if graphs is not None:
        yield (
            f"    graphs of attention and routing alone: {graphs['stock_speedup']:.2f} "
            f"(a launch of {graphs['launch_us']:.0f} us in place of a stage's, assumed)"
        )


def next_command(
    recipe: AskedRecipe, judgement: Judgement, flags: Sequence[str], without: Sequence[str]
) -> str:
    """The command that goes on from here, without what Megatron refuses of the recipe."""
    ranks, per_node = recipe.ranks, recipe.cluster.ranks_per_node
    left_out = [*without, *(flag.removeprefix("--") for flag in judgement.left_out)]
    words = ["--recipe", str(recipe.file.path)]
    if left_out:
        words += ["--without", ",".join(left_out)]
    words += [*judgement.replaced, *recipe.words, *flags]
    numbers = ["--ranks", str(ranks), "--ranks-per-node", str(min(ranks, per_node))]
    return f"next: {outputs.shell_line(['ampipe', 'config', *words, *numbers])}"
