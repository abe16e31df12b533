"""Converts a model file into a workload: the sizes of its block, and the layers of a pipeline stage.

Checks the values of the flags that :mod:`.model_file` read, without Megatron. Called by ``ampipe plan``, and
at launch with the flags of the run in place of a file.
"""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any, NoReturn

from megatron_ampipe.errors import BadInput
from megatron_ampipe.hybrid_pattern import HybridPattern
from megatron_ampipe.plan.cluster import Cluster, Dtype
from megatron_ampipe.plan.model_file import SIZE_FLAGS, ModelFile
from megatron_ampipe.plan.stage_layers import StageLayers, busiest_stage, pattern_of
from megatron_ampipe.plan.workload import Workload
from megatron_ampipe.records import refuse
from megatron_ampipe.schedule import Exchange
from megatron_ampipe.schedule.features import chooses_at_once, router_has_losses, uses_ring_attention
from megatron_ampipe.spelling import meant

_LARGEST = 10**7
"""The largest value of any size. Time and memory of planning grow with the number of experts."""


def workload_of(
    model: ModelFile, cluster: Cluster | None, *, ranks: int | None = None, imbalance: float = 1.0
) -> tuple[Workload, tuple[str, ...]]:
    """The workload of a model on a cluster.

    Args:
        model: What :func:`.model_file.read_model` read.
        cluster: Gives the dtype and the number of ranks where these are not given; None for a model file that
            names its dtype, or trains in fp32.
        ranks: Number of ranks of the run; those of one node of the cluster if None.
        imbalance: See :class:`Workload`.

    Returns:
        The workload, and a sentence for each assumption about what the model file does not specify.

    Raises:
        BadInput: a value is missing or invalid; the message names file and line.
    """
    if ranks is None:
        assert cluster is not None
        ranks = cluster.ranks_per_node
    return _Builder(model, cluster, ranks, imbalance).build()


def layers_of(model: ModelFile) -> StageLayers:
    """The layers of the busiest pipeline stage of a model; one layer if the file does not say how many.

    Raises:
        BadInput: a value is invalid; the message names file and line.
    """
    return _Builder(model, None, 1, 1.0).layers()


