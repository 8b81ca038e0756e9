"""Dynamo settings and checks for capturing a step."""

from __future__ import annotations

import logging
import re
import warnings
from collections import deque
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from types import CodeType
from typing import Any, cast

import torch
from torch import Tensor, fx
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from slipstream.step.verification import NotCapturedError, OnlyEagerError

__all__ = [
    "capture_config", "captured_code", "changed_objects", "check_random", "check_traced", "prepare_graph",
    "prepare_step_graph", "recompute_in_graph", "side_effects", "why_not_recomputed",
]  # fmt: skip

_LOG_NAME = re.compile(r"(debug|info|warn|error|critical|exception|fatal|log)(?!ger)")
_RANDOM_NAME = re.compile(
    r"dropout|rand|bernoulli|normal_?$|multinomial|poisson|attention|rrelu|exponential_|uniform_|cauchy_|geometric_"
)

# The sources of guards that never fail: the step's update, its own classes and functions, and builtins.
_CONSTANT = re.compile(
    r"function\.update\.|(dict\()?type\(function(\.update)?\)|G\['__(builtins_dict|import_slipstream_dot_step_dot)"
)


@contextmanager
def capture_config(autograd: bool = True) -> Iterator[None]:
    """Apply the settings for capturing and compiling a step (with `autograd`) or a module."""
    # Compile the backward pass of a module together with its forward pass.
    functorch: dict[str, Any] = {"force_non_lazy_backward_lowering": True}
    if hasattr(torch._functorch.config, "backward_pass_autocast"):
        # Otherwise, float32 regions run their backward pass in lower precision.
        functorch["backward_pass_autocast"] = "off"
    # A checkpointed block that changes its arguments, such as a key-value cache, changes them in forward only.
    changes = "skip_fwd_side_effects_in_bwd_under_checkpoint"
    settings: dict[str, Any] = {changes: True} if hasattr(torch._dynamo.config, changes) else {}
    if torch.__version__ >= "2.12":  # torch 2.11 tries to log these functions as JSON
        settings["ignore_logging_functions"] = _log_functions()
    with (
        torch._dynamo.config.patch(
            trace_autograd_ops=autograd,
            # Without this setting, a counter that a module increments in forward causes a new graph at every step.
            allow_unspec_int_on_nn_module=True,
            # Capture a new graph if hooks are added or removed later.
            skip_nnmodule_hook_guards=False,
            # Without this setting, NumPy's random numbers are drawn from torch's generator.
            use_numpy_random_stream=True,
            **settings,
        ),
        torch._functorch.config.patch(functorch),
    ):
        yield


def _log_functions() -> set[Any]:
    """Return `warnings.warn` and the functions that write log messages, with those that libraries add to `Logger`."""
    owners = (logging, logging.Logger, logging.getLoggerClass(), *logging.Logger.__subclasses__())
    return _find_log_functions(owners, tuple(len(vars(owner)) for owner in owners))


@lru_cache(maxsize=1)
def _find_log_functions(owners: tuple[Any, ...], sizes: tuple[int, ...]) -> set[Any]:
    """Return the functions of the owners; `sizes`, the numbers of their names, change when a library adds one."""
    named = [item for owner in owners for item in vars(owner).items()]
    found = {f for name, f in named if _LOG_NAME.match(name) and callable(f) and not isinstance(f, type)}
    return found | {warnings.warn}


def _translator() -> Any:
    """Return Dynamo's instruction translator for the current capture; call this function only from a backend."""
    return torch._dynamo.symbolic_convert.InstructionTranslator.current_tx()


def captured_code() -> CodeType:
    """Return the code object that Dynamo captures; call this function only from a backend."""
    return cast("CodeType", _translator().f_code)


