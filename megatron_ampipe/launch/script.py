"""Runs a training script of a Megatron-LM checkout, unedited, with AMPipe's flags.

    torchrun ... -m megatron_ampipe.launch PATH/pretrain_gpt.py <its flags> --ampipe-degree 4

The script runs as ``__main__``, with its own folder first on the path, as when it is launched by hand. Steps
of Megatron are wrapped that all training passes through. At degree 1 they pass on what they are given.
"""

import argparse
import functools
import inspect
import runpy
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from megatron_ampipe import compat
from megatron_ampipe.errors import AMPipeError
from megatron_ampipe.launch.ending import run_to_end
from megatron_ampipe.launch.failures import known_cause, raised_in, refuse_as_bad_input
from megatron_ampipe.launch.session import TrainingSession

USAGE = """\
usage: torchrun ... -m megatron_ampipe.launch PATH/pretrain_gpt.py FLAGS...

Runs a training script of a Megatron-LM checkout, unedited, with AMPipe's flags in addition to its own.

  PATH/pretrain_gpt.py   the script; the megatron package next to it is the one that is used
  FLAGS                  the script's own, and --ampipe-degree N and the like; after the script,
                         --help lists them all
"""

Provider = Callable[[argparse.ArgumentParser], argparse.ArgumentParser]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the script of a command line, that of the process when None, and return the exit code."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    if words[:1] in (["-h"], ["--help"]):
        print(USAGE)
        return 0
    script = "".join(words[:1])
    session = TrainingSession(words[1:], script=script)

    def run() -> int:
        rule, remedy = "is not a script", "Name it before all flags: -m megatron_ampipe.launch SCRIPT FLAGS"
        if script and Path(script).is_dir():
            rule, remedy = "is a folder", f"Name the script in it: {Path(script, 'pretrain_gpt.py')}."
        if not Path(script).is_file():
            raise session.refused_script(rule, remedy)
        return run_script(Path(script), session)

    return run_to_end(run)


def run_script(script: Path, session: TrainingSession) -> int:
    """Run ``script`` in this process, and return its exit code; :class:`AMPipeError` for bad input."""
    # In place of what "python -m" set, as if the script had been named on python's command line.
    sys.path[0] = str(script.resolve().parent)
    words = session.prepare_platform()
    steps = _ScriptSteps(session)
    steps.wrap()
    sys.argv = [str(script), *words]
    code = 0
    try:
        runpy.run_path(str(script), run_name="__main__")
    except SystemExit as stop:
        if (cause := known_cause(stop)) is not None:
            raise cause from stop
        if isinstance(stop.code, str):
            print(stop.code, file=sys.stderr)
        code = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    except Exception as error:
        # What Megatron objects to before it trains is bad input, as in our own entry.
        if steps.training or isinstance(error, AMPipeError) or not raised_in("megatron", error):
            raise
        with refuse_as_bad_input():
            raise
    finally:
        session.end()
    if code == 0 and not steps.parsed:
        rule = "it did not read its arguments with Megatron's parser, so no flag of AMPipe was read"
        raise session.refused_script(rule)
    if code == 0:
        session.require_pipelined_model()
    return code


class _ScriptSteps:
    """The steps of Megatron in which a script's launch calls its session."""

    def __init__(self, session: TrainingSession) -> None:
        self._session = session
        self._models: tuple[type, ...] = ()
        self.parsed = False
        """Whether the script has read its arguments with Megatron's parser."""
        self.training = False
        """Whether Megatron's training has begun, so that an error is no longer one of the input."""

    def wrap(self) -> None:
        """Wrap them, before the script imports them, wherever Megatron's own modules hold them by name."""
        import megatron.training as package
        from megatron.core.models.gpt import GPTModel
        from megatron.training import arguments, initialize, training

        arguments.parse_args = _around(arguments.parse_args, self._parse)
        arguments.validate_args = _around(arguments.validate_args, self._validate)
        for name in ("parse_args", "validate_args"):
            if hasattr(initialize, name):
                setattr(initialize, name, getattr(arguments, name))
        self._wrap_model(GPTModel, is_stack=False)
        if compat.has_hybrid_models():
            from megatron.core.models.hybrid.hybrid_model import HybridModel

            self._wrap_model(HybridModel, is_stack=True)
        training.setup_model_and_optimizer = _around(training.setup_model_and_optimizer, self._set_up)
        package.pretrain = training.pretrain = _around(training.pretrain, self._train)

    def _parse(
        self,
        parse: Callable[..., Any],
        extra_args_provider: Provider | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """Megatron's ``parse_args``, with AMPipe's flags."""

        def provide(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
            parser = extra_args_provider(parser) if extra_args_provider is not None else parser
            return self._session.add_arguments(parser)

        self.parsed = True
        with refuse_as_bad_input():
            parsed = parse(provide, *args, **kwargs)
        self._session.check_parsed(parsed)
        return parsed

    def _validate(self, validate: Callable[..., Any], args: Any, *rest: Any, **kwargs: Any) -> Any:
        """Megatron's ``validate_args``, then AMPipe's checks, the start-up table, and the run's record."""
        with refuse_as_bad_input():
            validated = validate(args, *rest, **kwargs)
        self._session.accept(args)
        return validated

    def _wrap_model(self, model: type, *, is_stack: bool) -> None:
        """Have the constructor pipeline the specification that is its second argument."""
        signature = inspect.signature(model.__init__)
        name = list(signature.parameters)[2]

        def pipelining(construct: Callable[..., None], *args: Any, **kwargs: Any) -> None:
            bound = signature.bind(*args, **kwargs)
            bound.arguments[name] = self._session.pipelined(bound.arguments[name], is_stack=is_stack)
            construct(*bound.args, **bound.kwargs)

        model.__init__ = _around(model.__init__, pipelining)  # type: ignore[method-assign]
        self._models += (model,)

    def _set_up(self, set_up: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """``setup_model_and_optimizer``, whose models have to be pipelined before the first iteration."""
        from megatron.core.utils import unwrap_model

        made = set_up(*args, **kwargs)
        kinds = {type(chunk) for chunk in unwrap_model(made[0])}
        known = self._session.num_models > 0 and all(issubclass(kind, self._models) for kind in kinds)
        if self._session.changes_layers and not known:
            names = " and ".join(sorted(kind.__name__ for kind in kinds))
            raise self._session.refused_script(
                f"it trains a {names}, and only GPT and hybrid models can be pipelined"
            )
        return made

    def _train(self, pretrain: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """``pretrain`` with a forward step that has this run's hooks."""
        bound = inspect.signature(pretrain).bind(*args, **kwargs)
        bound.arguments["forward_step_func"] = self._session.hooked(bound.arguments["forward_step_func"])
        self.training = True
        return pretrain(*bound.args, **bound.kwargs)


def _around(function: Callable[..., Any], step: Callable[..., Any]) -> Callable[..., Any]:
    """What calls ``step`` with the function and its arguments."""

    @functools.wraps(function)
    def called(*args: Any, **kwargs: Any) -> Any:
        return step(function, *args, **kwargs)

    return called
