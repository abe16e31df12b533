"""Layouts whose gradients differ from one rank's in Megatron itself, with and without AMPipe.

Reproductions of what Megatron-LM's issue 7452 and related ones report, as far as these could be read, on CPUs
with gloo. Trainings run one iteration from one checkpoint and compare all of Adam's first moments; single
layers compare one gradient. From the repository's root, in half a minute:

    PYTHONPATH=. python docs/measured/layouts.py docs/measured/results/layouts.json
"""

from __future__ import annotations

import json
import random
import shlex
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from megatron_ampipe.cli import main as ampipe
from megatron_ampipe.launch import host
from megatron_ampipe.tools.measuring import machine
from megatron_ampipe.tools.measuring.network import parse_link
from megatron_ampipe.tools.measuring.ranks import Rank, RankJob, run_ranks
from tests.megatron.launcher import runs_of
from tests.megatron.test_training import first_moments
from tests.megatron.trainings import COMMON, CP, GQA, ROPE

OURS = "--ampipe-degree 4 --ampipe-stack 1"
FLAGS = f"{ROPE} {GQA} --eod-mask-loss --clip-grad 0 --seq-length 64 --split 100,0,0 --vocab-size 256"
PER_TOKEN, MTP = "--calculate-per-token-loss", "--mtp-num-layers 1"
ONE, TWO = "--micro-batch-size 2 --global-batch-size 2", f"{CP} --micro-batch-size 2 --global-batch-size 2"
TRAININGS = {
    "context parallelism, masked tokens": ("", TWO),
    "the same, loss per token": (PER_TOKEN, TWO),
    "multi-token prediction, loss per token, context parallelism": (f"{PER_TOKEN} {MTP}", TWO),
}


def main() -> None:
    """Run everything, print it, and write the document."""
    (file,) = sys.argv[1:]
    trained = dict(trainings())
    (alone, *_) = run_ranks(RankJob(num_ranks=2, link=parse_link(None)), layers_alone)
    document = {
        "command": ["python", *sys.argv],
        "hardware": machine.hardware(),
        "versions": machine.versions(),
        "trainings": trained,
        "layers": alone,
    }
    print(json.dumps({"trainings": trained, "layers": alone}, indent=1))
    Path(file).write_text(json.dumps(document, indent=1) + "\n")


