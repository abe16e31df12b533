"""Finds, in the package's syntax trees, what AMPipe takes from others without their promise to keep it.

These are attributes with an underscore of torch, Megatron, Transformer Engine and the like; everything of
Transformer Engine that is loaded by its name; and functions of Megatron that are replaced at run time.
:mod:`tests.internals` looks the names up and writes the table, ``tests/megatron/test_megatron_names.py``
compares.
"""

import ast
import functools
import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from tests import definitions
from tests.forked import REPOSITORY
from tests.megatrons import installed, megatron_of

PACKAGE = REPOSITORY / "megatron_ampipe"
ROOTS = ("torch", "megatron", "transformer_engine", "flash_attn", "flash_attn_interface", "argparse")
OPTIONAL = ("transformer_engine", "flash_attn", "flash_attn_interface")
"""Packages that the tests do without: their names are checked where they are installed."""
PRIVATE = re.compile(r"_[A-Za-z]\w*")

_DISPATCHER = "megatron.core.transformer.moe.token_dispatcher"
OF_OBJECTS = {
    # Of tensor.untyped_storage(), which is compared and looked up by its address.
    "_cdata": "torch.UntypedStorage",
    # Of the modules of a user's model, and of blocks.
    "_parameters": "torch.nn.Module",
    "_buffers": "torch.nn.Module",
    "_modules": "torch.nn.Module",
    "_forward_hooks": "torch.nn.Module",
    "_forward_pre_hooks": "torch.nn.Module",
    "_backward_pre_hooks": "torch.nn.Module",
    # Of parameters; of modules in layers/user_changes.py, with the names above.
    "_backward_hooks": "torch.Tensor",
    # Of the process groups that Megatron makes.
    "_device_types": "torch.distributed.ProcessGroup",
    "_get_backend": "torch.distributed.ProcessGroup",
    "_timeout": "torch._C._distributed_c10d.Backend.Options",
    # Of torch's operators, and of those that packages register.
    "_schema": "torch._ops.OpOverload",
    # Of the dispatcher of a layer.
    "_comm_manager": f"{_DISPATCHER}.MoEFlexTokenDispatcher",
    "_buffer": f"{_DISPATCHER}._NCCLEPManager",
    "_ensure_bootstrap": f"{_DISPATCHER}._NCCLEPManager",
    # Of the layers of a block: torch gives the class of a submodule as Module.
    "_apply_output_gate": "megatron.core.transformer.attention.Attention",
    "_forward_impl": "megatron.core.tensor_parallel.layers.ColumnParallelLinear",
    "_apply_bias": "megatron.core.transformer.moe.experts.TEGroupedMLP",
    # Of the class of a user's router, on which layers/router.py puts its own class.
    "_apply_expert_bias": "megatron.core.transformer.moe.router.TopKRouter",
    "_apply_aux_loss": "megatron.core.transformer.moe.router.TopKRouter",
    "_apply_seq_aux_loss": "megatron.core.transformer.moe.router.TopKRouter",
    "_apply_global_aux_loss": "megatron.core.transformer.moe.router.TopKRouter",
    # Of linear layers of Transformer Engine, in compat.py.
    "_fp8_workspaces": "transformer_engine.pytorch.module.base.TransformerEngineBaseModule",
    # Of modules that compat.flash_attention imports by the names in compat.FLASH_ATTENTION.
    "_flash_attn_forward": "flash_attn.flash_attn_interface",
    "_flash_attn_backward": "flash_attn.flash_attn_interface",
    "_flash_attn_fwd": "flash_attn.cute.interface",
    "_flash_attn_bwd": "flash_attn.cute.interface",
    # Of Megatron's parser.
    "_actions": "argparse.ArgumentParser",
}
"""The owner of an attribute of a parameter or a result, whose class the code does not say."""
PUBLIC = {"_replace", "_fields", "_asdict", "_make", "_exit", "_getframe"}
"""Documented in spite of their underscore: of named tuples, ``os`` and ``sys``."""
UNGUARDED = {
    # An attribute of a class that is made there.
    ("layers/router.py", "_noted"),
    # Of a model of Megatron Bridge, which tests do without; read with a default.
    ("launch/recipes.py", "_pg_collection"),
}
"""By file and name, what nobody else has, or what no test can look up."""

