"""AMPipe's own flags: that the names of settings are those of the flags, and to what they resolve."""

import argparse
import os
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_ampipe import compat
from megatron_ampipe.block.settings import SETTING, given_settings
from megatron_ampipe.errors import BadInput
from megatron_ampipe.launch import connections, flags
from megatron_ampipe.launch.run import Run, prepare_arguments, requested
from megatron_ampipe.plan.plan_file import Plan
from megatron_ampipe.schedule import (
    KEEP,
    BlockFeatures,
    Exchange,
    NodeLayout,
    Partner,
    Pipeline,
    build,
    period,
    useful_exchanges,
    with_memory,
)


def parsed(*words: str) -> argparse.Namespace:
    return flags.add_arguments(argparse.ArgumentParser(allow_abbrev=False)).parse_args(list(words))


def parse(*words: str) -> Run:
    return requested(parsed(*words))


def prepare(*words: str) -> None:
    """Prepare the process of a run with these flags."""
    args = parsed(*words)
    prepare_arguments(args, requested(args))


@pytest.mark.parametrize("name", ["plan", "trace_dir", "stack", "memory_budget", "router"])
def test_an_empty_value_is_refused(name: str) -> None:
    flag = SETTING[name].flag
    with pytest.raises(BadInput, match=re.escape(f"{flag} (empty): is empty. Give a value, or")):
        parse("--ampipe-degree", "4", flag, "")


def test_every_value_that_is_required_exists() -> None:
    """What a message says to add can be parsed, and takes the message away."""
    for setting in SETTING.values():
        for words in setting.requires:
            value = setting.requires_for or (setting.choices or ("1",))[0]
            args = parsed(setting.flag, str(value), *words.split())
            setting.check_required(given_settings(args))


def write_plan(file: Path, degree: int = 2, *, memory: str = KEEP, **fields: Any) -> str:
    """A plan of equal chunks; returns the name of its file."""
    features = with_memory(BlockFeatures(chunked_qkv=True), memory)
    order = build("ampipe", degree=degree, features=features)
    if fields.get("stack") == 0:
        order = period(order)
    shares = (1 / degree,) * degree
    pipeline = Pipeline.of(degree, order=order, shares=shares, memory=memory, **fields)
    Plan(pipeline=pipeline, reason="chosen").write(file, head="a test")
    return str(file)


def of(degree: int, **fields: Any) -> Pipeline:
    """A pipeline with the default of the flags: all layers share a schedule."""
    return Pipeline.of(degree, **{"stack": 0} | fields)


@pytest.mark.parametrize(
    ("words", "pipeline"),
    [
        ("", of(1)),
        ("--ampipe-degree 4", of(4)),
        ("--ampipe-degree 4 --ampipe-backward-degree 2", of(4, backward_degree=2)),
        ("--ampipe-chunks 0.75,0.25", of(2, shares=(0.75, 0.25))),
        ("--ampipe-degree auto --ampipe-schedule moe-only", of(1, schedule="moe-only")),
        ("--ampipe-schedule lancet", of(1, schedule="lancet")),
        ("--ampipe-schedule lancet --ampipe-stack 1", of(1, schedule="lancet", stack=1)),
        ("--ampipe-degree 2 --ampipe-stack all", of(2)),
        ("--ampipe-degree 2 --ampipe-stack 4", of(2, stack=4)),
        ("--ampipe-degree auto --ampipe-memory redispatch", of(1, memory="redispatch")),
        ("--ampipe-degree 2 --ampipe-memory keep/rebuild", of(2, memory="keep/rebuild")),
        ("--ampipe-exchange ranks", of(1, exchange=Exchange.RANKS)),
        ("--ampipe-degree 2 --ampipe-exchange rows", of(2)),
        ("--ampipe-partner --ampipe-stack 2", of(1, stack=2, partner=Partner(1, "ampipe"))),
        (
            "--ampipe-degree 4 --ampipe-partner --ampipe-partner-degree 2 --ampipe-partner-order listed",
            of(4, partner=Partner(2, "ampipe", "listed")),
        ),
        ("--ampipe-degree auto --ampipe-exchange auto", of(1)),
        ("--ampipe-degree auto --ampipe-cluster a --ampipe-stack 2", of(1, stack=2)),
    ],
)
def test_flags_resolve_to_one_pipeline(words: str, pipeline: Pipeline) -> None:
    run = parse(*words.split())
    assert run.pipeline == pipeline
    assert run.settings.automatic == words.startswith("--ampipe-degree auto")
    assert run.settings.chooses_exchange == words.endswith("--ampipe-exchange auto")
    assert run.pipelined == bool(words)
    if not run.settings.automatic:
        assert parse(*run.pipeline.flags).pipeline == run.pipeline