def side_effects() -> list[tuple[dict[str, Any], str, Any]] | None:
    """Return what Dynamo changes in existing Python objects after the graph has run; call it only from a backend.

    Returns:
        The attributes that become constants: the object's dict, the name and the value. None if Dynamo changes
        anything else.
    """
    from torch._dynamo.variables import UserDefinedObjectVariable

    effects = _translator().output.side_effects
    if effects.tensor_hooks or effects.save_for_backward:
        return None
    found: list[tuple[dict[str, Any], str, Any]] = []
    for variable in effects.id_to_variable.values():
        if not _is_changed(effects, variable):
            continue
        values = effects.store_attr_mutations.get(variable, {})
        owner = variable.value if isinstance(variable, UserDefinedObjectVariable) else ()
        if not hasattr(owner, "__dict__") or isinstance(owner, Collection):
            return None
        if not all(value.is_python_constant() for value in values.values()):
            return None
        found += [(vars(owner), name, value.as_python_constant()) for name, value in values.items()]
    return found


def _is_changed(effects: Any, variable: Any) -> bool:
    """Return whether Dynamo changes an object that existed before the capture."""
    from torch._dynamo.variables.base import AttributeMutationNew, ValueMutationNew

    is_new = isinstance(variable.mutation_type, AttributeMutationNew | ValueMutationNew)
    return effects.is_modified(variable) and not is_new


def changed_objects() -> list[Any]:
    """Return the existing Python objects that the captured code changes; call this function only from a backend."""
    effects = _translator().output.side_effects
    variables = ((each, effects.id_to_variable.get(id(each))) for each in effects.keepalive)
    return [each for each, variable in variables if variable is not None and _is_changed(effects, variable)]


def check_traced() -> None:
    """Check, from inside the step, that Dynamo is tracing the step rather than skipping it.

    Raises:
        NotCapturedError: the step runs without compilation.
    """
    if not torch.compiler.is_dynamo_compiling():
        raise NotCapturedError(
            "torch.compile is disabled, or an active TorchDispatchMode does not support it; enable torch.compile, or "
            "exit the mode"
        )


def needed_guards(guards: Sequence[Any]) -> list[bool]:
    """Return, for each guard of a captured step, whether it is needed; guards cost time in each step."""
    tensors = ("TENSOR_MATCH", "DUPLICATE_INPUT")
    return [guard.guard_type in tensors or not _CONSTANT.match(guard.name) for guard in guards]


def check_random() -> None:
    """Check that a step does not use Python's `random`, because the verification would also draw numbers from it.

    Raises:
        NotCapturedError: the step uses Python's random module.
        OnlyEagerError: the step uses a `random.Random` object.
    """
    output = _translator().output
    # Compare class names, because torch has two classes with this name, and their modules depend on the version.
    if any(type(value).__name__ == "RandomVariable" for value in output.side_effects.id_to_variable.values()):
        # Under Dynamo, such an object returns different numbers, even if only the model is compiled.
        raise OnlyEagerError("the step uses a random.Random object; use torch's random number generator")
    if output.random_calls:
        raise NotCapturedError("the step uses Python's random module; use torch's random number generator")


def why_not_recomputed() -> str | None:
    """Return the reason why torch does not recompute checkpointed activations in a step's graph, or None if it does."""
    # torch 2.11 does not recognize the nodes of `torch.autograd.grad`, and silently keeps all activations.
    if torch.__version__ >= "2.12":
        return None
    return "activation checkpointing in a step's graph requires torch 2.12 or newer, which recomputes activations there"


def prepare_step_graph(graph: fx.GraphModule) -> int:
    """Prepare a captured step as `prepare_graph` does, and store random results in the user's checkpoints.

    Raises:
        NotCapturedError: the model calls `torch.utils.checkpoint`, and torch is older than 2.12.
    """
    for module in graph.modules():
        nodes = module.graph.nodes if isinstance(module, fx.GraphModule) else ()
        for node in nodes:
            if node.target is torch.ops.higher_order.tag_activation_checkpoint:
                if (reason := why_not_recomputed()) is not None:
                    raise NotCapturedError(reason)
                # torch cannot recompute random operators, so store their results.
                body = getattr(module, node.args[0].target)
                body.meta.setdefault("_checkpoint_context_fn", recompute_contexts)
    return prepare_graph(graph)