ON_OBJECTS = {
    # Of the models and of data parallelism's bucket groups of this rank.
    ("launch/script.py", "__init__"): (
        "core.models.gpt.GPTModel",
        "core.models.hybrid.hybrid_model.HybridModel",
    ),
    ("launch/recipes.py", "__init__"): (
        "core.models.gpt.GPTModel",
        "core.models.hybrid.hybrid_model.HybridModel",
    ),
    ("launch/hooks.py", "start_grad_sync"): (
        "core.distributed.param_and_grad_buffer._ParamAndGradBucketGroup",
    ),
    ("launch/hooks.py", "finish_grad_sync"): (
        "core.distributed.param_and_grad_buffer._ParamAndGradBucketGroup",
    ),
    ("launch/partners.py", "build_schedule_plan"): ("core.models.gpt.GPTModel",),
    # Of modules inside a block.
    ("exchange/flex.py", "_indices_to_multihot"): ("core.transformer.moe.token_dispatcher._DeepepManager",),
    ("layers/grouped_experts.py", "_apply_bias"): ("core.transformer.moe.experts.TEGroupedMLP",),
    ("layers/chunk_attention.py", "forward"): ("core.transformer.dot_product_attention.DotProductAttention",),
}
"""The owners, in Megatron, of a function that is replaced in an object, by file and name."""
BY_VARIABLE = {
    ("launch/script.py", "training.initialize"): ("parse_args", "validate_args"),
    ("launch/host/megatron.py", "core.tensor_parallel.random"): (
        "FP8GlobalStateManager", "activation_recompute_forward", "fp8_autocast",
    ),
}  # fmt: skip
"""The names that are replaced by a loop over names, by file and module of Megatron."""
OTHER_ATTRIBUTES = {
    # Of records of this package that another file declares.
    ("launch/fixed_rows.py", "is_active"),
    ("tools/measuring/prepared.py", "is_active"),
    # Of Megatron's linear layers, whose forward is in MIRRORED of tests/internals.py.
    ("layers/fixed_experts.py", "forward"),
    ("runtime/capturing.py", "parameters"),
    ("runtime/steps.py", "values"),
    # Of argparse, and a field of a layer specification.
    ("launch/ending.py", "error"),
    ("tools/sbatch_command.py", "setup"),
    ("tools/measuring/blocks.py", "core_attention"),
}
"""Assigned attributes, by file and name, that only share their name with a function of Megatron."""


@dataclass(slots=True)
class Found:
    """What :func:`scan` finds."""

    names: dict[str, set[str]] = field(default_factory=lambda: defaultdict(set))
    """The files, by full name such as ``torch._C._storage_Use_Count``."""
    replaced: dict[str, set[str]] = field(default_factory=lambda: defaultdict(set))
    """The files, by name in Megatron, without ``megatron.``."""
    unknown: list[str] = field(default_factory=list)
    """Attributes and replacements of which nothing says the owner, with file and line."""
    used: set[object] = field(default_factory=set)
    """The entries of the tables above that something needs."""


@functools.cache
def scan() -> Found:
    """Everything in the package."""
    found = Found()
    trees = {path.relative_to(PACKAGE).as_posix(): ast.parse(path.read_text()) for path in sources()}
    classes = _classes(trees)
    for file, tree in trees.items():
        _File(file, tree, classes, found).scan()
    return found


def sources() -> list[Path]:
    """The files of the package."""
    return sorted(PACKAGE.rglob("*.py"))


@dataclass(frozen=True, slots=True)
class _Class:
    """A class of this package: what it defines, and its bases as full names."""

    defines: frozenset[str]
    bases: tuple[str, ...]


def _classes(trees: dict[str, ast.Module]) -> dict[str, _Class]:
    classes = {}
    for file, tree in trees.items():
        bound = _bound(tree, file)
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                bases = tuple(name for base in node.bases if (name := _dotted(base, bound)) is not None)
                classes[f"{_module(file)}.{node.name}"] = _Class(frozenset(_defined(node)), bases)
    return classes


def _module(file: str) -> str:
    return ".".join(("megatron_ampipe", *Path(file).with_suffix("").parts))


def _defined(node: ast.ClassDef) -> Iterator[str]:
    """The attributes that a class assigns in its body, or to ``self`` in its methods."""
    for statement in node.body:
        match statement:
            case ast.FunctionDef(name=name) | ast.AnnAssign(target=ast.Name(id=name)):
                yield name
            case ast.Assign(targets=targets):
                yield from (
                    each.id for target in targets for each in ast.walk(target) if isinstance(each, ast.Name)
                )
    for each in ast.walk(node):
        if isinstance(each, ast.Attribute) and isinstance(each.ctx, ast.Store) and _is_self(each.value):
            yield each.attr


def _is_self(node: ast.AST) -> bool:
    return isinstance(node, ast.Name) and node.id in ("self", "cls")


