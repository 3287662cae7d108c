"""A model and its example inputs at every batch size, on the device of the run."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from pytest_cudagraph import inputs, pytree, sources, state
from pytest_cudagraph.backends.buffers import check_output
from pytest_cudagraph.errors import EagerFailed, InputError, first_line
from pytest_cudagraph.foreign import message_of, value_text
from pytest_cudagraph.inputs import Example
from pytest_cudagraph.inputs.example import map_example, opaque_arguments
from pytest_cudagraph.protocols import Backend, Model
from pytest_cudagraph.settings.case import Case, ModelCall
from pytest_cudagraph.values import GraphReport


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedModel:
    """A model with one example per batch size. ``eager`` is the user's model, on the device of the run."""

    eager: Model
    examples: Mapping[int, Example]
    resizing: inputs.Resizing | None = None
    batch_dim: Any = 0
    is_copy: bool = False
    """Whether ``eager`` is a copy of the user's model, moved to the device with ``Module.to``."""
    reset: Callable[[], object] | None = None
    """Brings the state back in place before each measured call. None: the values are copied."""

    def __post_init__(self) -> None:
        _check_reset(self.reset)

    def drawing(self, draw: Any) -> PreparedModel:
        """The same model, whose new inputs ``draw`` gives. Raises :class:`InputError` for inputs of another form."""
        return replace(self, examples=inputs.with_draw(self.examples, draw, self.batch_dim))


def prepare_model(call: ModelCall, case: Case, backend: Backend) -> PreparedModel:
    """Resize the example inputs to every batch size, and check that model and inputs are on the run's device.

    A module on the CPU with CPU inputs is copied to the GPU, so that the same test runs on both. The user's own module
    is not changed. Raises :class:`~pytest_cudagraph.errors.InputError`.
    """
    _check_call(call)
    target, model, user_example = backend.device, call.model, Example(args=call.args, kwargs=dict(call.kwargs))
    is_copy = (
        _all_on_cpu(model, user_example) and torch.device(target).type != "cpu" and isinstance(model, torch.nn.Module)
    )
    if is_copy:
        model = copy.deepcopy(model).to(target)
        user_example = map_example(user_example, lambda tensor: tensor.to(target))
    examples = inputs.batch_examples(user_example, case.batch_sizes, call.batch_dim)
    for example in examples.values():
        inputs.check_device(example, target)
    resizing = inputs.resizing(user_example, call.batch_dim)
    prepared = PreparedModel(
        eager=model,
        examples=examples,
        resizing=resizing,
        batch_dim=call.batch_dim,
        is_copy=is_copy,
        reset=call.reset,
    )
    return prepared.drawing(call.draw)


def _check_reset(reset: object) -> None:
    if reset is not None and not callable(reset):
        takes = "a function without arguments, such as lambda: position.fill_(n)"
        raise InputError(f"reset takes {takes}; found {type(reset).__name__}")


def _check_call(call: ModelCall) -> None:
    model, kwargs = call.model, call.kwargs
    if not callable(model):
        raise InputError(f"the model must be callable; found {type(model).__name__}")
    if isinstance(model, type) and any("__call__" in vars(base) for base in model.__mro__):
        name = model.__qualname__
        raise InputError(f"the model must be an object; found the class {name}: make one of it, as in {name}(...)")
    # Values are left out of the message: a tensor fills a screen.
    keys = list(kwargs) if isinstance(kwargs, Mapping) else [type(kwargs).__name__]
    if not isinstance(kwargs, Mapping) or not all(isinstance(key, str) for key in keys):
        shown = ", ".join(key if isinstance(key, str) else value_text(key) for key in keys)
        raise InputError(f"kwargs takes a mapping of argument names to values; found {shown}")


def _all_on_cpu(model: Model, example: Example) -> bool:
    held = [tensor for module in state.modules_of(model) for tensor in (*module.parameters(), *module.buffers())]
    return all(tensor.device.type == "cpu" for tensor in (*held, *pytree.tensors_in((example.args, example.kwargs))))


def run_once(call: ModelCall, case: Case) -> GraphReport:
    """Call the model once per batch size on its own device, and judge nothing: a run without ``--cudagraph``."""
    __tracebackhide__ = True
    _check_call(call)
    example = Example(args=call.args, kwargs=dict(call.kwargs))
    examples = inputs.batch_examples(example, case.batch_sizes, call.batch_dim)
    inputs.with_draw(examples, call.draw, call.batch_dim)
    resizing = inputs.resizing(example, call.batch_dim)
    model = PreparedModel(eager=call.model, examples=examples, resizing=resizing, reset=call.reset)
    with torch.inference_mode():
        _call_each(model, state.Constants.take(model.eager))
    return nothing_judged(case)


def nothing_judged(case: Case) -> GraphReport:
    """The report of a run without ``--cudagraph``."""
    return GraphReport(nodeid=case.nodeid, name=case.name, device=None, compile_mode=case.compile)


