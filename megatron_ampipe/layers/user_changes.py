"""Finds what a script has changed in the modules of a block after they were built.

AMPipe runs what is inside of ``self_attention`` and of an MoE layer chunk by chunk, and never calls these
modules themselves. A hook there, or a replaced ``forward``, would be ignored, so it is refused. Modules that
stages call may have hooks, may be replaced and may be wrapped: they see one chunk at a time. New modules, and
parameters that are frozen or trained from now on, are found as well.
"""

from __future__ import annotations

import functools
import itertools
import operator
import os
import sys
import sysconfig
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import FrameType, FunctionType, MethodType
from typing import NamedTuple, NoReturn, Protocol

import torch
import torch.utils.checkpoint
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch.nn import Module, Parameter
from torch.nn.modules import module as torch_module

from megatron_ampipe.errors import BadInput
from megatron_ampipe.layers.context import AMPipeContext

_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
_GLOBAL_HOOKS: tuple[Mapping[int, object], ...] = (
    torch_module._global_forward_pre_hooks,
    torch_module._global_forward_hooks,
    torch_module._global_backward_pre_hooks,
    torch_module._global_backward_hooks,
)
"""Hooks of all modules (``torch.nn.modules.module.register_module_forward_hook`` and its relatives)."""
_HARMLESS = "megatron.core.distributed."
"""Megatron's data parallelism has a pre-hook that waits for the module's own parameters; AMPipe calls modules
that have any, or waits itself."""
_READ_BY_STAGES = frozenset({"get_query_key_value_tensors", "_apply_output_gate"})
"""Methods of attention that stages call, so a replaced one runs."""
_OWN_PACKAGES = ("torch", "megatron", "megatron_ampipe", "transformer_engine", "typing_extensions", "nvtx")
"""Code of these packages, and of the package that defines a class, may decorate the methods of the class."""
_is_trained = operator.attrgetter("requires_grad")
_chained = itertools.chain.from_iterable


_NOT_CALLED = "AMPipe runs its parts chunk by chunk, and never calls it"
_EXCHANGED = (
    "a stage exchanges its rows between tensor-parallel ranks, so it sees other rows than in Megatron"
)


_REPEATED = "a CUDA graph repeats what the module has computed without calling it"


class WatchedBlock(Protocol):
    """What :class:`UserChanges` asks a block (``block_modules.BlockModules``)."""

    attention_layer: TransformerLayer
    moe_layer: TransformerLayer
    context: AMPipeContext
    attends: bool
    """Whether the block includes attention."""

    @property
    def layers(self) -> Sequence[TransformerLayer]:
        """The layers of the block, each once."""

    @property
    def called(self) -> Mapping[Module, None]:
        """The modules that stages call, without those inside of them."""

    @property
    def exchanging(self) -> Sequence[Module]:
        """Those of :attr:`called` that exchange rows in Megatron, and are called without that."""

    @property
    def repeated(self) -> Sequence[Module]:
        """Those of :attr:`called` whose stages are captured as CUDA graphs."""

    def calls_core_attention(self, *, within_documents: bool) -> bool:
        """Whether core attention is a call of Megatron's module."""


class Uncalled(NamedTuple):
    """A module on which hooks and a replaced ``forward`` are refused."""

    name: str
    """Its path in the layer; empty for the layer itself, which may have hooks."""
    module: Module
    rule: str
    """Why they are refused."""
    keeps_functions: bool = True
    """Whether a replaced method is refused too."""