def trainings() -> Iterator[tuple[str, dict[str, float]]]:
    """By combination the largest difference of a moment, relative to its largest value."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        data = _data(folder)

        def words(number: int, kind: str, flags: str, *, load: bool) -> list[str]:
            text = f"{FLAGS} {flags} --data-path {data} --data-cache-path {folder / 'cache'} --train-iters 1"
            text += f" --save-interval 1 --save {folder / f'{number}-{kind}'}"
            if load:
                text += f" --load {folder / f'{number}-made'} --ckpt-step 1 --no-load-rng --no-load-optim"
                text += " --finetune"
            return [*COMMON, *shlex.split(text)]

        for number, (combination, (flags, layout)) in enumerate(TRAININGS.items()):
            runs_of({"made": words(number, "made", f"{flags} {ONE}", load=False)}, num_ranks=1)
            runs_of({"one": words(number, "one", f"{flags} {ONE}", load=True)}, num_ranks=1)
            kinds = {"stock": "", "ampipe": OURS}
            lines = {
                kind: words(number, kind, f"{flags} {layout} {own}", load=True) for kind, own in kinds.items()
            }
            runs_of(lines, num_ranks=2)
            moments = {
                kind: {
                    key.partition("exp_avg.")[2]: value
                    for key, value in first_moments(folder / f"{number}-{kind}/iter_0000001").items()
                }
                for kind in ("one", *kinds)
            }
            yield (
                combination,
                {
                    "stock, from one rank": _furthest(moments["one"], moments["stock"]),
                    "ampipe, from one rank": _furthest(moments["one"], moments["ampipe"]),
                    "ampipe, from stock": _furthest(moments["stock"], moments["ampipe"]),
                },
            )


def _data(folder: Path) -> Path:
    """Text of which 29 % of the tokens are masked, unequally over a sequence."""
    texts, numbers = folder / "texts", random.Random(3)
    texts.mkdir()
    for number in range(120):
        length = numbers.choice([1, 1, 1, 2, 50])
        for part in range(1 if length == 50 else 14):
            text = "".join(numbers.choices("abcdefgh ", k=length))
            (texts / f"{number:04}-{part:02}.txt").write_text(text)
    assert ampipe(["data", str(texts), "--output", str(folder / "uneven"), "--document-bytes", "0"]) == 0
    return folder / "uneven"


def _furthest(expected: dict[str, Any], found: dict[str, Any]) -> float:
    assert expected.keys() == found.keys()
    return max(_difference(expected[key], found[key]) for key in expected)


def _difference(expected: Any, found: Any) -> float:
    return float((expected - found).abs().max() / expected.abs().max())


def layers_alone(rank: Rank[RankJob]) -> dict[str, Any]:
    """What single layers compute on two ranks; run in each of them."""
    rank.connect()
    host.install()
    import torch
    import torch.distributed as dist
    from megatron.core.tensor_parallel.layers import param_is_not_tensor_parallel_duplicate
    from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler
    from megatron.core.transformer.spec_utils import build_module

    from megatron_ampipe.errors import BadInput
    from tests.dist import blocks
    from tests.dist.cases import AUX, DELTA, LATENT, SINKS, SWIGLU, TOP2, TP, Case
    from tests.dist.worker import use_groups
    from tests.gated_delta_net_standin import with_gated_delta_net

    whole = {"tensor_model_parallel_size": 1, "expert_model_parallel_size": 1}

    def total(value: Any) -> float:
        summed = torch.tensor(float(value), dtype=torch.float64)
        dist.all_reduce(summed)
        return summed.item()

    def sinks() -> dict[str, float]:
        """The norm of the sinks' gradient, and what Megatron counts of it."""
        use_groups(**TP)
        case, found = Case("sinks", parallel=TP, rope=True, model=SINKS | TOP2), {}
        for kind, layer in zip(("stock", "ampipe"), blocks.build_layers(case), strict=True):
            blocks.run(layer, case, rank=rank.number)
            parameter = layer.self_attention.core_attention.softmax_offset
            square = parameter.grad.double().square().sum()
            counted = square if param_is_not_tensor_parallel_duplicate(parameter) else 0 * square
            found[f"{kind}, norm"], found[f"{kind}, counted"] = total(square) ** 0.5, total(counted) ** 0.5
        return found

    def padding_mask() -> dict[str, float | str]:
        """The gradient of the auxiliary loss per token on two ranks, over that of one."""
        found = []
        for parallel in (whole, TP):
            use_groups(**parallel)
            settings = {"calculate_per_token_loss": True, "moe_router_dtype": "fp64"}
            case = Case("mask", parallel=parallel, batch=1, model=TOP2 | AUX | settings)
            router = blocks.build_layers(case)[0].mlp.router
            torch.manual_seed(1)
            with torch.no_grad():
                router.weight.copy_(torch.randn(4, 32) * 0.3)
            hidden = torch.randn(32, 1, 32, generator=torch.Generator().manual_seed(2))
            padding = torch.zeros(32, 1, dtype=torch.bool)
            padding[20:] = True
            if parallel is TP:
                hidden, padding = (tensor.chunk(2)[rank.number] for tensor in (hidden, padding))
            MoEAuxLossAutoScaler.set_loss_scale(torch.tensor(1.0))
            probs, _ = router(hidden.clone(), padding)
            (probs.sum() * 0).backward()
            gradient = router.weight.grad.clone()
            if parallel is TP:
                dist.all_reduce(gradient)
            found.append(gradient)
        one, two = found
        per_token = {"calculate_per_token_loss": True}
        ours = blocks.build_layers(Case("mask", parallel=TP, model=TOP2 | AUX | per_token))[1]
        mask = torch.zeros(1, 16, dtype=torch.bool)
        try:
            ours(hidden_states=torch.randn(16, 1, 32), attention_mask=None, padding_mask=mask)
            said = "runs"
        except BadInput as error:
            said = f"refused: {error}"
        return {"stock, of one rank's": float((one * two).sum() / one.square().sum()), "ampipe": said}

    def latent() -> dict[str, float]:
        """The gradient of the product to latents and the positional key, compared with one rank's."""
        gradients = []
        for number in (1, 2):
            parallel = {"tensor_model_parallel_size": number}
            use_groups(**parallel)
            case = Case("latent", parallel=parallel, layers="d", model=LATENT)
            config = blocks.transformer_config(case)
            config.sequence_parallel = False
            layer = build_module(blocks.layer_specs(case, config)[0], config=config, layer_number=1)
            attention, generator = layer.self_attention, torch.Generator().manual_seed(3)
            for _, parameter in sorted(attention.named_parameters()):
                shape = list(parameter.shape)
                if split := number > 1 and getattr(parameter, "tensor_model_parallel", False):
                    shape[parameter.partition_dim] *= 2
                weight = torch.randn(shape, generator=generator) * 0.2
                with torch.no_grad():
                    parameter.copy_(
                        weight.chunk(2, parameter.partition_dim)[rank.number] if split else weight
                    )
            hidden, above = (
                torch.randn(16, 1, 32, generator=torch.Generator().manual_seed(seed)) for seed in (5, 6)
            )
            attention(hidden, None)[0].backward(above)
            weight = attention.linear_kv_down_proj.weight
            gradient = weight.grad.clone()
            if number > 1 and getattr(weight, "tensor_model_parallel", False):
                parts = [torch.empty_like(gradient) for _ in range(2)]
                dist.all_gather(parts, gradient)
                gradient = torch.cat(parts)
            gradients.append(gradient)
        of_key = LATENT["kv_lora_rank"]
        parts = {"latents": slice(None, of_key), "positional key": slice(of_key, None)}
        one, two = gradients
        return {f"stock, {name}": _difference(one[rows], two[rows]) for name, rows in parts.items()}

    def delta_net() -> dict[str, float]:
        """How far the gradient of a weight that every rank has differs between two ranks."""
        parallel = {"tensor_model_parallel_size": 2}
        use_groups(**parallel)
        case = Case("delta", parallel=parallel, layers="d", model=SWIGLU | DELTA)
        config = blocks.transformer_config(case)
        config.sequence_parallel = False
        spec = with_gated_delta_net(blocks.layer_specs(case, config)[0])
        attention = build_module(spec, config=config, layer_number=1).self_attention
        hidden, above = (
            torch.randn(16, 1, 32, generator=torch.Generator().manual_seed(seed)) for seed in (5, 6)
        )
        attention(hidden, None)[0].backward(above)
        gradient = attention.out_norm.weight.grad
        both = [torch.empty_like(gradient) for _ in range(2)]
        dist.all_gather(both, gradient)
        return {"stock, between ranks": _difference(*both)}

    studies: dict[str, Callable[[], dict[str, Any]]] = {
        "sinks, two tensor-parallel ranks": sinks,
        "padding mask, loss per token, two tensor-parallel ranks": padding_mask,
        "latent attention, local layers, two tensor-parallel ranks": latent,
        "gated delta net, two tensor-parallel ranks": delta_net,
    }
    return {name: study() for name, study in studies.items()}


if __name__ == "__main__":
    main()
