"""What users' scripts do to a model: hooks, frozen parameters, adapters, teachers, skipped batches.

Each script changes a stock model and AMPipe's in the same way. Both then train identically (fp32), or AMPipe
refuses the script in one line.
"""

import contextlib
import functools
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.distributed._composable import checkpoint as composable_checkpoint
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.utils.checkpoint import checkpoint

from megatron_ampipe.schedule import Partner
from tests import cuda_graph_standin
from tests.dist.cases import AUX, IN_MDM, MOE_AGAIN, SHARED, SWIGLU, TOP2, Case, Z

pytestmark = pytest.mark.ranks(2)

TOLERANCE = 1e-5
ALONE = Case("alone", batch=2, model=TOP2 | AUX | Z | SWIGLU | SHARED)
STACK = replace(ALONE, name="stack", **IN_MDM)


@dataclass(frozen=True)
class Way:
    """How AMPipe runs."""

    case: Case
    partner: Partner | None = None
    graphs: bool = False


WAYS = {
    "degree1-lancet": Way(replace(ALONE, degree=1, schedule="lancet")),
    "degree2": Way(replace(ALONE, degree=2)),
    "degree4": Way(ALONE),
    "stack": Way(STACK),
    "stack-partner": Way(STACK, partner=Partner()),
    "stack-recompute": Way(replace(STACK, recompute=2)),
    "recompute-moe": Way(replace(ALONE, model=ALONE.model | MOE_AGAIN)),
    "joined-partner": Way(replace(STACK, degree=2, schedule="joined"), partner=Partner()),
    "graphs": Way(STACK, graphs=True),
    "sequential": Way(replace(ALONE, executor="sequential")),
}

Script = Callable[[torch.nn.Module], Any]
"""Changes a model. What it returns is kept until the end; a module is trained in place of the model, and a
function is called between the two steps."""


def _named(model: torch.nn.Module, word: str) -> list[Any]:
    found = [parameter for name, parameter in model.named_parameters() if word in name]
    assert found
    return found


def scaled_gradients(model: torch.nn.Module) -> None:
    for parameter in _named(model, "router"):
        parameter.register_hook(lambda gradient: gradient * 30)


def clamped_gradients(model: torch.nn.Module) -> None:
    for parameter in model.parameters():
        parameter.register_hook(lambda gradient: gradient.clamp(-0.5, 0.5))


def masked_gradients(model: torch.nn.Module) -> None:
    for parameter in model.parameters():
        mask = torch.arange(parameter.numel()).view(parameter.shape) % 3 > 0
        parameter.register_hook(lambda gradient, mask=mask: gradient * mask + mask)


def reduced_gradients(model: torch.nn.Module) -> None:
    def reduce(gradient: Tensor) -> Tensor:
        total = gradient.clone()
        torch.distributed.all_reduce(total)
        return total

    for parameter in _named(model, "router") + _named(model, "linear_qkv") + _named(model, "experts"):
        parameter.register_hook(reduce)


def changed_after_accumulation(model: torch.nn.Module) -> None:
    def replace_gradient(parameter: Any) -> None:
        parameter.grad = parameter.grad * 3 + 1

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(replace_gradient)


def accumulation_nodes(model: torch.nn.Module) -> Any:
    nodes = []
    for parameter in model.parameters():
        node = parameter.expand_as(parameter).grad_fn.next_functions[0][0]
        node.register_prehook(lambda gradients: tuple(gradient * 3 + 1 for gradient in gradients))
        nodes.append(node)
    return nodes


def counted_hooks(model: torch.nn.Module) -> "Counter[str]":
    calls: Counter[str] = Counter()
    for name, parameter in model.named_parameters():
        parameter.register_hook(lambda _, name=name: calls.update([f"gradient of {name}"]))
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: calls.update([f"sum of {name}"]))
    return calls


def hook_removes_itself(model: torch.nn.Module) -> None:
    for parameter in model.parameters():

        def double(gradient: Tensor, handles: list[Any]) -> Tensor:
            handles.pop().remove()
            return gradient * 2

        handles: list[Any] = []
        handles.append(parameter.register_hook(lambda gradient, handles=handles: double(gradient, handles)))


PARAMETER_HOOKS: dict[str, Script] = {
    script.__name__: script
    for script in (
        scaled_gradients,
        clamped_gradients,
        masked_gradients,
        reduced_gradients,
        changed_after_accumulation,
        accumulation_nodes,
        counted_hooks,
        hook_removes_itself,
    )
}


