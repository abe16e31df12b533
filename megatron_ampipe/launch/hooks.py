"""Puts AMPipe into a training script that is not ours, by wrapping what such a script calls in Megatron.

Functions are wrapped that are steps which all of Megatron's training passes through, whatever the script
around it: the parser, the check of the arguments, the constructors of GPT and hybrid models, the model's
set-up, and the training loop's entry. At degree 1 all of them pass on what they are given. What is done there
is in :mod:`.session`. Called by :mod:`.script`, before the script is read, because scripts import these
functions by name.
"""

import argparse
import functools
import inspect
from collections.abc import Callable
from typing import Any

from megatron_ampipe import compat
from megatron_ampipe.launch.failures import refuse_as_bad_input
from megatron_ampipe.launch.session import TrainingSession

Provider = Callable[[argparse.ArgumentParser], argparse.ArgumentParser]


class Hooks:
    """The places in Megatron where a script's launch calls its session."""

    def __init__(self, session: TrainingSession) -> None:
        self._session = session
        self._parsed = False
        self._models: tuple[type, ...] = ()
        self.training = False
        """Whether Megatron's training has begun, so that an error is no longer one of the input."""

    def install(self) -> None:
        """Wrap the functions wherever Megatron's own modules hold them by name."""
        import megatron.training as package
        from megatron.core.models.gpt import GPTModel
        from megatron.training import arguments, initialize, training

        arguments.parse_args = self._parse(arguments.parse_args)
        arguments.validate_args = self._validate(arguments.validate_args)
        for name in ("parse_args", "validate_args"):
            if hasattr(initialize, name):
                setattr(initialize, name, getattr(arguments, name))
        GPTModel.__init__ = self._build(GPTModel.__init__, self._session.layer_spec)
        self._models = (GPTModel,)
        if compat.has_hybrid_models():
            from megatron.core.models.hybrid.hybrid_model import HybridModel

            HybridModel.__init__ = self._build(HybridModel.__init__, self._session.stack_spec)
            self._models += (HybridModel,)
        training.setup_model_and_optimizer = self._set_up(training.setup_model_and_optimizer)
        package.pretrain = training.pretrain = self._train(training.pretrain)

    def require_reached(self) -> None:
        """Refuse a script that has ended without AMPipe's having had a part in it.

        Raises:
            BadInput: It read its arguments by other means than Megatron's, or built no model to pipeline.
        """
        if not self._parsed:
            raise self._session.refused_script(
                "it did not read its arguments with Megatron's parser, so no flag of AMPipe was read"
            )
        self._session.require_pipelined_model()

    def _parse(self, parse: Callable[..., Any]) -> Callable[..., Any]:
        """Megatron's ``parse_args``, with AMPipe's flags."""

        @functools.wraps(parse)
        def parsing(extra_args_provider: Provider | None = None, *args: Any, **kwargs: Any) -> Any:
            def provide(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
                parser = extra_args_provider(parser) if extra_args_provider is not None else parser
                return self._session.add_arguments(parser)

            self._parsed = True
            with refuse_as_bad_input():
                parsed = parse(provide, *args, **kwargs)
            self._session.check_parsed(parsed)
            return parsed

        return parsing

    def _validate(self, validate: Callable[..., Any]) -> Callable[..., Any]:
        """Megatron's ``validate_args``, then AMPipe's checks, the start-up table, and the run's record."""

        @functools.wraps(validate)
        def validating(args: Any, *rest: Any, **kwargs: Any) -> Any:
            with refuse_as_bad_input():
                validated = validate(args, *rest, **kwargs)
            self._session.accept(args)
            return validated

        return validating

    def _build(self, construct: Callable[..., None], pipelined: Callable[[Any], Any]) -> Callable[..., None]:
        """A model's constructor, with the specification that is its second argument pipelined."""
        name = list(inspect.signature(construct).parameters)[2]

        @functools.wraps(construct)
        def constructing(model: Any, config: Any, *args: Any, **kwargs: Any) -> None:
            if name in kwargs:
                kwargs[name] = pipelined(kwargs[name])
            else:
                args = (pipelined(args[0]), *args[1:])
            construct(model, config, *args, **kwargs)

        return constructing

    def _set_up(self, set_up: Callable[..., Any]) -> Callable[..., Any]:
        """``setup_model_and_optimizer``, whose models have to be pipelined before the first iteration."""

        @functools.wraps(set_up)
        def setting_up(*args: Any, **kwargs: Any) -> Any:
            made = set_up(*args, **kwargs)
            if self._session.changes_layers:
                from megatron.core.utils import unwrap_model

                kinds = {type(chunk) for chunk in unwrap_model(made[0])}
                if self._session.num_models == 0 or not all(issubclass(kind, self._models) for kind in kinds):
                    names = " and ".join(sorted(kind.__name__ for kind in kinds))
                    raise self._session.refused_script(
                        f"it trains a {names}, and only GPT and hybrid models can be pipelined"
                    )
            return made

        return setting_up

    def _train(self, pretrain: Callable[..., Any]) -> Callable[..., Any]:
        """``pretrain`` with a forward step that tells the recorder which iteration it is in."""
        signature = inspect.signature(pretrain)

        @functools.wraps(pretrain)
        def training(*args: Any, **kwargs: Any) -> Any:
            bound = signature.bind(*args, **kwargs)
            forward_step = bound.arguments["forward_step_func"]
            bound.arguments["forward_step_func"] = self._session.recorded(forward_step)
            self.training = True
            return pretrain(*bound.args, **bound.kwargs)

        return training
