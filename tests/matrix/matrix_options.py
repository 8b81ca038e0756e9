"""The options of the matrix: their changes to a Runner's configuration, and valid combinations."""

from matrix_by_hand import (
    BETA,
    CLIP_FACTOR,
    DECAY,
    EPS,
    INTERVAL,
    LAYER_FACTOR,
    LR_STEPS,
    MAX_NORM,
    MOMENTUM_STEPS,
    RHO,
    SCALE,
    STOP,
    WINDOW,
)

from slipstream.step.dynamo import why_not_recomputed


def _speed(**options):
    def change(config):
        config["speed"].update(options)

    return change


def _fp16(config):
    config["speed"]["precision"] = "fp16"
    config["optim_wrapper"]["loss_scale"] = SCALE


def _compile(scope):
    def change(config):
        config["speed"]["compile"] = dict(scope=scope, backend=config.pop("backend"), cache=False)

    return change


def _param_groups(config):
    rules = dict(bias_lr_mult=2.0, norm_decay_mult=0.0, custom_keys={"head": dict(lr_mult=0.5)})
    config["optim_wrapper"]["paramwise_cfg"] = rules


def _scheduler(config):
    (lr, lr_steps), (momentum, momentum_steps) = LR_STEPS, MOMENTUM_STEPS
    config["param_scheduler"] = [
        dict(type="LinearLR", start_factor=lr, end=lr_steps, by_epoch=False),
        dict(type="LinearMomentum", start_factor=momentum, end=momentum_steps, by_epoch=False),
    ]


def _resume(config):
    checkpoint = dict(type="CheckpointHook", interval=STOP, by_epoch=False, save_last=False)
    config["default_hooks"]["checkpoint"] = checkpoint


OPTIONS = {
    "bf16": _speed(precision="bf16"),
    "fp16": _fp16,
    "compile=step": _compile("step"),
    "compile=model": _compile("model"),
    "EMA": _speed(ema=dict(decay=DECAY, type="exp", beta=BETA)),
    "SyncBN": _speed(sync_bn=True),
    "DDP": _speed(parallel="ddp"),
    "FSDP2": _speed(parallel=dict(type="fsdp2", wrap=["Block"])),
    "accumulation": _speed(accumulate=WINDOW),
    "clipping": _speed(clip_grad=dict(max_norm=MAX_NORM)),
    "channels_last": _speed(channels_last=True),
    "checkpointing": _speed(activation_checkpointing=["Block"]),
    "fused": _speed(fused=True),
    "param groups": _param_groups,
    "scheduler": _scheduler,
    "resume": _resume,
    "SAM": _speed(sam=dict(rho=RHO)),
    "adaptive clipping": _speed(adaptive_clip=dict(clip_factor=CLIP_FACTOR, eps=EPS)),
    "centralization": _speed(gradient_centralization=True),
    "layer decay": _speed(layer_decay=dict(decay=LAYER_FACTOR, layers=["net.stem", "net.block"])),
    "SWA": _speed(ema=dict(type="swa", interval=INTERVAL)),
}
"""Functions that add each option to the arguments of a Runner. `config["backend"]` is the `torch.compile` backend."""

ONE_OF = [{"bf16", "fp16"}, {"compile=step", "compile=model"}, {"DDP", "FSDP2"}, {"EMA", "SWA"}]
"""Mutually exclusive options."""
OF_SEVERAL = {"SyncBN", "DDP", "FSDP2"}
"""Options that require several processes."""
IN_NUMBERS = {
    "bf16",
    "fp16",
    "EMA",
    "accumulation",
    "clipping",
    "param groups",
    "scheduler",
    "SAM",
    "adaptive clipping",
    "centralization",
    "layer decay",
    "SWA",
}
"""Options that change the results. The other options must not change the results."""
REFUSED = {
    (
        "compile=step",
        "FSDP2",
        None,
    ): "speed.compile: scope='step' does not support sharded models or custom wrappers",
    (
        "compile=step",
        "checkpointing",
        "SAM",
        None,
    ): "compile.scope: the step cannot be compiled as one graph: activation_checkpointing in a graph supports only one "
    "backward pass, but sam runs two",
    ("FSDP2", "fused", "conv"): "speed.fused: torch has no fused SGD kernel for sharded parameters",
}
"""Combinations that raise an error (the options, then the network or None for both), and the start of the message.
`everything` leaves out the second option."""
if reason := why_not_recomputed():  # torch 2.11
    REFUSED = {
        (
            "compile=step",
            "checkpointing",
            None,
        ): f"compile.scope: the step cannot be compiled as one graph: {reason}",
        **REFUSED,
    }
BREAKS = {("compile=model", "FSDP2")}
"""Combinations that may report graph breaks at the end of a run."""

TOLERANCES = {"fp32": (1e-5, 1e-6), "bf16": (5e-3, 5e-3), "fp16": (6e-4, 6e-4)}
"""Tolerances by precision: relative for losses, weights and EMA weights, absolute for weights and EMA weights.

In fp32, the absolute tolerance applies to weights near zero. It is 1e-5 times 0.1, the usual magnitude of a weight.
Half precision is compared with the same loop under autocast. Results differ because operations run in a different
order. The relative error of a single rounding is at most 4e-3 in bf16 and 5e-4 in fp16."""


def precision(options):
    """Return the key of TOLERANCES for these options."""
    return next((name for name in ("bf16", "fp16") if name in options), "fp32")


def refusal(options, net):
    """Return the start of the error message for these options, or None."""
    return REFUSED.get(_refused(options, net))


def _refused(options, net):
    keys = (key for key in REFUSED if {*key[:-1]} <= {*options} and key[-1] in (None, net))
    return next(keys, None)


def possible(options, processes, net=None):
    """Return whether these options can be combined. SyncBN requires a network with BatchNorm."""
    chosen = set(options)
    if any(alternatives <= chosen for alternatives in ONE_OF):
        return False
    return not (processes == 1 and chosen & OF_SEVERAL) and not (net == "transformer" and "SyncBN" in chosen)


def everything(processes, net, half=None, compiled="compile=step", parallel="DDP", left_out=()):
    """Return all options that can be combined with the given ones, except `left_out`. EMA is used instead of SWA."""
    left_out = set(left_out).union(*ONE_OF) - {half, compiled, parallel, "EMA"}
    if processes == 1:
        left_out |= OF_SEVERAL
    if not possible(["SyncBN"], processes, net):
        left_out.add("SyncBN")
    options = [option for option in OPTIONS if option not in left_out]
    while (refused := _refused(options, net)) is not None:
        options.remove(refused[1])
    return tuple(options)