def run_eagerly(
    model: PreparedModel, backend: Backend, after_call: Callable[[], object] = lambda: None
) -> state.Constants:
    """Call the model once per batch size, without a graph, and check its outputs. ``after_call`` runs after each call.

    Raises :class:`~pytest_cudagraph.errors.EagerFailed` from the model's own exception, and
    :class:`~pytest_cudagraph.errors.InputError` for outputs that a graph cannot return.
    """
    __tracebackhide__ = True
    constants = state.Constants.take(model.eager)
    with backend.running():

        def look(output: Any) -> None:
            check_output(output)
            backend.synchronize()
            after_call()

        _call_each(model, constants, look)
    backend.synchronize()
    return constants.without(constants.changed())


def _call_each(
    model: PreparedModel, constants: state.Constants, look: Callable[[Any], object] = lambda output: None
) -> None:
    """Call the model once per batch size. Each call finds the same values in the state, but for large parameters.

    A cache for one batch size is left for the smallest, at which the audit begins.
    """
    __tracebackhide__ = True
    extras, smallest, addresses = opaque_arguments(model.examples.values()), min(model.examples), None
    rewind = state.Snapshot.take(model.eager, extras=extras, constants=constants).rewinder()

    def call(batch_size: int) -> Any:
        __tracebackhide__ = True
        example = model.examples[batch_size]
        output = _call_example(model.eager, batch_size, example, model.resizing, is_copy=model.is_copy)
        rewind()
        return output

    for batch_size in model.examples:
        look(call(batch_size))
        if batch_size == smallest:
            addresses = _addresses(model.eager, extras)
    if _addresses(model.eager, extras) != addresses:
        call(smallest)


def _addresses(model: Model, extras: Mapping[str, Any]) -> dict[str, int]:
    return {name: tensor.data_ptr() for name, tensor in state.live(model, extras=extras).items()}


def _call_example(
    model: Model, batch_size: int, example: Example, resizing: inputs.Resizing | None, *, is_copy: bool = False
) -> Any:
    __tracebackhide__ = True
    # On copies: the examples must not change when a model writes to its inputs or removes items of a dict.
    copied = inputs.clone(example)
    tensors = inputs.named_tensors(copied)
    try:
        output = model(*copied.args, **copied.kwargs)
    # Whatever the model raises is reported as its own failure in eager mode, with the cause.
    except Exception as error:
        site = sources.user_site_of(error)
        place = f" ({site})" if site else ""
        failure = EagerFailed(
            "\n  ".join(
                [
                    f"batch {batch_size}: eager raised {first_line(error)}{place}",
                    *([f"at {sources.describe(site)}"] if site else []),
                    *_circumstances(batch_size, resizing),
                    *_hints(error, is_copy=is_copy),
                    *_one_tuple(example),
                ]
            )
        )
        failure.own = error.with_traceback(_from_the_model(error))
        raise failure from error
    _check_sizes(batch_size, example, tensors)
    return output


def _check_sizes(batch_size: int, example: Example, called: Mapping[str, torch.Tensor]) -> None:
    """Refuse a model that resizes its inputs: a graph reads them at fixed addresses, in fixed sizes."""
    for name, before in inputs.named_tensors(example).items():
        if called[name].shape != before.shape:
            raise InputError(
                f"batch {batch_size}: a graph reads inputs of fixed sizes; the model resizes {name} from "
                f"{tuple(before.shape)} to {tuple(called[name].shape)}: let it work on a copy ({name}.clone())"
            )


def _circumstances(batch_size: int, resizing: inputs.Resizing | None) -> list[str]:
    """That no graph is involved, and whether the example was resized."""
    by_itself = "the model fails by itself, without any graph"
    if resizing is None or resizing.size in (None, batch_size):
        return [by_itself]
    resized = f"the example has batch {resizing.size}; resized to {batch_size}: {', '.join(resizing.names)}"
    remedy = f"batch_sizes=[{resizing.size}] runs it at its own size alone"
    if len(resizing.names) > 1:
        remedy = f"a tensor without a batch dimension needs None in batch_dim; {remedy}"
    return [f"{by_itself}, at a batch size that the example does not have", f"{resized}; {remedy}"]


def _hints(error: BaseException, *, is_copy: bool) -> list[str]:
    """The inference mode of the run, or that the plugin moved the model, where one may be the cause."""
    hints = []
    if any(word in message_of(error) for word in ("requires_grad", "require grad", "Inference tensors")):
        hints.append("models run under torch.inference_mode() here: what a graph serves has no backward pass")
    if is_copy and "Expected all tensors to be on the same device" in message_of(error):
        hints.append(
            "the test's model and inputs are on the CPU, so this is a copy that was moved with Module.to. That moves "
            "parameters and buffers, and no other tensor of an attribute, a list or a closure"
        )
        hints.append("register such a tensor as a buffer, or make model and inputs on cudagraph.device")
    return hints


def _one_tuple(example: Example) -> list[str]:
    """That the model got all inputs as one argument, as a ``(x, y)`` without its star gives them."""
    if len(example.args) != 1 or example.kwargs or type(example.args[0]) not in (tuple, list):
        return []
    inputs_ = example.args[0]
    return [
        f"the model got one argument, a {type(inputs_).__name__} of {len(inputs_)}; "
        "to give each its own argument, put a star before it: cudagraph(model, *inputs)"
    ]


def _from_the_model(error: BaseException) -> Any:
    """The traceback without this module's frame, so that a reader starts at the model."""
    return error.__traceback__.tb_next if error.__traceback__ else None
