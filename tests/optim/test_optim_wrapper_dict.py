"""Tests of `OptimWrapperDict`, which contains several named optimizers, as for a GAN."""

import copy

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from slipstream.errors import ConfigError
from slipstream.optim import OptimWrapper, OptimWrapperDict
from slipstream.runner import Runner


class Gan(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.generator = nn.Linear(2, 3)
        self.critic = nn.Linear(3, 1)

    def train_step(self, data, optim_wrapper):
        critic_optim = optim_wrapper["critic"]
        with critic_optim.optim_context(self.critic):
            critic_loss = self.critic(self.generator(data).detach()).mean()
        critic_optim.update_params(critic_loss)
        generator_optim = optim_wrapper["generator"]
        with generator_optim.optim_context(self.generator):
            loss = -self.critic(self.generator(data)).mean()
        generator_optim.update_params(loss)
        self.critic.zero_grad()
        return {"critic_loss": critic_loss.detach(), "loss": loss.detach()}


def wrappers(gan, **options):
    return OptimWrapperDict(
        generator=OptimWrapper(torch.optim.SGD(gan.generator.parameters(), lr=0.1, momentum=0.5)),
        critic=OptimWrapper(torch.optim.AdamW(gan.critic.parameters(), lr=0.2), **options),
    )


def train_by_hand(gan, batches):
    g = torch.optim.SGD(gan.generator.parameters(), lr=0.1, momentum=0.5)
    c = torch.optim.AdamW(gan.critic.parameters(), lr=0.2)
    for x in batches:
        c.zero_grad()
        gan.critic(gan.generator(x).detach()).mean().backward()
        c.step()
        g.zero_grad()
        (-gan.critic(gan.generator(x)).mean()).backward()
        g.step()


def test_each_network_of_a_gan_is_updated_by_its_optimizer():
    gan = Gan()
    hand = copy.deepcopy(gan)
    batches = [torch.randn(4, 2, generator=torch.Generator().manual_seed(i)) for i in range(4)]
    optim = wrappers(gan)
    optim.initialize_count_status(gan, 0, len(batches))
    for x in batches:
        gan.train_step(x, optim)
    train_by_hand(hand, batches)
    for a, b in zip(gan.parameters(), hand.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7)


def test_learning_rates_and_momenta_have_the_names_of_the_optimizers():
    optim = wrappers(Gan())
    assert optim.get_lr() == {"generator.lr": [0.1], "critic.lr": [0.2]}
    assert optim.get_momentum() == {"generator.momentum": [0.5], "critic.momentum": [0.9]}
    assert [group["lr"] for group in optim.param_groups] == [0.1, 0.2]
    assert len(list(optim.parameters())) == 4
    assert optim.accumulative_counts == 1
    assert optim.grad_norm is None


def test_state_dict_restores_each_wrapper_by_name():
    gan = Gan()
    optim = wrappers(gan)
    gan.train_step(torch.ones(4, 2), optim)
    other = wrappers(gan)
    other.load_state_dict(copy.deepcopy(optim.state_dict()))
    for name in optim:
        assert str(other[name].state_dict()) == str(optim[name].state_dict())
        assert other[name].optimizer.state
    with pytest.raises(
        ConfigError, match=r"are \['critic', 'generator'\], but the state contains \['critic'\]"
    ):
        other.load_state_dict({"critic": {}})


def test_run_warns_if_the_last_window_of_an_optimizer_is_incomplete(tmp_path, capsys):
    for count, warns in ((4, False), (5, True)):
        gan = Gan()
        Runner(
            gan,
            tmp_path / str(count),
            train_dataloader=DataLoader(torch.ones(4 * count, 2), 4),
            train_cfg=dict(by_epoch=True, max_epochs=1),
            optim_wrapper=wrappers(gan, accumulative_counts=2),
        ).train()
        assert ("window of ['critic'] in optim_wrapper is incomplete" in capsys.readouterr().out) == warns
