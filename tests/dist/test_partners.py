"""Compares steps of micro-batches with partners with those of Megatron's layers: all gradients (fp32)."""

import pytest

from megatron_ampipe.schedule import LISTED, Partner, program_from_text
from tests import deep_ep_standin
from tests.dist.cases import PARITY, Case

TOLERANCE = 1e-5
NAMES = """
    degree2-ampipe-sequential degree4-ampipe-thread cuda-executor-ampipe-degree8 ranks-degree1
    rows-degree1-lancet top2-several capacity-aux-z capacity-padded-expert-bias shared unequal-odd-length
    recompute-moe-expert-bias stack-ddmm stack-two-degrees stack-shares stack-mla-tp stack-tp2-degree3-3
    window-tp stack-recompute-dense-first stack-recompute-cuda-executor stack-recompute-tp-experts-ep
    cp-odd cp4-ring-gate-degree4-2 unequal-tp-cp documents-stack-recompute documents-many-batch3
    memory-offload-S2-S3-keep-stack memory-redispatch-keep-rebuild-stack-cuda-executor gate-hash-tp-stack
    lancet-stack-recompute lancet-joined-stack-tp2 flex-stack-recompute ranks-two-degrees-shared
    nodes-stack-recompute 2dh-redispatch gathers-nodes-lancet rows-stack-recompute rows-nodes-stack-cuda
    choice-quantile-stack-recompute latent-experts-stack-recompute wire-halves-two-degrees
    padding-losses padding-expert-bias-stack-recompute padding-tp-stack
    replay-recorded-stack-recompute replay-prescribed-stack-recompute
    again-moe-act-stack-joined again-layernorm-stack-tp again-every-module-mla
""".split()  # noqa: SIM905
CASES = sorted((case for case in PARITY if case.name in NAMES), key=lambda case: str(case.parallel))


def test_every_case_exists() -> None:
    assert {case.name for case in CASES} == set(NAMES)


SEARCHED = """
compute: next:expert.0@-1 losses expert.0 next:merge.0@-1 next:qkv.0 next:attention.0 next:losses route.0
 next:route.0 attention.0 qkv.0 merge.0@1
comm: combine.0@1 next:combine.0 dispatch.0@1 next:counts.0@1 next:dispatch.0@1
""".replace("\n ", " ").strip()
"""What a planner may find: it knows neither weight gradients apart nor what other blocks have."""
WAYS = {
    "megatron": Partner(),
    "listed": Partner(order=LISTED),
    "searched": Partner(period=program_from_text(SEARCHED, degree=1)),
    "degree2": Partner(2),
}
ALL_WAYS = {
    "degree4-ampipe-thread", "cuda-executor-ampipe-degree8", "capacity-aux-z", "unequal-odd-length",
    "stack-ddmm", "stack-mla-tp", "documents-stack-recompute", "lancet-joined-stack-tp2",
    "rows-stack-recompute",
}  # fmt: skip


@pytest.mark.parametrize(
    ("case", "way"),
    [
        pytest.param(case, way, id=f"{case.name}-{way}", marks=pytest.mark.ranks(case.world_size))
        for case in CASES
        for way in WAYS
        if way == "megatron" or case.name in ALL_WAYS
    ],
)
def test_equals_stock(case: Case, way: str) -> None:
    from tests.dist.blocks import build_layers, wrong
    from tests.dist.micro_batches import step

    deep_ep_standin.install()
    stock, ours = build_layers(case)
    assert wrong(step(stock, case), step(ours, case, partner=WAYS[way]), TOLERANCE) == {}