def trained(layer: torch.nn.Module, way: Way, kept: Any, *, ours: bool) -> dict[str, Tensor]:
    """Two steps of three micro-batches: what both compute."""
    from tests.dist.micro_batches import step

    found = {}
    if isinstance(kept, torch.nn.Module):
        layer = kept
    for number in range(2):
        if number and callable(kept) and kept is not layer:
            kept()
        for parameter in layer.parameters():
            parameter.grad = None
        results = step(layer, way.case, partner=way.partner if ours else None)
        found.update({f"{name} in step {number}": value for name, value in results.items()})
    if isinstance(kept, Counter):
        found.update({f"calls: {name}": torch.tensor(float(count)) for name, count in kept.items()})
    return found


def compared(way: Way, script: Script) -> dict[str, float]:
    """The differences of a script on AMPipe's model from the same script on the stock model."""
    from tests.dist.blocks import build_layers, capture, wrong

    with cuda_graph_standin.stand_ins() if way.graphs else contextlib.nullcontext():
        stock, ours = build_layers(way.case)
        if way.graphs:
            capture(ours)
        expected = trained(stock, way, script(stock), ours=False)
        found = trained(ours, way, script(ours), ours=True)
    return wrong(expected, found, TOLERANCE)


def _first(model: torch.nn.Module) -> Any:
    """The first layer."""
    return getattr(model, "layers", [model])[0]


def _modules(model: torch.nn.Module, name: str) -> list[Any]:
    found = [module for path, module in model.named_modules() if path.rpartition(".")[2] == name]
    assert found
    return found


def halved(output: Any) -> Any:
    """An output of Megatron's modules, which may be a tuple, times 0.5."""
    return (output[0] / 2, *output[1:]) if isinstance(output, tuple) else output / 2


def replace_forward(module: Any) -> None:
    forward = module.forward
    module.forward = lambda *args, **kwargs: halved(forward(*args, **kwargs))


class Half(torch.nn.Module):
    """Wraps a module, and halves its output, or the first of its outputs."""

    def __init__(self, module: torch.nn.Module) -> None:
        super().__init__()
        self.base = module

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return halved(self.base(*args, **kwargs))


class Adapter(torch.nn.Module):
    """A linear layer with an adapter of low rank (LoRA): the layer itself is frozen."""

    def __init__(self, base: Any) -> None:
        super().__init__()
        outputs, inputs = base.weight.shape
        generator = torch.Generator().manual_seed(outputs + inputs)
        self.base = base.requires_grad_(False)
        self.down = torch.nn.Parameter(torch.randn(2, inputs, generator=generator) * 0.1)
        self.up = torch.nn.Parameter(torch.randn(outputs, 2, generator=generator) * 0.1)

    def forward(self, rows: Tensor) -> Any:
        output, bias = self.base(rows)
        return output + rows @ self.down.t() @ self.up.t(), bias


def adapters(model: torch.nn.Module) -> None:
    model.requires_grad_(False)
    for parent in list(model.modules()):
        for name in ("linear_qkv", "linear_proj", "linear_fc1"):
            if hasattr(parent, name):
                setattr(parent, name, Adapter(getattr(parent, name)))


def adapters_later(model: torch.nn.Module) -> Any:
    return functools.partial(adapters, model)


def frozen_experts(model: torch.nn.Module) -> None:
    for parameter in _named(model, "experts"):
        parameter.requires_grad_(False)


def thawed_later(model: torch.nn.Module) -> Any:
    """The experts are trained from the second step on, and the router is not."""
    frozen_experts(model)

    def change() -> None:
        for name, parameter in model.named_parameters():
            parameter.requires_grad_("router" not in name)

    return change


def hooks_that_change_outputs(model: torch.nn.Module) -> None:
    for name in ("linear_proj", "linear_qkv", "pre_mlp_layernorm", "experts", "shared_experts"):
        for module in _modules(model, name):
            module.register_forward_hook(lambda module, inputs, output: halved(output))


def hooks_that_change_inputs(model: torch.nn.Module) -> None:
    for name in ("linear_proj", "linear_qkv", "input_layernorm"):
        for module in _modules(model, name):
            module.register_forward_pre_hook(lambda module, inputs: (inputs[0] * 3, *inputs[1:]))


def hooks_that_change_gradients(model: torch.nn.Module) -> None:
    for name in ("linear_proj", "linear_qkv", "pre_mlp_layernorm"):
        for module in _modules(model, name):
            module.register_full_backward_hook(lambda module, inputs, _: tuple(x * 2 for x in inputs))
            module.register_full_backward_pre_hook(lambda module, outputs: (outputs[0] / 3, *outputs[1:]))


