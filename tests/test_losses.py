"""Tests of the losses without full-resolution logits, against torch's losses of interpolated float64 logits."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from slipstream import accelerate, losses
from slipstream.errors import DataError, LossError
from slipstream.losses import Upsampled
from slipstream.model import Segmentor
from slipstream.training.network import SupervisedModel
from slipstream.zoo import CrossEntropy, DiceCEEdgeLoss, MultiHeadCrossEntropy, STDCLoss, models
from slipstream.zoo.network import Network

CLASSES, IGNORE = 5, 9


@pytest.fixture(autouse=True)
def _short_strips(monkeypatch):
    monkeypatch.setattr(losses, "_STRIP", 2 * CLASSES * 11 * 3)  # three rows of the largest outputs


def batch(size=(8, 11), low=(3, 4), channels=CLASSES, dtype=torch.float64, seed=0):
    generator = torch.Generator().manual_seed(seed)
    logits = 3 * torch.randn(2, channels, *low, generator=generator, dtype=torch.float64)
    targets = torch.randint(0, channels + 1, (2, *size), generator=generator)
    return logits.to(dtype).requires_grad_(), targets.where(targets < channels, IGNORE)


def enlarged(logits, size, align_corners, crop):
    return F.interpolate(logits, size, mode="bilinear", align_corners=align_corners)[
        ..., : crop[0], : crop[1]
    ]


sides = st.tuples(st.integers(1, 9), st.integers(1, 11))


@settings(max_examples=60, deadline=None)
@given(
    st.integers(0, 2**31),
    sides,
    sides,
    st.booleans(),
    st.booleans(),
    st.sampled_from([0.0, 0.1, 1.0]),
    st.integers(0, 3),
)
def test_losses_and_gradients_match_torch(seed, low, size, align_corners, weighted, smoothing, removed):
    crop = tuple(max(1, side - removed) for side in size)
    logits, targets = batch(crop, low, seed=seed)
    weight = torch.tensor([0.5, 2, 0, 1, 3], dtype=torch.float64) if weighted else None
    found = losses.cross_entropy(
        Upsampled(logits, size, align_corners, crop), targets.to(torch.uint8), weight, smoothing, IGNORE
    )
    full = enlarged(logits, size, align_corners, crop)
    wanted = F.cross_entropy(
        full, targets, weight, ignore_index=IGNORE, reduction="none", label_smoothing=smoothing
    )
    torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-10)
    vector = torch.randn_like(found)
    gradients = [torch.autograd.grad(loss, logits, vector)[0] for loss in (found, wanted)]
    torch.testing.assert_close(*gradients, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("align_corners", [False, True])
@pytest.mark.parametrize("low", [(3, 4), (8, 11)])
def test_gradcheck(low, align_corners):
    logits, targets = batch(low=low)
    truth = targets % 2 == 0

    def total(logits):
        outputs = Upsampled(logits, (9, 12), align_corners).cut(8, 11) if low == (3, 4) else logits
        smoothed = losses.cross_entropy(outputs, targets, torch.arange(5.0), 0.2, IGNORE)
        plain, *sums = losses.cross_entropy_and_sums(outputs, targets, IGNORE)
        return smoothed, plain, losses.dice_loss(*sums)

    def binary(logits):
        outputs = Upsampled(logits, (8, 11), align_corners)
        found, *sums = losses.binary_cross_entropy_and_sums(outputs, truth)
        return found, losses.dice_loss(*sums)

    assert torch.autograd.gradcheck(total, logits)
    assert torch.autograd.gradcheck(binary, logits.detach()[:, :1].clone().requires_grad_())


@pytest.mark.parametrize("size", [(8, 11), (3, 4)])
def test_sums_match_the_probabilities(size):
    logits, targets = batch(size)
    _, *sums = losses.cross_entropy_and_sums(Upsampled(logits, size), targets, IGNORE)
    p = F.interpolate(logits, size, mode="bilinear").softmax(1)
    hits = torch.stack([targets == c for c in range(CLASSES)], 1)
    p = p * (targets != IGNORE).unsqueeze(1)
    area = p.sum((0, 2, 3)) + hits.sum((0, 2, 3))
    torch.testing.assert_close(sums, [(p * hits).sum((0, 2, 3)), area], rtol=1e-12, atol=1e-12)


def test_binary_losses_match_torch():
    logits, targets = batch(channels=1)
    truth = (targets == 0).double()
    found, *sums = losses.binary_cross_entropy_and_sums(Upsampled(logits, (8, 11)), truth)
    full = F.interpolate(logits, (8, 11), mode="bilinear")[:, 0]
    torch.testing.assert_close(found, F.binary_cross_entropy_with_logits(full, truth, reduction="none"))
    p = full.sigmoid()
    torch.testing.assert_close(sums, [(p * truth).sum(), p.sum() + truth.sum()])


def test_operators_are_registered_correctly():
    logits, targets = batch()
    options = (torch.arange(5.0), 0.1, IGNORE, [8, 11], False, True)
    torch.library.opcheck(torch.ops.slipstream.softmax_losses.default, (logits, targets, *options))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_logits_are_accumulated_in_float32(dtype):
    logits, targets = batch((64, 64), (8, 8), dtype=dtype)
    with torch.autocast("cpu", torch.bfloat16):
        found, *sums = losses.cross_entropy_and_sums(Upsampled(logits, (64, 64)), targets, IGNORE)
        total = found.sum() + losses.dice_loss(*sums)
        total.backward()
    assert {value.dtype for value in (found, *sums)} == {torch.float32}
    exact = logits.detach().double().requires_grad_()
    found, *sums = losses.cross_entropy_and_sums(Upsampled(exact, (64, 64)), targets, IGNORE)
    wanted = found.sum() + losses.dice_loss(*sums)
    wanted.backward()
    assert total.item() == pytest.approx(wanted.item(), rel=1e-6)
    torch.testing.assert_close(logits.grad, exact.grad.to(dtype))


@pytest.mark.parametrize("target", [CLASSES, -1])
def test_target_out_of_range_raises_error(target):
    logits, targets = batch()
    targets[1, 7, 10] = target
    with pytest.raises(IndexError, match=f"Target {target} is out of bounds"):
        losses.cross_entropy(Upsampled(logits, (8, 11)), targets, ignore_index=IGNORE)


def test_second_derivative_raises_error():
    logits, targets = batch()
    total = losses.cross_entropy(Upsampled(logits, (8, 11)), targets, ignore_index=IGNORE).sum()
    (gradient,) = torch.autograd.grad(total, logits, create_graph=True)
    with pytest.raises(LossError, match="no second derivative"):
        gradient.square().sum().backward()


def test_targets_of_another_size_raise_error():
    logits, targets = batch()
    with pytest.raises(DataError, match="differ in size"):
        losses.cross_entropy(Upsampled(logits, (8, 12)), targets)


# ---- networks -------------------------------------------------------------------------------------------


class Shapes(TorchDispatchMode):
    """Records the shapes of all results."""

    def __init__(self):
        self.seen = set()

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        result = operator(*args, **(kwargs or {}))
        self.seen |= {tuple(leaf.shape) for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)}
        return result


def edge_loss(heads):
    weights = (1, 0.4, 0.4, 0.4)[: 1 + heads]
    return DiceCEEdgeLoss(CLASSES, heads, num_detail_heads=0, weights=weights, ignore_index=IGNORE)


CASES = {
    "pp_lite_t_seg": lambda: edge_loss(3),
    "ddrnet_23_slim": lambda: edge_loss(1),
    "stdc1_seg": lambda: STDCLoss(CLASSES, ignore_index=IGNORE),
    "shelfnet18_lw": lambda: MultiHeadCrossEntropy(ignore_index=IGNORE),
    "segformer_b0": lambda: CrossEntropy(IGNORE, 0.1, [1, 2, 3, 4, 5]),
}


def case(name, size=66):
    torch.manual_seed(0)
    heads = {} if name in ("segformer_b0", "shelfnet18_lw") else {"use_aux_heads": True}
    inputs, (_, targets) = torch.randn(2, 3, size, size), batch((size, size))
    return models.get(name, num_classes=CLASSES, **heads), CASES[name](), inputs, targets


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("kind", [Segmentor, SupervisedModel])
def test_models_train_without_full_resolution_logits(name, kind):
    network, loss, inputs, targets = case(name)
    model = kind(network, loss)
    results = []
    for hook in (None, lambda *_: None):  # a hook on the network reads its output
        handle = network.register_forward_hook(hook) if hook else None
        torch.manual_seed(1)
        model.zero_grad()
        with Shapes() as shapes:
            total = sum(model(inputs, targets, mode="loss").values())
            total.backward()
        assert ((2, CLASSES, 66, 66) in shapes.seen) == (hook is not None)
        grads = (p.grad for p in model.parameters() if p.grad is not None)
        results.append([total.detach(), *grads])
    handle.remove()
    torch.testing.assert_close(results[0][0], results[1][0])
    # Convolution biases before BatchNorm have gradients that consist of rounding errors.
    error = sum(float((a - b).square().sum()) for a, b in zip(*results, strict=True))
    assert error < 1e-8 * sum(float(b.square().sum()) for b in results[1])
    model.eval()
    with torch.no_grad(), Shapes() as shapes:
        predicted = model(inputs, targets, mode="predict")["preds"]
    assert (2, CLASSES, 66, 66) not in shapes.seen
    with torch.no_grad():
        scores = network(inputs)
    assert scores.shape == (2, CLASSES, 66, 66)
    assert (predicted == scores.argmax(1)).float().mean() > 0.999  # rounding changes ties


@pytest.mark.parametrize("align_corners", [False, True])
def test_argmax_matches_the_interpolated_logits(align_corners):
    logits, _ = batch()
    outputs = Upsampled(logits, (9, 12), align_corners).cut(8, 11)
    assert torch.equal(outputs.argmax(1), enlarged(logits, (9, 12), align_corners, (8, 11)).argmax(1))


class Reading:
    def losses(self, outputs, targets):
        return super().losses(tuple(output * 1 for output in outputs), targets)


class ReadingModel(Reading, Segmentor):
    pass


class ReadingLoss(MultiHeadCrossEntropy):
    def forward(self, outputs, targets):
        return super().forward(tuple(output * 1 for output in outputs), targets)


class ReadingNetwork(nn.Module):
    def __init__(self, network):
        super().__init__()
        self.inner = network

    def forward(self, x):
        return tuple(output * 1 for output in self.inner(x))


@pytest.mark.parametrize("reader", ["model", "loss", "network"])
def test_classes_that_read_the_outputs_receive_tensors(reader):
    network, _, inputs, targets = case("pp_lite_t_seg")
    kind = ReadingModel if reader == "model" else Segmentor
    loss = ReadingLoss if reader == "loss" else MultiHeadCrossEntropy
    wanted = Segmentor(network, MultiHeadCrossEntropy(ignore_index=IGNORE))(inputs, targets, mode="loss")
    network = ReadingNetwork(network) if reader == "network" else network
    found = kind(network, loss(ignore_index=IGNORE))(inputs, targets, mode="loss")
    torch.testing.assert_close(found, wanted)


class Tiny(Network):
    def __init__(self):
        super().__init__(CLASSES)
        self.main = nn.Conv2d(3, CLASSES, 8, 8)
        self.auxiliary = nn.Conv2d(3, CLASSES, 16, 16)

    def heads(self, x):
        return self.main(x), self.auxiliary(x)


@pytest.mark.slow
@pytest.mark.parametrize("scope", ["step", "model"])
@pytest.mark.parametrize("loss", [edge_loss(1), STDCLoss(CLASSES, (1.0, 0.4), num_detail_heads=0)])
def test_compiled_step_matches_the_loop(scope, loss):
    def start():
        torch.manual_seed(0)
        network = Tiny()
        return network, torch.optim.SGD(network.parameters(), lr=0.1)

    def plain():
        optimizer.zero_grad()
        total = sum(loss(network(inputs), targets).values())
        total.backward()
        optimizer.step()
        return total.detach()

    _, targets = batch((64, 64))
    targets = targets.where(targets < CLASSES, loss.ignore_index)
    network, optimizer = start()
    inputs = torch.randn(2, 3, 64, 64)
    wanted = [float(plain()) for _ in range(5)]
    step = accelerate(*start(), loss, speed={"compile": {"scope": scope, "cache": False}})
    assert [float(step((inputs, targets))["loss"]) for _ in range(5)] == pytest.approx(wanted, rel=1e-5)
    assert step.compiled_scope == scope, step.summary()
    assert wanted[-1] < 0.995 * wanted[0]
