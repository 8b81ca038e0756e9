"""Tests of hooks that a graph could miss, including hooks that are added or removed between steps."""

from pathlib import Path

import pytest
from compiled_runs import FALLS_BACK, Base, Case, Training, check, check_plain, net, params_of, sgd

HERE = Path(__file__).name


def changed(change, at=1, undo=None, make=sgd, module=net):
    """Return a function that builds a run with `change(training, seen)` before step `at` and `undo` before step 9."""

    def build():
        model = module()
        training, seen = Training(model, make(model)), []
        handles = []

        def act(training):
            handles.append(change(training, seen))

        if at == 0:
            act(training)
        else:
            training.before[at] = act
        if undo is not None:
            training.before[9] = lambda _: undo(handles[0])
        training.observe = lambda: seen
        training.end = lambda: [handle.remove() for handle in handles if handle is not None]
        return training

    return build


def removed(handle):
    handle.remove()


# ---- parameter hooks --------------------------------------------------------------------------------------


def halves(training, seen):
    """Halve the first weight's gradient."""
    return training.model[0].weight.register_hook(lambda grad: grad * 0.5)


def clips_after(training, seen):
    """Clip the gradient after its accumulation."""

    def clip(param):
        seen.append(1)
        param.grad.clamp_(-0.01, 0.01)

    return training.model[3].weight.register_post_accumulate_grad_hook(clip)


def module_backward(training, seen):
    def hook(module, grad_input, grad_output):
        seen.append(grad_output[0].clone())
        return (grad_input[0] * 0.5,)

    return training.model[3].register_full_backward_hook(hook)


_GRADIENT_HOOKS = {
    "a `Tensor.register_hook` hook": halves,
    "a post-accumulate-grad hook": clips_after,
    "a module's full backward hook": module_backward,
}


GRADIENT_HOOKS = [
    Case(
        f"{what}, {when}",
        changed(hook, at, undo),
        FALLS_BACK,
        "hook",
        fast=hook in (halves, clips_after) and at == 5 and undo is None,
    )
    for what, hook in _GRADIENT_HOOKS.items()
    for when, at, undo in (
        ("from the start", 0, None),
        ("from step 5 on", 5, None),
        ("from step 5 to 9", 5, removed),
    )
    if hook is halves or (at, undo) == (5, removed)
]


class HookInside(Base):
    """A tensor hook inside forward."""

    def change(self, x):
        x.register_hook(lambda grad: grad * 0.5)
        return x


def retained():
    """The loop reads the gradient of an activation after each step."""
    model, seen = net(), []

    def keep(module, args, output):
        output.retain_grad()
        model.kept = output

    model[0].register_forward_hook(keep)
    return Training(
        model, sgd(model), after=lambda: seen.append(model.kept.grad.clone()), observe=lambda: seen
    )


INSIDE = [
    Case("a tensor hook inside forward", lambda: (m := HookInside()) and Training(m, sgd(m)), fast=True),
    Case("`retain_grad()` on an activation", retained, FALLS_BACK, "retain_grad", HERE),
]


# ---- forward hooks and optimizer hooks --------------------------------------------------------------------


def scales_output(training, seen):
    return training.model[1].register_forward_hook(lambda module, args, output: output * 0.5)


def shrinks_before(training, seen):
    """Shrink gradients before the optimizer step."""

    def hook(optimizer, args, kwargs):
        seen.append(1)
        for param in optimizer.param_groups[0]["params"]:
            param.grad.mul_(0.5)

    return training.optimizer.register_step_pre_hook(hook)


def patched_step(training, seen):
    """Replace the optimizer's step with a version that also counts its calls and halves the gradients."""
    optimizer, original = training.optimizer, training.optimizer.step

    def step(closure=None):
        seen.append(1)
        for param in optimizer.param_groups[0]["params"]:
            param.grad.mul_(0.5)
        return original(closure)

    optimizer.step = step


_OTHER_HOOKS = {
    "a forward hook": scales_output,
    "an optimizer step pre-hook": shrinks_before,
}
OTHER_HOOKS = [
    *(
        Case(
            f"{what}, {when}",
            changed(hook, at, undo),
            fast=hook in (scales_output, shrinks_before) and at == 5,
        )
        for what, hook in _OTHER_HOOKS.items()
        for when, at, undo in (("from the start", 0, None), ("from step 5 to 9", 5, removed))
        if at or hook in (scales_output, shrinks_before)
    ),
    Case("`optimizer.step` replaced, from step 5 on", changed(patched_step, 5)),
]


CASES = [*GRADIENT_HOOKS, *INSIDE, *OTHER_HOOKS]


@pytest.mark.parametrize("case", params_of(CASES, fast_only=True))
def test_eager_step_matches_a_plain_loop(case):
    check_plain(case)


@pytest.mark.parametrize("case", params_of(CASES))
def test_compiled_step_matches_a_plain_loop(case):
    check(case)