def hooks_of_routers(model: torch.nn.Module) -> Any:
    """Are called once for all chunks."""
    calls: Counter[str] = Counter()

    def look(module: Any, inputs: Any, outputs: Any) -> None:
        probs, routing_map = outputs
        calls.update(calls=1, rows=inputs[0].shape[0] * inputs[0].shape[1], chosen=int(routing_map.sum()))
        calls.update(probs=round(probs.sum().item(), 3))

    def look_at_options(module: Any, inputs: Any, options: Any, outputs: Any) -> None:
        assert options == {}
        look(module, inputs, outputs)

    for router in _modules(model, "router"):
        router.register_forward_hook(look)
        router.register_forward_hook(look_at_options, with_kwargs=True)
    return calls


def replaced_forwards(model: torch.nn.Module) -> None:
    for name in ("linear_proj", "linear_fc2", "shared_experts"):
        for module in _modules(model, name):
            replace_forward(module)


def wrapped_modules(model: torch.nn.Module) -> None:
    for parent in list(model.modules()):
        for name in ("linear_proj", "experts", "shared_experts", "pre_mlp_layernorm"):
            if name in dict(parent.named_children()):
                setattr(parent, name, Half(getattr(parent, name)))


def skipped_batches(model: torch.nn.Module) -> Any:
    """Forward passes without a backward pass, and one without gradients."""

    def skip() -> None:
        hidden = torch.randn(32, 2, 32, generator=torch.Generator().manual_seed(3))
        for _ in range(2):
            output, _ = model(hidden_states=hidden, attention_mask=None)
            assert output.isfinite().all()
        with torch.no_grad():
            model(hidden_states=hidden, attention_mask=None)

    skip()
    return skip


def failing_batches(model: torch.nn.Module) -> Any:
    """The loss fails between both passes, and the script goes on with the next batch."""

    def fail() -> None:
        hidden = torch.randn(32, 2, 32, generator=torch.Generator().manual_seed(3))
        with pytest.raises(RuntimeError, match="shape"):
            model(hidden_states=hidden, attention_mask=None)[0].view(7).sum().backward()

    fail()
    return fail


class Distilled(torch.nn.Module):
    """A student that learns from a teacher, which runs in the same process without gradients."""

    def __init__(self, student: Any, teacher: Any) -> None:
        super().__init__()
        self.student = student
        self.teacher = [teacher]
        self._block = getattr(_first(student), "_block", None)

    def forward(self, **inputs: Any) -> Any:
        with torch.no_grad():
            target, _ = self.teacher[0](**inputs)
        output, context = self.student(**inputs)
        # Megatron keeps the graph of some additions, also without gradients.
        return output * target.detach(), context


def taught_by_another(model: torch.nn.Module) -> Any:
    """A second model, at degree 4 if the first is AMPipe's."""
    from tests.dist.blocks import build_layers

    teachers = build_layers(STACK if hasattr(model, "layers") else ALONE)
    teacher = teachers[type(_first(model)).__name__ == "AMPipeTransformerLayer"]
    with torch.no_grad():
        for parameter in teacher.parameters():
            parameter.mul_(0.9)
    return Distilled(model, teacher)


def taught_by_itself(model: torch.nn.Module) -> Any:
    return Distilled(model, model)