@pytest.fixture
def plan_file(tmp_path: Path) -> str:
    return write_plan(tmp_path / "plan.yaml", stack=0, memory="rebuild", exchange=Exchange.RANKS)


def test_a_plan_file_is_run_where_the_flags_do_not_say_otherwise(plan_file: str) -> None:
    restart = ("--ampipe-degree", "auto", "--ampipe-save-plan", plan_file)
    plan = Plan.read(Path(plan_file)).pipeline
    assert parse("--ampipe-plan", plan_file).pipeline == plan
    same = ("", "--ampipe-stack all", "--ampipe-memory rebuild", "--ampipe-exchange auto")
    for words in same:
        assert parse(*restart, *words.split()).pipeline == plan
    for words in ("--ampipe-stack 4", "--ampipe-memory keep", "--ampipe-exchange rows"):
        with pytest.raises(BadInput, match=f"{words}: is not that of the plan in"):
            parse(*restart, *words.split())
        with pytest.raises(BadInput, match=f"{words}: the plan .* already sets this"):
            parse("--ampipe-plan", plan_file, *words.split())


def test_a_planner_may_have_found_that_sharing_a_schedule_does_not_help(tmp_path: Path) -> None:
    file = write_plan(tmp_path / "plan.yaml", stack=1)
    words = ("--ampipe-degree", "auto", "--ampipe-save-plan", file, "--ampipe-stack", "all")
    assert parse(*words, "--ampipe-cluster", "dgx-h100").pipeline.stack == 1
    with pytest.raises(BadInput, match="--ampipe-stack all: is not that of the plan in"):
        parse(*words)


BUDGET = "--ampipe-memory auto --ampipe-memory-budget"


@pytest.mark.parametrize(
    ("words", "rule"),
    [
        ("--ampipe-memory auto", "--ampipe-memory auto: requires --ampipe-memory-budget. Add"),
        ("--ampipe-memory forget", "--ampipe-memory forget: is not one of keep, rebuild, redispatch"),
        (
            "--ampipe-degree auto --ampipe-memory keep/rebuild",
            "--ampipe-memory keep/rebuild: names the strategy of each chunk, and their number is what",
        ),
        ("--ampipe-memory keep/rebuild", "names strategies of 2 chunks, and the backward pass has 4"),
        (
            "--ampipe-memory rebuild --ampipe-memory-budget 1GiB",
            "--ampipe-memory-budget 1GiB: requires --ampipe-memory auto. Add --ampipe-memory auto, or",
        ),
        *((f"{BUDGET} {size}", "is not a size above 0 in MiB or GiB") for size in ("60GB", "0GiB", "nan")),
    ],
)
def test_a_budget_is_a_size_that_chooses(words: str, rule: str) -> None:
    with pytest.raises(BadInput, match=re.escape(rule)):
        parse("--ampipe-degree", "4", *words.split())


