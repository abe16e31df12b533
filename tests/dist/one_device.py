"""Cases for several ranks that share one device; ``python -m tests.dist.one_device`` is one of these ranks.

``scripts/gpu_check/ranks.py`` starts the ranks, over NCCL on a GPU; the tests do so over gloo, with the
stand-ins for CUDA. Every rank compares AMPipe's layer with Megatron's and appends a line of JSON to one file
when a case begins, and one when it has ended, so that a run that is cut has said what it found. Reading the
list of cases imports no torch.
"""

import argparse
import contextlib
import dataclasses
import datetime
import importlib.util
import json
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_ampipe.schedule import Partner
from tests.dist.cases import AUX, CP, LARGE, PARITY, TP, Case, Z

RUN_ON = ("cuda", "stand-ins")
TIMEOUT_S = 40
"""Of a collective. Then NCCL writes what every rank did last, before whoever watches ends a case that hangs
(``scripts/gpu_check/ranks.py``)."""
BROKEN = 5
"""Exit code of a rank that cannot go on: other ranks may wait in a collective that it has not started."""
_FP32_TOLERANCE = 1e-5
_BF16_TOLERANCE = 2**-6
_WIRE_TOLERANCE = 2**-4
"""Relative to the largest value, as in ``tests/gpu/test_cuda.py``."""


@dataclass(frozen=True)
class RankCase:
    """One case.

    Attributes:
        shows: What it shows, in the table.
        way: What is run of both layers; see :data:`WAYS`.
        case: The layers.
        partner: How micro-batches meet, in the ways ``partners`` and ``chains``.
        needs: A module without which it is skipped.
    """

    shows: str
    way: str
    case: Case
    partner: Partner | None = None
    needs: str | None = None

    @property
    def name(self) -> str:
        """Unique."""
        return f"{self.way}: {self.case.name}"


_BY_NAME = {case.name: case for case in PARITY}
_IN_BF16 = {"bf16": True, "moe_router_dtype": "fp32"}
_SIZES = {"moe_router_topk": 2, "gated_linear_unit": True, "activation_func": "silu"}
_ENGINE_SIZES = _SIZES | {"hidden_size": 256, "ffn_hidden_size": 256}
_TE = "transformer_engine.pytorch"


def _of_parity(name: str, **changes: Any) -> Case:
    """A case of the CPU tests, as a GPU runs it."""
    case = _BY_NAME[name]
    kernel = "sdpa" if case.kernel == "cpu-flash" else case.kernel
    return dataclasses.replace(case, executor="cuda", kernel=kernel, **changes)


def _passes(shows: str, *names: str) -> list[RankCase]:
    return [RankCase(shows, "passes", _of_parity(name)) for name in names]


def _in_bf16(name: str, **settings: Any) -> Case:
    """With prescribed experts: rounding decides between two that are nearly tied."""
    model = _SIZES | Z | _IN_BF16 | settings.pop("model", {})
    options = {"executor": "cuda", "kernel": "sdpa", "rope": True, "replay": "replay_forward", **settings}
    return Case(name, model=model, **options)


def _of_engine(name: str, *, fused: bool = True, **settings: Any) -> Case:
    """Layers of Transformer Engine, in bf16."""
    model = _ENGINE_SIZES | {"moe_grouped_gemm": True, "gradient_accumulation_fusion": fused}
    options = {"kernel": None, "rope": False, "transformer_engine": True, "sequence_length": 256, **settings}
    return _in_bf16(name, model=model, **options)