def prepare_graph(graph: fx.GraphModule) -> int:
    """Prepare a captured graph for compilation, in place; call this function only from a backend.

    The graph then also returns unused random results, because compilers drop them, which changes later random numbers.

    Returns:
        The number of outputs that were added to the graph.

    Raises:
        NotCapturedError: the graph enters inference mode, which torch cannot compile and may leave enabled, or a
            checkpointed block in it has unused random results.
        OnlyEagerError: the captured code changes a deque with `maxlen`.
    """
    if any(isinstance(each, deque) and each.maxlen is not None for each in changed_objects()):
        raise OnlyEagerError("torch.compile ignores the maxlen of a deque; use a list or a tensor")
    graphs = [module for module in graph.modules() if isinstance(module, fx.GraphModule)]
    for each in graphs:
        if each.meta.get("_checkpoint_context_fn") is recompute_in_graph:
            each.meta["_checkpoint_context_fn"] = recompute_contexts
    enter = torch.autograd.grad_mode._enter_inference_mode
    if any(node.target is enter for each in graphs for node in each.graph.nodes):
        raise NotCapturedError("torch.inference_mode() cannot be compiled; use torch.no_grad()")
    if any(_unused_random(each) for each in graphs if each is not graph):
        raise NotCapturedError("a checkpointed block draws random numbers that nothing uses")
    unused = _unused_random(graph)
    if unused:
        output = graph.graph.output_node()
        with graph.graph.inserting_before(output):
            # Detached, because torch would otherwise trace another backward pass from these outputs.
            added = [graph.graph.call_method("detach", (node,)) for node in unused]
        output.args = ((*cast("tuple[Any, ...]", output.args[0]), *added),)
        graph.recompile()
    return len(unused)


def _unused_random(graph: fx.GraphModule) -> list[fx.Node]:
    """Return the results of random operators on which no output of the graph depends."""
    used: set[fx.Node] = {graph.graph.output_node()}
    for node in reversed(graph.graph.nodes):
        if node in used:
            used.update(node.all_input_nodes)
    random: set[fx.Node] = set()
    for node in graph.graph.nodes:
        name = str(getattr(node.target, "__name__", node.target))
        if node.op.startswith("call") and (
            _RANDOM_NAME.search(name) or (name == "getitem" and random.issuperset(node.all_input_nodes))
        ):
            random.add(node)
    unused = [node for node in graph.graph.nodes if node in random - used]
    return [node for node in unused if isinstance(node.meta.get("example_value"), Tensor)]


def recompute_in_graph() -> Any:
    """Return `recompute_contexts()`, which replaces this function in graphs that are passed to `prepare_graph`.

    Raises:
        NotCapturedError: the checkpointed block contains a graph break, so torch runs it without the state of forward.
    """
    if torch._guards.TracingContext.try_get() is not None:  # the graph is being compiled
        return recompute_contexts()
    raise NotCapturedError("a block with activation_checkpointing contains a graph break")


def recompute_contexts() -> Any:
    """Return the contexts of a checkpoint in a graph, which stores the results of random operators and collectives."""
    return create_selective_checkpoint_contexts(_keep_in_graph)


def _keep_in_graph(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """Save the results of random operators and collectives, and recompute all other results."""
    random = torch.Tag.nondeterministic_seeded in getattr(operator, "tags", ())
    communicates = getattr(operator, "namespace", "") == "_c10d_functional"
    return CheckpointPolicy.MUST_SAVE if random or communicates else CheckpointPolicy.PREFER_RECOMPUTE


def _not_about_context_fn(record: logging.LogRecord) -> bool:
    return "context_fn is passed to torch.utils.checkpoint" not in record.getMessage()


# torch warns that in-place operations may change saved results. A test verifies that this does not happen here.
logging.getLogger("torch._higher_order_ops.wrap").addFilter(_not_about_context_fn)