class Plain(torch.nn.Module):
    """A model with positional arguments and one result."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, hidden: Tensor) -> Tensor:
        output: Tensor = self.model(hidden_states=hidden, attention_mask=None)[0]
        return output


class Around(torch.nn.Module):
    """Runs a model inside of another function."""

    def __init__(self, model: Any, around: Callable[[Callable[[Tensor], Tensor], Tensor], Tensor]) -> None:
        super().__init__()
        self.model = model
        self._around = around
        self._block = getattr(_first(model), "_block", None)

    def forward(self, *, hidden_states: Tensor, **inputs: Any) -> Any:
        run = lambda hidden: self.model(hidden_states=hidden, **inputs)[0]  # noqa: E731
        return self._around(run, hidden_states), None


def recomputed_by_torch(model: torch.nn.Module) -> Any:
    return Around(model, functools.partial(checkpoint, use_reentrant=True))


def recomputed_by_megatron(model: torch.nn.Module) -> Any:
    from megatron.core import tensor_parallel

    return Around(model, lambda run, hidden: tensor_parallel.checkpoint(run, False, hidden))


def saved_on_the_host(model: torch.nn.Module) -> Any:
    def run_inside(run: Callable[[Tensor], Tensor], hidden: Tensor) -> Tensor:
        with torch.autograd.graph.save_on_cpu():
            return run(hidden)

    return Around(model, run_inside)


CHANGES: dict[str, Script] = {
    script.__name__: script
    for script in (
        frozen_experts,
        thawed_later,
        adapters,
        adapters_later,
        hooks_that_change_outputs,
        hooks_that_change_inputs,
        hooks_that_change_gradients,
        hooks_of_routers,
        replaced_forwards,
        wrapped_modules,
        skipped_batches,
        failing_batches,
        taught_by_another,
        taught_by_itself,
        recomputed_by_torch,
        recomputed_by_megatron,
        saved_on_the_host,
    )
}


@pytest.mark.parametrize(
    ("script", "way"),
    [
        (script, way)
        for script in CHANGES
        for way in ("degree1-lancet", "degree4", "stack-partner", "stack-recompute")
        # Hooks run again in a recompute, as they do in Megatron's.
        if (script, way) != ("hooks_of_routers", "stack-recompute")
    ],
)
def test_a_changed_model_trains_as_stock(script: str, way: str) -> None:
    assert compared(WAYS[way], CHANGES[script]) == {}


IN_ALL_WAYS = {"masked_gradients", "changed_after_accumulation", "counted_hooks"}


@pytest.mark.parametrize(
    ("script", "way"),
    [
        (script, way)
        for script in PARAMETER_HOOKS
        for way in WAYS
        if script in IN_ALL_WAYS or way in ("degree4", "stack-partner")
    ],
)
def test_hooks_of_parameters_run_once_with_the_sum(script: str, way: str) -> None:
    assert compared(WAYS[way], PARAMETER_HOOKS[script]) == {}


def ignored_forward_hook(model: Any) -> None:
    _first(model).mlp.register_forward_hook(lambda *_: None)


def ignored_forward_pre_hook(model: Any) -> None:
    _first(model).self_attention.register_forward_pre_hook(lambda *_: None)


def ignored_backward_hook(model: Any) -> None:
    _first(model).self_attention.core_attention.register_full_backward_hook(lambda *_: None)


def ignored_backward_pre_hook(model: Any) -> None:
    _first(model).mlp.register_full_backward_pre_hook(lambda *_: None)


def ignored_hook_inside(model: Any) -> None:
    _first(model).self_attention.core_attention.attention_dropout.register_forward_hook(lambda *_: None)


def ignored_forward(model: Any) -> None:
    replace_forward(_first(model).mlp)


def ignored_forward_of_attention(model: Any) -> None:
    replace_forward(_first(model).self_attention.core_attention)


def ignored_method(model: Any) -> None:
    _first(model).mlp.combine = lambda *_: None


def ignored_method_of_a_layer(model: Any) -> None:
    _first(model)._forward_mlp = lambda *_: None


def ignored_wrapper(model: Any) -> None:
    _first(model).mlp = Half(_first(model).mlp)


def ignored_core_attention(model: Any) -> None:
    attention = _first(model).self_attention
    attention.core_attention = Half(attention.core_attention)


def ignored_parameter(model: Any) -> None:
    _first(model).scale = torch.nn.Parameter(torch.ones(1))


def ignored_hook_of_all_modules(model: Any) -> Any:
    return torch.nn.modules.module.register_module_forward_hook(lambda *_: None)


def ignored_patch(model: Any) -> Any:
    """In a class, by a function that has the name of the one that it replaces."""
    from megatron.core.transformer.moe.moe_layer import MoELayer

    forward = MoELayer.forward

    @functools.wraps(forward)
    def patched(*args: Any, **kwargs: Any) -> Any:
        return halved(forward(*args, **kwargs))

    patch = mock.patch.object(MoELayer, "forward", patched)
    patch.start()
    patch.remove = patch.stop
    return patch


def recomputed_by_hooks(model: Any) -> Any:
    return Around(model, functools.partial(checkpoint, use_reentrant=False))


def recomputed_by_a_wrapper(model: Any) -> Any:
    """Around the first layer, as scripts for FSDP do."""
    wrapped = checkpoint_wrapper(_first(model))
    return Around(model, lambda run, hidden: wrapped(hidden_states=hidden, attention_mask=None)[0])


def recomputed_without_a_frame(model: Any) -> Any:
    """By hooks that a forward pre-hook sets."""
    plain = composable_checkpoint(Plain(model))
    return Around(model, lambda run, hidden: plain(hidden))


def hook_of_several_parameters(model: Any) -> Any:
    return torch.autograd.graph.register_multi_grad_hook([*model.parameters()], lambda _: None)


def hook_of_any_parameter(model: Any) -> Any:
    parameters = [*model.parameters()]
    return torch.autograd.graph.register_multi_grad_hook(parameters, lambda _: None, mode="any")


OF_SEVERAL = "torch.autograd.graph.register_multi_grad_hook with a parameter of layer 1: "
BY_HOOKS = "torch.utils.checkpoint use_reentrant=False: "
IGNORED: dict[Script, str] = {
    ignored_forward_hook: "hook of mlp of layer 1 tests.dist",
    ignored_forward_pre_hook: "hook of self_attention of layer 1 tests.dist",
    ignored_backward_hook: "hook of self_attention.core_attention of layer 1 tests.dist",
    ignored_backward_pre_hook: "hook of mlp of layer 1 tests.dist",
    ignored_hook_inside: "hook of self_attention.core_attention.attention_dropout of layer 1 tests.dist",
    ignored_forward: "mlp of layer 1: replaced forward: ",
    ignored_forward_of_attention: "self_attention.core_attention of layer 1: replaced forward: ",
    ignored_method: "mlp of layer 1: replaced combine: ",
    ignored_method_of_a_layer: "layer 1: replaced _forward_mlp: ",
    ignored_wrapper: "mlp of layer 1: replaced module: ",
    ignored_core_attention: "self_attention.core_attention of layer 1: replaced module: ",
    ignored_parameter: "parameter of layer 1 scale: ",
    ignored_hook_of_all_modules: "hook of all modules tests.dist",
    ignored_patch: "mlp of layer 1: replaced forward of the class MoELayer: ",
    recomputed_by_hooks: BY_HOOKS,
    recomputed_by_a_wrapper: BY_HOOKS,
    recomputed_without_a_frame: BY_HOOKS,
    hook_of_several_parameters: OF_SEVERAL,
    hook_of_any_parameter: OF_SEVERAL,
}
"""Scripts that are refused, and how the message begins."""
IN_MORE_WAYS = (ignored_forward_hook, ignored_forward, ignored_wrapper, hook_of_several_parameters)


@pytest.mark.parametrize(
    ("script", "way", "late"),
    [
        *((script, "degree4", True) for script in IGNORED),
        *((script, "stack", False) for script in IGNORED),
        *((script, "stack-partner", True) for script in IN_MORE_WAYS),
        *((script, "degree1-lancet", False) for script in IN_MORE_WAYS),
        *((script, "graphs", True) for script in IN_MORE_WAYS),
    ],
)
def test_what_would_be_ignored_is_refused(script: Script, way: str, late: bool) -> None:
    """In one line, also after a first step; and once it is undone, training goes on as stock."""
    from megatron_ampipe.errors import BadInput
    from tests.dist.blocks import build_layers, capture, wrong

    chosen = WAYS[way]
    with cuda_graph_standin.stand_ins() if chosen.graphs else contextlib.nullcontext():
        stock, ours = build_layers(chosen.case)
        if chosen.graphs:
            capture(ours)
        if late:
            trained(ours, chosen, None, ours=True)
        undone = script(ours)
        try:
            with pytest.raises(BadInput) as said:
                trained(ours, chosen, undone if isinstance(undone, torch.nn.Module) else None, ours=True)
        finally:
            if hasattr(undone, "remove"):
                undone.remove()
        message = str(said.value)
        assert message.startswith(IGNORED[script])
        assert "--ampipe-degree 1" in message and "\n" not in message
        assert ("--ampipe-partner" in message) == (way in ("degree1-lancet", "stack-partner"))
        if hasattr(undone, "remove"):
            expected = trained(stock, chosen, None, ours=False)
            assert wrong(expected, trained(ours, chosen, None, ours=True), TOLERANCE) == {}


@pytest.mark.parametrize("script", [recomputed_by_hooks, recomputed_by_a_wrapper])
def test_torch_before_2_8_does_not_say_which_hooks_there_are(script: Script) -> None:
    from megatron_ampipe.errors import BadInput
    from megatron_ampipe.layers import user_changes
    from tests.dist.blocks import build_layers

    _, ours = build_layers(ALONE)
    model = script(ours)
    with mock.patch.object(user_changes, "_top_hooks", None), pytest.raises(BadInput, match=BY_HOOKS):
        trained(ours, WAYS["degree4"], model, ours=True)