def _interleaved(name: str, *, world_size: int) -> RankCase:
    """Two pipeline ranks of two model chunks each; ``num_layers`` are those of all of them."""
    groups = {"pipeline_model_parallel_size": 2, "expert_model_parallel_size": world_size // 2}
    model = LARGE | {"num_layers": 4}
    case = Case(name, world_size=world_size, executor="cuda", layers="mm", rope=True, kernel="sdpa",
                parallel=groups, model=model)  # fmt: skip
    return RankCase("interleaved pipeline stages", "interleaved", case)


_STACK = Case("stack", executor="cuda", layers="mdm", stack=0, rope=True, kernel="sdpa", model=LARGE)
_TP_STACK = dataclasses.replace(_STACK, name="tp-stack", parallel=TP, model=LARGE)
_FORM = Partner()

OF_TWO = [
    *_passes(
        "experts on two ranks (EP2)", "top2-several", "capacity-aux-z", "backward-degree2-of-4-ampipe",
        "stack-two-degrees", "stack-recompute-cuda-executor",
    ),
    *_passes("exchange ranks", "ranks-two-degrees-shared", "ranks-stack-recompute"),
    RankCase("bf16, prescribed experts", "passes", _in_bf16("bf16-ep2")),
    RankCase("evaluation between", "evaluation", _STACK),
    RankCase("an exception halfway", "exception", _STACK),
    RankCase("placed reductions", "reductions", dataclasses.replace(_STACK, name="reductions", degree=2)),
    RankCase("CUDA graphs, 1F1B", "graphs", _STACK),
    RankCase(
        "CUDA graphs of whole passes, 1F1B, one budget exceeded", "graphs",
        dataclasses.replace(_STACK, name="whole-passes", fixed_rows=True),
    ),
    RankCase(
        "CUDA graphs of whole passes with partners, one budget exceeded", "chains",
        dataclasses.replace(_STACK, name="whole-passes", degree=2, fixed_rows=True), _FORM,
    ),
    RankCase("partners", "partners", _of_parity("stack-ddmm"), _FORM),
    RankCase("partners", "partners", _of_parity("degree4-ampipe-thread"), Partner(2)),
    RankCase("Transformer Engine", "passes", _of_engine("engine-ep2"), needs=_TE),
    *(
        RankCase(
            "Transformer Engine, separate weight gradients", "reductions",
            _of_engine(f"engine-{schedule}-{'fused' if fused else 'apart'}", fused=fused, schedule=schedule,
                       degree=2),
            needs=_TE,
        )
        for schedule in ("lancet", "joined")
        for fused in (False, True)
    ),
    # Process groups of other sizes.
    *_passes("tensor parallel (TP2)", "tp-shared-gqa", "rows-stack-memory", "rows-stack-lancet"),
    RankCase("tensor parallel (TP2)", "passes", _in_bf16("bf16-tp2", parallel=TP)),
    RankCase("the host waits for nothing (TP2)", "waits", _TP_STACK),
    RankCase("partners", "partners", _of_parity("rows-stack-recompute"), _FORM),
    _interleaved("pp2", world_size=2),
    RankCase(
        "Transformer Engine", "passes", _of_engine("engine-tp2", parallel=TP), needs=_TE,
    ),
    *_passes("experts over tensor-parallel ranks", "gathers-two-degrees", "gathers-lancet"),
    *_passes("context parallel (CP2)", "cp-gathered", "cp-odd", "backward-degree4-of-2-cp"),
    RankCase("context parallel (CP2)", "passes", _in_bf16("bf16-cp2", parallel=CP)),
]  # fmt: skip
OF_FOUR = [
    *_passes("experts on four ranks (EP4)", "ranks-ep4"),
    *_passes("exchange nodes", "nodes-two-degrees-shared", "nodes-stack-recompute"),
    *_passes("exchange 2dh", "2dh-two-degrees-shared", "2dh-redispatch"),
    RankCase(
        "tensor parallel (TP2 x EP2)", "passes",
        dataclasses.replace(_TP_STACK, name="tp2-ep2", world_size=4, model=LARGE | AUX),
    ),
    RankCase(
        "tensor parallel (TP2 x EP2)", "passes", _in_bf16("bf16-tp2-ep2", parallel=TP, world_size=4),
    ),
    RankCase("partners", "partners", dataclasses.replace(_TP_STACK, name="tp2-ep2", world_size=4), _FORM),
    _interleaved("pp2-ep2", world_size=4),
    *_passes("tensor parallel, two hops", "nodes-tp", "2dh-tp"),
    *_passes(
        "experts over tensor-parallel ranks", "stack-recompute-tp-experts-ep", "rows-nodes-stack-cuda",
        "gathers-nodes-degree2",
    ),
    *_passes("context parallel", "cp4-ring", "unequal-tp-cp"),
]  # fmt: skip
CASES = {ranks: tuple(chosen) for ranks, chosen in ((2, OF_TWO), (4, OF_FOUR))}
"""By number of ranks, in the order in which they run."""
ONE_THREAD = ("partners", "chains")
"""Ways of which the stand-ins for CUDA do not know where tensors are: those know one thread."""
QUICK = ("passes: top2-several", "partners: stack-ddmm", "passes: rows-stack-lancet")
"""A few that have several communicators, for runs that only have to show whether they end."""


def main() -> int:
    """Be one of the ranks; returns the exit code."""
    parser = argparse.ArgumentParser(prog="one_device")
    parser.add_argument("--lines", type=Path, required=True, help="the file of all ranks")
    parser.add_argument("--rendezvous", type=Path, required=True)
    parser.add_argument("--on", choices=RUN_ON, default=RUN_ON[0])
    parser.add_argument("--cases", required=True, help="their names, as JSON")
    chosen = parser.parse_args()
    rank, num_ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    by_name = {one.name: one for one in CASES[num_ranks]}
    on_gpu = chosen.on == "cuda"
    store = _start(chosen.rendezvous, rank=rank, num_ranks=num_ranks, on_gpu=on_gpu)
    for number, name in enumerate(json.loads(chosen.cases)):
        _write(chosen.lines, begins=name, rank=rank)
        outcome, said = _result(by_name[name], on_gpu=on_gpu)
        _write(chosen.lines, case=name, rank=rank, outcome=outcome, said=said)
        if not _others_go_on(store, number, outcome=outcome, said=said, rank=rank, num_ranks=num_ranks):
            # Without the interpreter's end, which would wait for what no other rank joins.
            os._exit(BROKEN)
    _end()
    return 0


def _write(file: Path, **fields: object) -> None:
    """Append a line; short ones are written at once, so lines of several ranks do not mix."""
    line = json.dumps(fields) + "\n"
    with file.open("a", encoding="utf-8") as opened:
        opened.write(line)


def _start(rendezvous: Path, *, rank: int, num_ranks: int, on_gpu: bool) -> Any:
    """Create the process group; returns the store, over which ranks talk without their device."""
    if not on_gpu:
        from megatron_ampipe.launch import host

        host.install()
    import torch

    if on_gpu:
        torch.cuda.set_device(0)
    torch.set_num_threads(1)
    store = torch.distributed.FileStore(str(rendezvous), num_ranks)
    timeout = datetime.timedelta(seconds=TIMEOUT_S)
    torch.distributed.init_process_group(
        "nccl" if on_gpu else "gloo",
        store=torch.distributed.PrefixStore("groups", store),
        rank=rank,
        world_size=num_ranks,
        timeout=timeout,
    )
    return torch.distributed.PrefixStore("cases", store)


def _end() -> None:
    import torch

    from tests.dist.worker import end_groups

    torch.distributed.barrier()
    end_groups()
    torch.distributed.destroy_process_group()


def _others_go_on(store: Any, number: int, *, outcome: str, said: str, rank: int, num_ranks: int) -> bool:
    """Wait for the other ranks. If one of them has failed in another way, or the device has, none can go on:
    what one rank has not sent, another may still wait for.
    """
    ended = f"{outcome}: {said}" if outcome == "failed" else ""
    store.set(f"{number}/{rank}", ended)
    names = [f"{number}/{other}" for other in range(num_ranks)]
    store.wait(names, datetime.timedelta(seconds=TIMEOUT_S))
    all_ended = {store.get(name).decode() for name in names}
    return all_ended == {""} or (len(all_ended) == 1 and "CUDA error" not in said)


def _result(one: RankCase, *, on_gpu: bool) -> tuple[str, str]:
    """``equal``, ``different``, ``failed`` or ``skipped``, and the reason."""
    if one.needs is not None and (
        not on_gpu or importlib.util.find_spec(one.needs.partition(".")[0]) is None
    ):
        return "skipped", f"needs {one.needs}"
    try:
        with _stand_ins(one, on_gpu=on_gpu):
            found = WAYS[one.way](one)
    except Exception as error:
        import traceback

        traceback.print_exc()
        said = " ".join(f"{type(error).__name__}: {error}".split())
        return "failed", said[:300]
    allowed = tolerance(one.case)
    wrong = {name: value for name, value in found.items() if not value <= allowed}
    if wrong:
        worst = max(wrong, key=lambda name: wrong[name] if wrong[name] == wrong[name] else float("inf"))
        return (
            "different",
            f"{len(wrong)} of {len(found)}; {worst} by {wrong[worst]:.0e}, {allowed:.0e} allowed",
        )
    return "equal", f"{max(found.values(), default=0.0):.0e}"


@contextlib.contextmanager
def _stand_ins(one: RankCase, *, on_gpu: bool) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        if not on_gpu and one.way not in ONE_THREAD:
            from tests import cuda_standin

            stack.enter_context(cuda_standin.stand_ins())
        elif not on_gpu:
            from tests import cuda_graph_standin

            stack.enter_context(cuda_graph_standin.stand_ins())
        yield


def tolerance(case: Case) -> float:
    """How far AMPipe's layer may differ from Megatron's, relative to the largest value."""
    if case.model.get("bf16"):
        return _BF16_TOLERANCE
    return _WIRE_TOLERANCE if case.wire in ("fp8", "bf16") else _FP32_TOLERANCE


Found = dict[str, float]
"""By name, differences from Megatron's layer."""


def _layers(case: Case, **options: Any) -> list[Any]:
    from tests.gpu.test_cuda import on_device

    return on_device(case, **options)


def _compared(stock: Any, ours: Any, case: Case, *, number: int = 0) -> Found:
    """One pass of both. In bf16, what differs in its last bit may decide whether it is counted."""
    import torch

    from tests.dist.blocks import differences, run

    rank = torch.distributed.get_rank() + 8 * number
    found = differences(*(run(layer, case, rank=rank, device="cuda") for layer in (stock, ours)))
    if case.model.get("bf16"):
        found = {name: value for name, value in found.items() if "gradient" in name or name == "output"}
    return {f"{name}, pass {number}": value for name, value in found.items()}


def _passes_of(one: RankCase) -> Found:
    """Two, with other inputs: a second pass uses memory and state of the first."""
    stock, ours = _layers(one.case)
    return _compared(stock, ours, one.case) | _compared(stock, ours, one.case, number=1)


def _evaluation(one: RankCase) -> Found:
    """A training pass, an evaluation, a training pass."""
    import torch

    from tests.dist.blocks import differences, forward, inputs_of

    layers = stock, ours = _layers(one.case)
    found = _compared(stock, ours, one.case)
    outputs = []
    inputs = inputs_of(one.case, rank=torch.distributed.get_rank() + 80, device="cuda", dtype=torch.float32)
    for layer in layers:
        layer.eval()
        with torch.no_grad():
            outputs.append({"evaluated": forward(layer, inputs)[0]})
        layer.train()
    return found | differences(*outputs) | _compared(stock, ours, one.case, number=1)


class Halfway(Exception):
    """Raised on purpose."""


def _exception(one: RankCase) -> Found:
    """All ranks fail in the same stage, forward and then backward; the next pass must not know of it."""
    import torch

    from tests.dist.blocks import inputs_of, run_pass

    stock, ours = _layers(one.case)
    inputs = inputs_of(one.case, rank=torch.distributed.get_rank(), device="cuda", dtype=torch.float32)
    for fail in (_fail_forward, _fail_backward):
        hook = _second_expert_product(ours).register_forward_hook(fail)
        try:
            run_pass(ours, inputs)
        except Halfway:
            pass
        else:
            raise AssertionError(f"{fail.__name__} has not ended the pass")
        finally:
            hook.remove()
    ours.zero_grad()
    return _compared(stock, ours, one.case) | _compared(stock, ours, one.case, number=1)


def _second_expert_product(layer: Any) -> Any:
    """Of the last layer, so that halfway forward and backward differ."""
    products = [module for name, module in layer.named_modules() if name.endswith("linear_fc2")]
    return products[-1]


def _fail_forward(*_: object) -> None:
    raise Halfway


def _fail_backward(_module: object, _inputs: object, output: Any) -> None:
    def fail(_gradient: object) -> None:
        raise Halfway

    tensor = output[0] if isinstance(output, tuple) else output
    tensor.register_hook(fail)


def _reductions(one: RankCase) -> Found:
    """Gradients under data parallelism whose reductions are stages of the schedule: two iterations of two."""
    import torch

    from megatron_ampipe.runtime.reductions import Reductions
    from tests.dist.blocks import differences

    reductions = Reductions(on_cuda=torch.cuda.is_available(), with_experts=True)
    stock = _layers(one.case)[0]
    ours = _layers(one.case, reductions=reductions)[1]
    return differences(_trained(stock, one.case, None), _trained(ours, one.case, reductions))


def _trained(layer: Any, case: Case, reductions: Any) -> dict[str, Any]:
    """What Megatron's optimizer would get."""
    import torch
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

    from megatron_ampipe.launch.hooks import PlacedReductions
    from tests.dist import routing_records
    from tests.dist.blocks import forward, inputs_of

    settings = DistributedDataParallelConfig(
        overlap_grad_reduce=True, grad_reduce_in_fp32=True, bucket_size=4000
    )
    model = DistributedDataParallel(getattr(layer, "layers", [layer])[0].config, settings, layer)
    if reductions is not None:
        PlacedReductions(reductions).models_built([model])
    dtype, found = next(layer.parameters()).dtype, {}
    for iteration in range(2):
        model.zero_grad_buffer()
        model.set_is_first_microbatch()
        for number in range(2):
            rank = torch.distributed.get_rank() + 8 * (2 * iteration + number)
            inputs = inputs_of(case, rank=rank, device="cuda", dtype=dtype)
            with (
                contextlib.nullcontext() if number else model.no_sync(),
                routing_records.watched(layer, case),
            ):
                forward(model, inputs)[0].backward(inputs.gradient)
        model.finish_grad_sync()
        for name, parameter in layer.named_parameters():
            found[f"gradient of {name}, iteration {iteration}"] = parameter.main_grad.clone()
    return found


def _graphs(one: RankCase) -> Found:
    """Steps of three micro-batches in 1F1B order: one warms up, one captures, two replay.

    With fixed rows, a graph is a whole pass; the last step exceeds a budget, and is repeated with exact rows.
    """
    import torch

    from tests.dist.blocks import capture, differences
    from tests.dist.micro_batches import step_in_order
    from tests.dist.test_fixed_rows import fixed_rows_of
    from tests.dist.test_whole_graphs import set_budgets, use_budget

    stock, ours = _layers(one.case)
    is_fixed = one.case.fixed_rows
    capture(ours, {"full"} if is_fixed else ("attn", "moe_router", "moe_preprocess"), warm_up=3)
    rows = fixed_rows_of(ours)
    if is_fixed:
        rows.is_watched = True
        step_in_order(ours, one.case, "F0 F1 B0 F2 B1 B2")
        set_budgets(rows, device="cuda")
    found = {}
    for number in range(5 if is_fixed else 4):
        if number == 4:
            use_budget(rows._chunks[-1], lambda count: count // 8, device="cuda")
            rows.begin_step()
            step_in_order(ours, one.case, "F0 F1 B0 F2 B1 B2")
            found["exceeded, in place of 1"] = 1.0 - rows.overflow(torch.device("cuda")).item()
            rows.is_active = False
        for layer in (stock, ours):
            layer.zero_grad()
        results = [step_in_order(layer, one.case, "F0 F1 B0 F2 B1 B2") for layer in (stock, ours)]
        found |= {f"{name}, step {number}": value for name, value in differences(*results).items()}
        with torch.no_grad():
            for of_stock, of_ours in zip(stock.parameters(), ours.parameters(), strict=True):
                of_ours.copy_(of_stock.mul_(0.9))
    return found


def _partners(one: RankCase) -> Found:
    """A step of three micro-batches."""
    from tests.dist.blocks import differences
    from tests.dist.micro_batches import step

    stock, ours = _layers(one.case)
    return differences(step(stock, one.case), step(ours, one.case, partner=one.partner))


def _chains(one: RankCase) -> Found:
    """Steps of three micro-batches as chains of graphs: one is recorded, one captured, the others replayed.

    The last but one exceeds a budget, and is repeated with exact rows.
    """
    import torch

    from megatron_ampipe.runtime.partners import Partners
    from tests.dist.blocks import capture, differences
    from tests.dist.micro_batches import step
    from tests.dist.test_fixed_rows import fixed_rows_of
    from tests.dist.test_whole_graphs import change_weights, context_of, set_budgets, use_budget

    stock, ours = _layers(one.case)
    capture(ours, {"full"}, warm_up=1)
    context, rows = context_of(ours), fixed_rows_of(ours)
    context.partners, rows.is_watched = Partners(), True
    step(ours, one.case, partner=one.partner)
    set_budgets(rows, device="cuda")
    found = {}
    for number in range(6):
        rows.is_active = True
        if number == 4:
            usual = rows._chunks[-1].budget
            use_budget(rows._chunks[-1], lambda count: count // 8, device="cuda")
            rows.begin_step()
            step(ours, one.case, partner=one.partner)
            found["exceeded, in place of 1"] = 1.0 - rows.overflow(torch.device("cuda")).item()
            rows.is_active = False
            rows._chunks[-1].use(usual, torch.device("cuda"))
        for layer in (stock, ours):
            layer.zero_grad()
        results = (
            step(stock, one.case, first=10 * number),
            step(ours, one.case, partner=one.partner, first=10 * number),
        )
        found |= {f"{name}, step {number}": value for name, value in differences(*results).items()}
        change_weights(stock, ours)
    assert context.partners.graphs._chain.links, "graphs were captured"
    return found


def _waits(one: RankCase) -> Found:
    """torch raises where the host waits for the device, but for AMPipe's event of the counts."""
    import torch

    from tests.gpu.test_cuda import run_without_waits

    stock, ours = _layers(one.case)
    run_without_waits(ours, one.case, passes=2, rank=torch.distributed.get_rank())
    return _compared(stock, ours, one.case)


def _interleaved_step(one: RankCase) -> Found:
    """Two iterations of Megatron's interleaved schedule."""
    from tests.dist.blocks import differences
    from tests.dist.interleaved import step

    layers = stock, ours = _layers(one.case)
    found = {}
    for number in range(2):
        for layer in layers:
            layer.zero_grad()
        results = differences(step(stock, one.case), step(ours, one.case))
        found |= {f"{name}, step {number}": value for name, value in results.items()}
    return found


WAYS: dict[str, Callable[[RankCase], Found]] = {
    "passes": _passes_of,
    "evaluation": _evaluation,
    "exception": _exception,
    "reductions": _reductions,
    "graphs": _graphs,
    "partners": _partners,
    "chains": _chains,
    "waits": _waits,
    "interleaved": _interleaved_step,
}


if __name__ == "__main__":
    sys.exit(main())