@pytest.mark.parametrize("setting", ["--ampipe-wire fp8", "--ampipe-condense 0.9"])
def test_what_changes_numbers_needs_pipelined_layers_of_a_fixed_degree(setting: str, tmp_path: Path) -> None:
    file = write_plan(tmp_path / "plan.yaml", 1)
    for words, where in (("--ampipe-degree 1", "at"), (f"--ampipe-plan {file}", "with the plan")):
        with pytest.raises(BadInput, match=f"^{setting}: has no effect {where} .*, which builds Megatron's"):
            parse(*setting.split(), *words.split())
    with pytest.raises(BadInput, match=f"^{setting}: changes numbers, so degrees that are tried in training"):
        parse(*setting.split(), "--ampipe-degree", "auto")


def test_ranks_of_a_node_are_those_of_the_flag_or_of_the_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    for exchange in ("nodes", "2dh"):
        assert parse("--ampipe-exchange", exchange).settings.ranks_per_node == 8
        assert (
            parse("--ampipe-exchange", exchange, "--ampipe-ranks-per-node", "4").settings.ranks_per_node == 4
        )
    automatic = ("--ampipe-degree", "auto", "--ampipe-exchange", "auto")
    assert parse(*automatic, "--ampipe-ranks-per-node", "4").settings.ranks_per_node == 4
    with pytest.raises(BadInput, match="--ampipe-ranks-per-node 0: must be at least 1"):
        parse("--ampipe-exchange", "nodes", "--ampipe-ranks-per-node", "0")


@pytest.mark.parametrize(
    ("expert", "expert_tensor", "ranks_per_node", "layout"),
    [
        (4, 1, 2, NodeLayout(2, 2)),
        (8, 2, 8, NodeLayout(2, 4)),
        (16, 1, 4, NodeLayout(4, 4)),
        # On one node; one rank on each; not equally; experts over nodes; unknown.
        (4, 1, 4, None),
        (4, 2, 2, None),
        (8, 1, 3, None),
        (4, 4, 2, None),
        (4, 1, None, None),
    ],
)
def test_expert_parallel_ranks_are_spread_over_nodes(
    expert: int, expert_tensor: int, ranks_per_node: int | None, layout: NodeLayout | None
) -> None:
    settings = SimpleNamespace(
        expert_model_parallel_size=expert,
        expert_tensor_parallel_size=expert_tensor,
        moe_router_topk=2,
        moe_token_dispatcher_type="alltoall",
    )
    assert NodeLayout.of(settings, ranks_per_node) == layout
    useful = useful_exchanges(settings, expert, ranks_per_node)
    for exchange in (Exchange.NODES, Exchange.TWO_DIMENSIONAL):
        assert (exchange in useful) == (layout is not None)
    # With one expert per token there are no copies to save, only messages.
    settings.moe_router_topk = 1
    one = useful_exchanges(settings, expert, ranks_per_node)
    assert one == (Exchange.ROWS, Exchange.TWO_DIMENSIONAL)[: 1 + (layout is not None)]
    settings.moe_token_dispatcher_type = "allgather"
    assert useful_exchanges(settings, expert, ranks_per_node) == (Exchange.ROWS,)


def queues(*words: str) -> str | None:
    """How many hardware queues these flags choose."""
    prepare(*words)
    return os.environ.get(connections.VARIABLE)


def test_hardware_queues_are_chosen_for_pipelined_runs_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(connections.VARIABLE, "8")
    assert queues("--ampipe-degree", "4") == "8", "the user's choice"
    del os.environ[connections.VARIABLE]
    assert queues() is None and queues("--ampipe-degree", "1") is None
    assert queues("--ampipe-degree", "4") == connections.QUEUES


def test_the_order_of_collectives_is_set_for_pipelined_runs_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(connections.VARIABLE, "8")
    monkeypatch.setenv(connections.ORDER, "0")
    prepare("--ampipe-degree", "4")
    assert os.environ[connections.ORDER] == "0", "the user's choice"
    del os.environ[connections.ORDER]
    prepare("--ampipe-degree", "1")
    assert connections.ORDER not in os.environ
    # Process groups exist: NCCL may have read it.
    torch = pytest.importorskip("torch")
    with monkeypatch.context() as patched:
        patched.setattr(torch.distributed, "is_initialized", lambda: True)
        prepare("--ampipe-degree", "4")
    assert connections.ORDER not in os.environ
    prepare("--ampipe-degree", "4")
    assert os.environ[connections.ORDER] == "1"


