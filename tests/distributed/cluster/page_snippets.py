"""Run the Python blocks in docs/distributed.md that create a Runner, and print the wrapper of each model.

torchrun starts this script.
"""

import functools

from cluster.page import blocks
from examples.distributed_training import ResNet18, Stripes

from slipstream.runner import Runner

if __name__ == "__main__":
    training = dict(
        train_dataloader=dict(
            batch_size=4,
            num_batch_per_epoch=1,
            sampler=dict(type="DefaultSampler", shuffle=True),
            dataset=Stripes(8, seed=0),
        ),
        optim_wrapper=dict(optimizer=dict(type="SGD", lr=0.001, momentum=0.9)),
        train_cfg=dict(by_epoch=True, max_epochs=3),
    )
    for block in blocks():
        if block.language == "python" and "Runner(" in block.text:
            names = {
                "ResNet18": ResNet18,
                "Runner": functools.partial(Runner, launcher="pytorch"),
                "training": training,
            }
            exec(block.text, names)
            wrapper = names["runner"].model
            print(f"wrapped by {type(wrapper).__name__} {getattr(wrapper, 'find_unused_parameters', '')}")