def _bound(tree: ast.Module, file: str) -> dict[str, str]:
    """Full names by the names that a file gives to modules, imported names and its own classes."""
    bound: dict[str, str] = {}
    for node in ast.walk(tree):
        match node:
            case ast.ImportFrom(module=str(module), names=names):
                bound |= {one.asname or one.name: f"{module}.{one.name}" for one in names}
            case ast.Import(names=names):
                bound |= {one.asname: one.name for one in names if one.asname is not None}
                bound |= {
                    one.name.partition(".")[0]: one.name.partition(".")[0] for one in names if not one.asname
                }
            case ast.ClassDef(name=name):
                bound[name] = f"{_module(file)}.{name}"
    for node in ast.walk(tree):
        # aten = torch.ops.aten; module = importlib.import_module("...")
        match node:
            case ast.Assign(targets=[ast.Name(id=name)], value=value) if (
                full := _dotted(value, bound)
            ) is not None:
                bound.setdefault(name, full)
    return bound


def _dotted(node: ast.AST, bound: dict[str, str]) -> str | None:
    """The full name that an expression says; None for others."""
    match node:
        case ast.Name(id=name):
            return bound.get(name)
        case ast.Attribute(value=value, attr=attribute):
            owner = _dotted(value, bound)
            return None if owner is None else f"{owner}.{attribute}"
        case ast.Call(func=function, args=[ast.Constant(value=str(name))]):
            if _dotted(function, bound) in ("importlib.import_module", "sys.modules.get"):
                return name
        case ast.Call(func=function, args=[first, ast.Constant(value=str(name)), *_]):
            if _called(function) == "getattr" and (owner := _dotted(first, bound)) is not None:
                return f"{owner}.{name}"
    return None


def _called(function: ast.AST) -> str:
    return ast.unparse(function).rpartition(".")[2]