class UserChanges:
    """Watches the modules of one block."""

    _parameters: tuple[Parameter, ...]
    _uncalled: tuple[Uncalled, ...]
    _hooks: list[Mapping[int, object]]
    _known_hooks: list[int] | None
    _known_forwards: list[object]
    _known_sizes: list[int]

    def __init__(self, block: WatchedBlock) -> None:
        self._block = block
        self._generation = 0
        self._revisions: dict[object, int] = {}
        self._within_documents = False
        self._look()
        self._built = tuple(self._find_uncalled())

    def has_other_modules(self) -> bool:
        """Whether a module was added, removed or replaced, or a parameter added, since the last call."""
        children = [*_chained(map(dict.values, self._children))]
        names = [*_chained(self._parameter_names)]
        known = self._known_children
        is_same = len(children) == len(known) and all(map(operator.is_, children, known))
        if is_same and names == self._known_names:
            return False
        self._generation += 1
        self._look()
        return True

    @property
    def revision(self) -> int:
        """A number for the modules of the block, and for which of their parameters are trained."""
        state = self._generation, tuple(map(_is_trained, self._parameters))
        return self._revisions.setdefault(state, len(self._revisions))

    def refuse_ignored(self, *, within_documents: bool) -> None:
        """Raise :class:`BadInput` for a hook or a replaced function that would be ignored."""
        for parameter in self._parameters:
            if parameter._backward_hooks:
                self._refuse_joint_hooks(parameter)
        if not self._uncalled or within_documents != self._within_documents:
            self._within_documents = within_documents
            self._uncalled = tuple(self._find_uncalled())
            hooked = [each.module for each in self._uncalled if each.name]
            self._hooks = [*_GLOBAL_HOOKS, *_hooks_of(hooked)]
            self._known_hooks = None
        hooks = [*_chained(self._hooks)]
        forwards: list[object] = [type(each.module).forward for each in self._uncalled]
        # A replaced method is one attribute more.
        sizes = [len(vars(each.module)) for each in self._uncalled]
        is_same = hooks == self._known_hooks and sizes == self._known_sizes
        if is_same and all(map(operator.is_, forwards, self._known_forwards)):
            return
        self._refuse_all()
        self._known_hooks, self._known_forwards, self._known_sizes = hooks, forwards, sizes

    def _refuse_joint_hooks(self, parameter: Parameter) -> None:
        """Raise :class:`BadInput` for a hook that waits for the gradients of several parameters."""
        hooks = parameter._backward_hooks or {}
        for hook in hooks.values():
            code = getattr(hook, "__code__", None)
            if code is not None and code.co_filename == torch.autograd.graph.__file__:
                raise BadInput(
                    "torch.autograd.graph.register_multi_grad_hook",
                    f"with a parameter of {self._where}",
                    rule="gradients of a layer go to autograd in two calls, and the hook would run in each",
                    remedy=f"Use register_hook of each parameter, {self._or_off}.",
                )

    def refuse_replaced_modules(self) -> None:
        """Raise :class:`BadInput` for a module that has taken the place of one that no stage calls."""
        present = {(name, module) for layer in self._block.layers for name, module in layer.named_modules()}
        for name, module, rule, _ in self._built:
            if (name, module) not in present:
                raise BadInput(
                    f"{name} of {self._where}:",
                    "replaced module",
                    rule=f"it is ignored: {rule}",
                    remedy=f"Replace or wrap {self._called}, which see one chunk at a time, {self._or_off}.",
                )

    def refuse_parameter(self, name: str) -> NoReturn:
        """Raise :class:`BadInput` for a trained parameter that no stage reads."""
        raise BadInput(
            f"parameter of {self._where}",
            name,
            rule="no stage uses it, so its gradient would be lost",
            remedy=f"Put it into {self._called}, freeze it, {self._or_off}.",
        )

    def _refuse_all(self) -> None:
        refuse_hooks(
            _GLOBAL_HOOKS,
            owner="all modules",
            rule="AMPipe calls the modules inside of attention and of an MoE layer with one chunk at a time, "
            "and those around them never",
            remedy=f"Hook single modules ({self._called}), {self._or_off}.",
        )
        remedy = f"Use {self._called}, which see one chunk at a time, {self._or_off}."
        for name, module, rule, keeps_functions in self._uncalled:
            owner = f"{name} of {self._where}" if name else self._where
            if name:
                off = "Use --cuda-graph-impl none." if rule == _REPEATED else remedy
                refuse_hooks(_hooks_of([module]), owner=owner, rule=rule, remedy=off)
            for function in _replaced_functions(module, is_called=not name) if keeps_functions else ():
                raise BadInput(f"{owner}:", function, rule=f"it is ignored: {rule}", remedy=remedy)

    def _look(self) -> None:
        """Remember the modules as they are now."""
        layers = self._block.layers
        modules = dict.fromkeys(module for layer in layers for module in layer.modules())
        self._children = [module._modules for module in modules]
        self._parameter_names = [module._parameters for module in modules]
        self._known_children = [*_chained(map(dict.values, self._children))]
        self._known_names = [*_chained(self._parameter_names)]
        parameters = (parameter for layer in layers for parameter in layer.parameters())
        self._parameters = tuple(dict.fromkeys(parameters))
        self._uncalled = ()
        self._hooks = []
        self._known_hooks = None
        self._known_forwards = []
        self._known_sizes = []

    def _find_uncalled(self) -> Iterator[Uncalled]:
        """The modules of the layers that no stage calls, or that get other rows than in Megatron."""
        block = self._block
        called = {module for part in block.called for module in part.modules()}
        exchanging = {module for part in block.exchanging for module in part.modules()}
        repeated = {module for part in block.repeated for module in part.modules()}
        if block.attends and not block.calls_core_attention(within_documents=self._within_documents):
            called -= {*block.attention_layer.self_attention.core_attention.modules()}
        for layer in block.layers:
            for name, module in layer.named_modules():
                if module in exchanging:
                    yield Uncalled(name, module, _EXCHANGED)
                # Megatron runs an attention half that is not pipelined.
                elif module not in called and (block.attends or not name or name.startswith("mlp")):
                    yield Uncalled(name, module, _NOT_CALLED)
                elif module in repeated:
                    yield Uncalled(name, module, _REPEATED, keeps_functions=False)

    @property
    def _where(self) -> str:
        return f"layer {self._block.moe_layer.layer_number}"

    @property
    def _called(self) -> str:
        """The paths of the modules that may be changed."""
        uncalled = {each.module for each in self._find_uncalled()}
        paths = {module: name for layer in self._block.layers for name, module in layer.named_modules()}
        parts = [part for part in self._block.called if part not in uncalled]
        return ", ".join(paths[part] for part in parts if not isinstance(part, IdentityOp))

    @property
    def _or_off(self) -> str:
        return or_off(self._block.context)