@pytest.mark.parametrize(
    ("torch_release", "flags", "before", "with_groups", "after"),
    [
        ((2, 7, 1), "--ampipe-degree 4", None, False, "1"),
        ((2, 7, 1), "--ampipe-degree 4", "0", False, "0"),
        ((2, 7, 1), "--ampipe-degree 1", None, False, None),
        # torch has read it.
        ((2, 7, 1), "--ampipe-degree 4", None, True, None),
        # It warns of the variable.
        ((2, 8, 0), "--ampipe-degree 4", None, False, None),
    ],
)
def test_torch_does_not_record_streams_itself(
    torch_release: tuple[int, ...],
    flags: str,
    before: str | None,
    with_groups: bool,
    after: str | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip("torch")
    monkeypatch.setattr(compat, "torch_release", lambda: torch_release)
    monkeypatch.setattr("torch.distributed.is_initialized", lambda: with_groups)
    # What the flags set is removed afterwards.
    monkeypatch.setenv(connections.RECORDS, before or "")
    if before is None:
        monkeypatch.delenv(connections.RECORDS)
    prepare(*flags.split())
    assert os.environ.get(connections.RECORDS) == after


FINE = (
    "hardware queues, so that streams",
    "NCCL starts the collectives of all groups in one order",
    "memory of collectives is free as soon as they have been waited for",
)
NEW, OLD = (2, 8, 0), (2, 7, 1)


@pytest.mark.parametrize(
    ("values", "nccl", "torch_release", "expected"),
    [
        (("32", "1"), (2, 27, 5), NEW, [*FINE[:2]]),
        (("1", "1"), (2, 26, 2), NEW, ["one hardware queue: work starts", FINE[1]]),
        (
            (None, "0"), (2, 26, 2), NEW,
            ["8 hardware queues", "export NCCL_LAUNCH_ORDER_IMPLICIT=1 before torchrun"],
        ),
        (("32", "1"), (2, 21, 5), NEW, [FINE[0], "NCCL 2.21.5 ignores it"]),
        (("32", "1", "1"), (2, 26, 2), OLD, [*FINE]),
        (
            ("32", "1", "0"), (2, 26, 2), OLD,
            [*FINE[:2], "export TORCH_NCCL_AVOID_RECORD_STREAMS=1 before torchrun"],
        ),
        (("32", "1", None), (2, 26, 2), OLD, [*FINE[:2], "peaks are higher"]),
    ],
)  # fmt: skip
def test_the_startup_table_has_all_variables(
    values: tuple[str | None, ...],
    nccl: tuple[int, ...],
    torch_release: tuple[int, ...],
    expected: list[str],
) -> None:
    names = (connections.VARIABLE, connections.ORDER, connections.RECORDS)
    given = dict(zip(names, values, strict=False))
    environ = {name: value for name, value in given.items() if value is not None}
    rows = connections.startup_rows(environ, nccl, torch_release)
    for (label, value, why), name, text in zip(rows, given, expected, strict=True):
        assert value == (f"{name}={environ[name]}" if name in environ else f"{name} is not set")
        assert text in why
        assert label == ("environment" if text in FINE else "warning")


def test_after_cuda_is_initialised_nothing_is_set_and_a_warning_says_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip("torch")
    monkeypatch.setattr("torch.cuda.is_initialized", lambda: True)
    monkeypatch.delenv(connections.VARIABLE, raising=False)
    why = connections.warning(queues("--ampipe-degree", "4"))
    assert "8 hardware queues" in why and connections.EXPORT in why