@dataclass(slots=True)
class _File:
    """The walk through a file."""

    file: str
    tree: ast.Module
    classes: dict[str, _Class]
    found: Found
    bound: dict[str, str] = field(init=False)
    own: set[str] = field(init=False)
    """The attributes of the classes in this file."""
    inner: set[ast.AST] = field(default_factory=set)
    """Parts of an expression whose whole has a full name."""
    spoken: set[ast.AST] = field(default_factory=set)
    """Strings that are no attribute, or were counted with a call."""
    class_of: dict[ast.AST, str] = field(default_factory=dict)

    def scan(self) -> None:
        """Add everything to what is found."""
        self.bound = _bound(self.tree, self.file)
        nodes = list(ast.walk(self.tree))
        self.own = {name for node in nodes if isinstance(node, ast.ClassDef) for name in _defined(node)}
        for node in nodes:
            self._note_place(node)
        for node in nodes:
            match node:
                case ast.ImportFrom(module=str(module), names=names):
                    for one in names:
                        self._add(f"{module}.{one.name}")
                case ast.Attribute() if node not in self.inner:
                    self._attribute(node)
                case ast.Call():
                    self._call(node)
                case ast.Tuple(
                    elts=[ast.Name() | ast.Attribute() as owner, ast.Constant(value=str(name)), _]
                ):
                    # (module, "forward", function), for a context that replaces it.
                    self._replacement(owner, name, node)
                case ast.Constant(value=str(name)) if (
                    PRIVATE.fullmatch(name) and node not in self.spoken | self.inner
                ):
                    self._of_object(name, node)

    def _note_place(self, node: ast.AST) -> None:
        if isinstance(node, ast.ClassDef):
            name = f"{_module(self.file)}.{node.name}"
            self.class_of |= dict.fromkeys(ast.walk(node), name)
            self._overridden(name)
        if isinstance(node, ast.Attribute | ast.Call) and _dotted(node, self.bound) is not None:
            self.inner |= set(ast.walk(node)) - {node}
        if isinstance(node, ast.JoinedStr):
            self.spoken |= set(ast.walk(node))
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__slots__":
            self.spoken |= set(ast.walk(node))

    def _add(self, name: str) -> None:
        """Count a full name, if its owner has not promised to keep it."""
        root, *parts = name.split(".")
        is_private = any(PRIVATE.fullmatch(part) and part not in PUBLIC for part in parts)
        if root in ROOTS and (is_private or root in OPTIONAL):
            self.found.names[name].add(self.file)

    def _attribute(self, node: ast.Attribute) -> None:
        name = _dotted(node, self.bound)
        if name is not None and name.partition(".")[0] != "megatron_ampipe":
            self._add(name)
        if isinstance(node.ctx, ast.Store):
            self._replacement(node.value, node.attr, node)
        elif name is None and PRIVATE.fullmatch(node.attr) and node.attr not in PUBLIC:
            self._of_class(node)

    def _of_class(self, node: ast.Attribute) -> None:
        """Count an attribute of ``self`` or ``super()`` as its class says, of others by name."""
        is_super = ast.unparse(node.value) == "super()"
        name = self.class_of.get(node)
        if name is None or not (is_super or _is_self(node.value)):
            self._of_object(node.attr, node)
            return
        defining, foreign = self._ancestors(name)
        if is_super:
            defining.pop(name)
        if any(node.attr in defines for defines in defining.values()):
            return
        if len(foreign) == 1 and node.attr not in OF_OBJECTS:
            self._add(f"{foreign[0]}.{node.attr}")
        else:
            self._of_object(node.attr, node)

    def _ancestors(self, name: str) -> tuple[dict[str, frozenset[str]], list[str]]:
        """What a class of this package and its ancestors here define, and the first other ancestors."""
        defining: dict[str, frozenset[str]] = {}
        foreign: list[str] = []
        left = [name]
        while left:
            one = left.pop()
            if one in self.classes:
                defining[one] = self.classes[one].defines
                left += self.classes[one].bases
            elif one.partition(".")[0] in ROOTS:
                foreign.append(one)
        return defining, foreign

    def _overridden(self, name: str) -> None:
        """Count private attributes of a class of this package that its ancestor in Megatron has too."""
        _, foreign = self._ancestors(name)
        for owner in foreign:
            if owner.startswith("megatron."):
                for attribute in filter(PRIVATE.fullmatch, self.classes[name].defines):
                    if attribute in definitions.attributes(_installed(), owner.removeprefix("megatron.")):
                        self._add(f"{owner}.{attribute}")

    def _of_object(self, attribute: str, node: ast.AST) -> None:
        """Count an attribute whose owner the code does not say."""
        if attribute in OF_OBJECTS:
            self.found.used.add(attribute)
            self._add(f"{OF_OBJECTS[attribute]}.{attribute}")
        elif (self.file, attribute) in UNGUARDED:
            self.found.used.add((self.file, attribute))
        elif attribute not in self.own:
            self.found.unknown.append(f"{self._place(node)}: the owner of {attribute}: OF_OBJECTS")

    def _call(self, node: ast.Call) -> None:
        if (name := _dotted(node, self.bound)) is not None:
            self._add(name)
        match node.func, node.args:
            case ast.Name(id="setattr"), [owner, name, *_]:
                self.spoken.add(name)
                self._replacement(owner, _text(name), node)
            case function, [owner, ast.Constant(value=str(name)) as text, *_] if _called(function) in (
                "replace",
                "object",
            ):
                self.spoken.add(text)
                self._replacement(owner, name, node)
            case ast.Attribute(value=ast.Call(func=ast.Name(id="vars"), args=[owner])), _:
                self._replacement(owner, None, node)

    def _replacement(self, owner: ast.AST, name: str | None, node: ast.AST) -> None:
        """Count what is assigned to an attribute; ``name`` is None if it is a variable."""
        full = _dotted(owner, self.bound)
        owners: tuple[str, ...]
        if full is not None and full.startswith("megatron."):
            owners = (full.removeprefix("megatron."),)
            names = BY_VARIABLE.get((self.file, owners[0]), ()) if name is None else (name,)
            if name is None and names:
                self.found.used.add((self.file, owners[0]))
            if not names:
                self.found.unknown.append(f"{self._place(node)}: the names that are replaced: BY_VARIABLE")
        elif full is not None or name is None or _is_self(owner) or ast.unparse(owner) == "ctx":
            return
        elif (self.file, name) in ON_OBJECTS:
            owners, names = ON_OBJECTS[self.file, name], (name,)
            self.found.used.add((self.file, name))
        else:
            is_other = name in self.own
            if (self.file, name) in OTHER_ATTRIBUTES:
                self.found.used.add((self.file, name))
                is_other = True
            if not is_other and name in OF_OBJECTS:
                self._of_object(name, node)
            elif not is_other and name in definitions.functions(_installed()):
                self.found.unknown.append(f"{self._place(node)}: the owner of {name}: ON_OBJECTS")
            return
        for one in owners:
            for attribute in names:
                self._add(f"megatron.{one}.{attribute}")
                self.found.replaced[f"{one}.{attribute}"].add(self.file)

    def _place(self, node: ast.AST) -> str:
        return f"{self.file}:{getattr(node, 'lineno', 0)}"


def _text(node: ast.AST) -> str | None:
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else None


def _installed() -> Path:
    return megatron_of(installed())