def or_off(context: AMPipeContext) -> str:
    """What trains with Megatron's layers, as the end of a remedy."""
    if context.pipeline.degree > 1 and context.partners is None:
        return "or train with --ampipe-degree 1"
    others = "--ampipe-partner, --ampipe-schedule or --ampipe-exchange"
    return f"or train with --ampipe-degree 1, without {others}"


def refuse_outer_checkpoint(context: AMPipeContext) -> None:
    """Raise :class:`BadInput` in a forward pass that torch will recompute with ``use_reentrant=False``.

    torch's hooks of saved tensors recompute the whole function once for each call of autograd's engine, and
    AMPipe calls it for every stage. Reentrant checkpoints run here without gradients.
    """
    top = _top_hooks(False) if _top_hooks is not None else None
    is_inside = top is not None and top[0].__module__ == torch.utils.checkpoint.__name__
    frame: FrameType | None = sys._getframe()
    while frame is not None and not is_inside:
        code = frame.f_code
        is_inside = code.co_name == "checkpoint" and code.co_filename in _files_of_checkpoints()
        frame = frame.f_back
    if is_inside:
        raise BadInput(
            "torch.utils.checkpoint",
            "use_reentrant=False",
            rule="it would recompute the model for every stage of every chunk",
            remedy="Use --recompute-granularity full, which recomputes in stages, or use_reentrant=True, "
            f"{or_off(context)}.",
        )


_top_hooks = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)
"""From torch 2.8 on. It also finds a checkpoint that has no frame, of ``torch.distributed._composable``."""


@functools.cache
def _files_of_checkpoints() -> tuple[str, ...]:
    """The files of the functions ``checkpoint`` that can recompute by hooks of saved tensors."""
    modules = (sys.modules.get("transformer_engine.pytorch.distributed"), torch.utils.checkpoint)
    return tuple(file for module in modules if (file := getattr(module, "__file__", None)))


def refuse_hooks_of(module: Module, *, owner: str, rule: str, remedy: str) -> None:
    """Raise :class:`BadInput` for a hook of a module that is not Megatron's, or a replaced ``forward``."""
    refuse_hooks(_hooks_of([module]), owner=owner, rule=rule, remedy=remedy)
    if "forward" in vars(module):
        raise BadInput(f"{owner}:", "replaced forward", rule=rule, remedy=remedy)


def _hooks_of(modules: Iterable[Module]) -> Iterator[Mapping[int, object]]:
    """The hooks of modules, of each kind."""
    return (getattr(module, name) for module in modules for name in _HOOKS)


def refuse_hooks(hooks: Iterable[Mapping[int, object]], *, owner: str, rule: str, remedy: str) -> None:
    """Raise :class:`BadInput` for a hook that is not Megatron's."""
    for hook in _chained(by_id.values() for by_id in hooks):
        place = getattr(hook, "__module__", None) or type(hook).__module__
        if not place.startswith(_HARMLESS):
            name = f"{place}.{getattr(hook, '__qualname__', type(hook).__qualname__)}"
            raise BadInput(f"hook of {owner}", name, rule=rule, remedy=remedy)


def _replaced_functions(module: Module, *, is_called: bool) -> Iterator[str]:
    """The methods of a module that a script has replaced, in the object or in one of its classes.

    If the module is called, its own ``forward`` runs.
    """
    runs = _READ_BY_STAGES | ({"forward"} if is_called else set())
    for name, value in vars(module).items():
        if (
            name not in runs
            and callable(getattr(type(module), name, None))
            and _is_foreign(value, type(module))
        ):
            yield f"replaced {name}"
    for cls in itertools.takewhile(lambda cls: cls is not Module, type(module).__mro__):
        for name, value in vars(cls).items():
            is_function = isinstance(value, FunctionType)
            if is_function and name not in _READ_BY_STAGES and _is_foreign(value, cls):
                yield f"replaced {name} of the class {cls.__name__}"


def _is_foreign(function: object, cls: type) -> bool:
    """Whether a function is other code than that of the class and of the packages that decorate it."""
    if isinstance(function, MethodType):
        function = function.__func__
    if not isinstance(function, FunctionType):
        return callable(function)
    file = function.__code__.co_filename
    # Python makes some methods of data classes.
    is_made = file.startswith("<")
    return not is_made and not file.startswith(_folders_of(cls.__module__.partition(".")[0]))


@functools.cache
def _folders_of(package: str) -> tuple[str, ...]:
    """Where the code of a package, of those that may decorate it, and of Python's own library is."""
    found: list[str] = []
    for name in (package, *_OWN_PACKAGES):
        module = sys.modules.get(name)
        folders = getattr(module, "__path__", None)
        if folders is not None:
            found += [folder + os.sep for folder in folders]
        elif module is not None:
            found.append(getattr(module, "__file__", None) or f"<{name}>")
    library = sysconfig.get_path("stdlib") + os.sep
    found += [library + name for name in ("functools.py", "contextlib.py", "warnings.py", "typing.py")]
    return tuple(found)
