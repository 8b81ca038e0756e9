"""What the references for the networks with an STDC backbone have in common."""

import torch
from torch.nn import functional as F

from batch_norms import randomize_norms

DEPTHS = {1: (2, 2, 2), 2: (4, 5, 3)}


class STDC:
    """Reference implementation of the STDC backbone in evaluation mode.

    Subclasses set `prefix`, the backbone's name, and compute the other layers.

    The weights come from a state dict with SuperGradients' keys. Image sides must be multiples of 32, because
    upsampling uses integer factors.
    """

    prefix: str

    def __init__(self, size, state):
        self.size, self.state = size, state

    def conv(self, key, x, stride=1, relu=True):
        weight = self.state[f"{key}.seq.conv.weight"]
        groups = x.shape[1] // weight.shape[1]
        x = F.conv2d(x, weight, stride=stride, padding=weight.shape[-1] // 2, groups=groups)
        if f"{key}.seq.bn.weight" in self.state:
            norm = [
                self.state[f"{key}.seq.bn.{n}"] for n in ("running_mean", "running_var", "weight", "bias")
            ]
            x = F.batch_norm(x, *norm)
        return F.relu(x) if relu else x

    def block(self, key, x, stride):
        parts = [self.conv(f"{key}.conv_list.0", x)]
        x = parts[0]
        if stride == 2:
            parts = [F.avg_pool2d(x, 3, 2, 1)]
            x = self.conv(f"{key}.conv_list.1.0", x, stride=2, relu=False)
            parts.append(self.conv(f"{key}.conv_list.1.1", x))
        else:
            parts.append(self.conv(f"{key}.conv_list.1", x))
        for i in (2, 3):
            parts.append(self.conv(f"{key}.conv_list.{i}", parts[-1]))
        return torch.cat(parts, 1)

    def backbone(self, x):
        x = self.conv(f"{self.prefix}.stages.block_s2.0", x, 2)
        x = self.conv(f"{self.prefix}.stages.block_s4.0", x, 2)
        features = []
        for scale, count in zip((8, 16, 32), DEPTHS[self.size], strict=True):
            for index in range(count):
                x = self.block(f"{self.prefix}.stages.block_s{scale}.{index}", x, 1 if index else 2)
            features.append(x)
        return features


@torch.no_grad()
def check_forward(network, reference, size):
    """Compare a network with its reference, in evaluation mode and with the auxiliary outputs."""
    network.double().eval()
    randomize_norms(network)
    x = torch.randn(2, 3, 64, 96, dtype=torch.float64)
    expected = reference(size, network.state_dict())(x)
    torch.testing.assert_close(network(x), expected[0], rtol=1e-9, atol=1e-9)
    network.train()
    for module in network.modules():
        if isinstance(module, torch.nn.BatchNorm2d):
            module.eval()
    torch.testing.assert_close(network(x), tuple(expected), rtol=1e-9, atol=1e-9)


def check_gradients(network, loss, targets):
    """Compare the gradients of a network and its loss with those of one graph."""
    network.double()
    x = torch.randn(2, 3, 64, 64, dtype=torch.float64)

    def step(x, targets):
        return sum(loss(network(x), targets).values())

    def gradients(function):
        value = function(x, targets)
        return value.detach(), torch.autograd.grad(value, list(network.parameters()))

    compiled = torch.compile(step, fullgraph=True, dynamic=False, backend="aot_eager")
    torch.testing.assert_close(gradients(compiled), gradients(step), rtol=1e-9, atol=1e-12)