class _Builder:
    def __init__(self, model: ModelFile, cluster: Cluster | None, ranks: int, imbalance: float) -> None:
        self._model, self._cluster, self._ranks, self._imbalance = model, cluster, ranks, imbalance
        self._assumed: list[str] = []

    def build(self) -> tuple[Workload, tuple[str, ...]]:
        hidden, heads = self._whole("hidden-size"), self._whole("num-attention-heads")
        head_size = self._whole("kv-channels", default=max(1, hidden // heads))
        if "kv-channels" not in self._model.values and hidden % heads:
            rule = f"does not divide hidden-size {hidden}, and kv-channels is not given"
            self._refuse("num-attention-heads", rule, "Choose a divisor, or set kv-channels.")
        ffn = self._whole("ffn-hidden-size", default=4 * hidden)
        experts = self._whole("num-experts")
        sequence_length = self._whole("seq-length")
        latent = self._on("multi-latent-attention")
        value_size = self._whole("v-head-dim", default=128) if latent else head_size
        projections, key_value_width = self._projections(hidden, heads, head_size, latent=latent)
        sizes, of_stage = self._parallel_sizes(experts), self._ranks // self.pipeline_stages()
        settings = self._settings(sizes["context"])
        workload = Workload(
            sequence_length=sequence_length,
            batch=self._whole("micro-batch-size", default=1),
            hidden=hidden,
            heads=heads,
            head_size=self._latent_head() if latent else head_size,
            value_size=value_size,
            projections=projections,
            key_value_width=key_value_width,
            experts=experts,
            topk=self._whole("moe-router-topk", default=2),
            ffn=self._whole("moe-ffn-hidden-size", default=ffn),
            gated=self._on("swiglu"),
            shared_ffn=self._whole("moe-shared-expert-intermediate-size", default=0) or None,
            dense_ffn=ffn if self.layers().dense else None,
            capacity=settings.moe_expert_capacity_factor,
            capacity_per_chunk=self._model.own.capacity_scope == "chunk",
            chooses=chooses_at_once(settings, self._model.own),
            padded=self._on("moe-pad-expert-input-to-capacity"),
            imbalance=self._imbalance,
            grouped=self._on("moe-grouped-gemm"),
            dispatcher=self._dispatcher(),
            dtype=self._dtype(),
            losses=router_has_losses(settings),
            window=settings.window_size,
            ring=uses_ring_attention(settings),
            latent=latent,
            fused_gradients=not self._on("no-gradient-accumulation-fusion"),
            recomputes=self._model.values.get("recompute-granularity") == "full",
            exchange=Exchange.ROWS,
            local=self._model.values.get("transformer-impl") == "local",
            splits_weights=self._model.values.get("transformer-impl") == "local"
            and not self._on("moe-grouped-gemm"),
            ranks_per_node=None if self._cluster is None else self._cluster.ranks_per_node,
            replicas=max(1, of_stage // sizes["tensor"]),
            expert_replicas=max(1, of_stage // (sizes["expert"] * sizes["expert_tensor"])),
            shards_optimizer=self._on("use-distributed-optimizer"),
            **sizes,
        )
        self._check(workload)
        for key, near in self._misspelt().items():
            place = f"{self._model.path}:{self._model.lines[key]}"
            self._assumed.append(f"{key} ({place}) is not read by the planner; did you mean {near}?")
        return workload, tuple(self._assumed)

    def pipeline_stages(self) -> int:
        return self._whole("pipeline-model-parallel-size", default=1)

    def _settings(self, context_ranks: int) -> SimpleNamespace:
        """What the features of a block depend on, by Megatron's names, and with its defaults."""
        values, dropout = self._model.values, self._number("attention-dropout")
        coefficients = values.get("moe-aux-loss-coeff", 0.0)
        return SimpleNamespace(
            context_parallel_size=context_ranks,
            cp_comm_type=values.get("cp-comm-type"),
            attention_dropout=0.1 if dropout is None else dropout,
            window_size=self._window(),
            softmax_type=values.get("softmax-type", "vanilla"),
            qk_clip=self._on("qk-clip"),
            log_max_attention_logit=self._on("log-max-attention-logit"),
            moe_expert_capacity_factor=self._number("moe-expert-capacity-factor"),
            moe_token_drop_policy=values.get("moe-token-drop-policy", "probs"),
            moe_router_load_balancing_type=self._balancing(),
            moe_aux_loss_coeff=[
                self._as_number("moe-aux-loss-coeff", coefficient, signed=True)
                for coefficient in (coefficients if isinstance(coefficients, list) else [coefficients])
            ],
            moe_z_loss_coeff=self._number("moe-z-loss-coeff", signed=True),
        )

    def layers(self) -> StageLayers:
        first = self._whole("decoder-first-pipeline-num-layers", default=0) or None
        last = self._whole("decoder-last-pipeline-num-layers", default=0) or None
        if "hybrid-layer-pattern" in self._model.values:
            return self._hybrid_layers(first, last)
        num_layers = self._whole("num-layers", default=1)
        frequency = self._model.values.get("moe-layer-freq", 1)
        try:
            pattern = pattern_of(frequency, num_layers) if "num-layers" in self._model.values else (True,)
        except ValueError as error:
            remedy = "Write 2 for every second layer, or a pattern such as ([0]*1+[1]*11)."
            self._refuse("moe-layer-freq", str(error), remedy)
        stages = self.pipeline_stages()
        if "num-layers-per-virtual-pipeline-stage" in self._model.values:
            stages = max(stages, num_layers // self._whole("num-layers-per-virtual-pipeline-stage"))
        else:
            stages *= self._whole("num-virtual-stages-per-pipeline-rank", default=1)
        return busiest_stage(pattern, stages=stages)

    def _hybrid_layers(self, first: int | None, last: int | None) -> StageLayers:
        """Pairs of a hybrid model share schedules in runs; every stage is planned as its longest run."""
        key, stages = "hybrid-layer-pattern", self.pipeline_stages()
        text = self._model.values[key]
        pattern = None
        if isinstance(text, str):
            pattern = HybridPattern.of(text, stages=stages, first=first, last=last)
        if pattern is None or not pattern.runs:
            rule = "has no attention layer (* or +) with an MoE layer (E) right after it"
            self._refuse(key, rule, "Use a pattern such as M*EM*E.")
        run = max(pattern.runs, key=lambda one: (sum(one), len(one)))
        return busiest_stage(run * stages, stages=stages)

    def _misspelt(self) -> dict[str, str]:
        """Keys of the file that are probably misspelled, with the key that was probably meant."""
        found = {key: meant(key, SIZE_FLAGS) for key in self._model.values}
        return {key: near for key, near in found.items() if near is not None}

    def _projections(
        self, hidden: int, heads: int, head_size: int, *, latent: bool
    ) -> tuple[tuple[tuple[int, int], ...], int]:
        if not latent:
            groups = heads
            if self._on("group-query-attention"):
                groups = self._whole("num-query-groups", default=1)
                if heads % groups:
                    rule = f"does not divide num-attention-heads {heads}"
                    self._refuse("num-query-groups", rule, "Choose a divisor.")
            width = 2 * groups * head_size
            return ((hidden, heads * head_size + width),), width
        rank = self._whole("kv-lora-rank", default=32)
        nope = self._whole("qk-head-dim", default=128)
        rotary = self._whole("qk-pos-emb-head-dim", default=64)
        value = self._whole("v-head-dim", default=128)
        products = [(hidden, rank + rotary), (rank, heads * (nope + value))]
        query = heads * (nope + rotary)
        if compressed := self._whole("q-lora-rank", default=0):
            products += [(hidden, compressed), (compressed, query)]
        else:
            products.append((hidden, query))
        return tuple(products), heads * (nope + rotary + value)

    def _latent_head(self) -> int:
        return self._whole("qk-head-dim", default=128) + self._whole("qk-pos-emb-head-dim", default=64)

    def _parallel_sizes(self, experts: int) -> dict[str, Any]:
        tensor = self._whole("tensor-model-parallel-size", default=1)
        context = self._whole("context-parallel-size", default=1)
        pipeline = self.pipeline_stages()
        expert_tensor = self._whole("expert-tensor-parallel-size", default=tensor)
        stage = self._ranks // pipeline
        if "expert-model-parallel-size" in self._model.values:
            expert = self._whole("expert-model-parallel-size")
        else:
            room = max(1, stage // expert_tensor)
            expert = max(size for size in range(1, min(room, experts) + 1) if experts % size == 0)
            self._assumed.append(
                f"expert-model-parallel-size {expert}: the model names none; this is the largest divisor of "
                f"{experts} that fits on {self._ranks} ranks"
            )
        return {"tensor": tensor, "context": context, "expert": expert, "expert_tensor": expert_tensor}

    def _dtype(self) -> Dtype:
        if "fp8-format" in self._model.values:
            return "fp8"
        for name in ("bf16", "fp16"):
            if self._on(name):
                return name
        known = {} if self._cluster is None else self._cluster.compute.gemm
        found: Dtype = next((name for name in ("bf16", "fp16") if name in known), "fp32")
        self._assumed.append(f"{found}: the model file does not set a precision")
        return found

    def _dispatcher(self) -> str:
        found = self._model.values.get("moe-token-dispatcher-type", "allgather")
        if found not in ("alltoall", "allgather"):
            self._refuse("moe-token-dispatcher-type", "cannot be pipelined", "Use alltoall or allgather.")
        return str(found)

    def _balancing(self) -> list[str]:
        kinds = self._model.values.get("moe-router-load-balancing-type", "aux_loss")
        return [str(kind) for kind in (kinds if isinstance(kinds, list) else [kinds])]

    def _window(self) -> int | None:
        found = self._model.values.get("window-size")
        if found is None:
            return None
        parts = found if isinstance(found, list) else str(found).strip("()").split(",")
        try:
            left, right = (int(part) for part in parts)
        except ValueError:
            self._refuse("window-size", "is not two whole numbers", "Write for example '128,0'.")
        if right != 0:
            self._refuse(
                "window-size", "attends to later keys, which is not causal", "Write for example '128,0'."
            )
        return left if left >= 0 else None

    def _check(self, workload: Workload) -> None:
        slices = workload.tensor * workload.context * (2 if workload.context > 1 else 1)
        if workload.sequence_length % slices:
            multiple = -(-workload.sequence_length // slices) * slices
            rule = f"must be a multiple of {slices} for this tensor and context parallelism"
            self._refuse("seq-length", rule, f"Write for example {multiple}.")
        if workload.experts % workload.expert:
            key = "expert-model-parallel-size"
            self._refuse(key, f"does not divide {workload.experts} experts", "Choose a divisor.")
        if workload.topk > workload.experts:
            rule = f"is above num-experts {workload.experts}"
            self._refuse("moe-router-topk", rule, f"Choose at most {workload.experts}.")
        busiest = workload.expert * min(1.0, workload.local_experts / workload.topk)
        if workload.imbalance > busiest * (1 + 1e-9):
            raise BadInput(
                "--imbalance",
                f"{workload.imbalance:g}",
                rule=f"none of the {workload.expert} expert-parallel ranks can have more than "
                f"{busiest:g} times the mean: a token is sent to each of its experts once",
                remedy=f"Use {busiest:g} or less.",
            )
        needed = workload.expert * workload.expert_tensor
        if needed > self._ranks:
            rule = f"{needed} ranks share the experts of a layer, and there are {self._ranks}"
            self._refuse("expert-model-parallel-size", rule, f"Give --ranks {needed} or more.")

    def _whole(self, key: str, *, default: int | None = None) -> int:
        found = self._model.values.get(key)
        if found is None:
            if default is None:
                remedy = f"Add '{key}: ...', or give --set {key}=..."
                for wrong, near in self._misspelt().items():
                    if near == key:
                        remedy = f"Write {key} in place of {wrong} in line {self._model.lines[wrong]}."
                refuse(self._model.path, 1, key, "is missing", remedy)
            return default
        if type(found) is not int or found < (0 if default == 0 else 1):
            self._refuse(key, "must be a whole number of at least 1", "Write for example 8.")
        if found > _LARGEST:
            self._refuse(key, f"must be at most {_LARGEST}", "Write for example 8.")
        return found

    def _number(self, key: str, *, signed: bool = False) -> float | None:
        found = self._model.values.get(key)
        return None if found is None else self._as_number(key, found, signed=signed)

    def _as_number(self, key: str, found: object, *, signed: bool = False) -> float:
        try:
            # YAML reads 1e-3, without a point, as text.
            number = float(found)  # type: ignore[arg-type]
        except (TypeError, ValueError):
            self._refuse(key, "must be a number", "Write for example 1.25.")
        if not math.isfinite(number) or (number < 0 and not signed):
            rule = "must be a finite number" if signed else "must be at least 0"
            self._refuse(key, rule, "Write for example 1.25, or leave it out.")
        return number

    def _on(self, key: str) -> bool:
        found = self._model.values.get(key, False)
        if not isinstance(found, bool):
            self._refuse(key, "must be true or false", f"Write '{key}: true'.")
        return found

    def _refuse(self, key: str, rule: str, remedy: str) -> NoReturn:
        shown = f"{key} {self._model.values.get(key, '(default)')}"
        line = self._model.lines.get(key, 1)
        if line == 0:
            raise BadInput("--set", shown, rule=rule, remedy=remedy)
        refuse(self._model.path, line, shown, rule, remedy)
