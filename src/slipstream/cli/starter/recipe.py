"""The recipe for this project: the model, the data and the training settings."""

custom_imports = dict(imports=["shapes"], path="{{ fileDirname }}")  # shapes.py is in the folder of this file

model = dict(
    type="Segmentor",
    network=dict(type="regseg48", num_classes=3),
    loss=dict(type="CrossEntropy", ignore_index=255),
    data_preprocessor=dict(
        type="ImgDataPreprocessor", mean=[123.675, 116.28, 103.53], std=[58.395, 57.12, 57.375]
    ),
)

train_dataloader = dict(
    batch_size=8,
    num_workers=0,  # number of data loading processes
    drop_last=True,
    sampler=dict(type="DefaultSampler", shuffle=True),
    dataset=dict(type="Shapes", length=96, seed=0, transforms=[dict(type="SegRandomFlip", prob=0.5)]),
)
val_dataloader = dict(batch_size=8, dataset=dict(type="Shapes", length=16, seed=1))

optim_wrapper = dict(type="OptimWrapper", optimizer=dict(type="AdamW", lr=0.002, weight_decay=0.01))
train_cfg = dict(by_epoch=True, max_epochs=4, val_interval=1)
val_cfg = dict(type="ValLoop")
val_evaluator = dict(type="IoUMetric", per_class=True)

default_hooks = dict(
    logger=dict(type="LoggerHook", interval=4),
    checkpoint=dict(type="CheckpointHook", interval=1, max_keep_ckpts=1, save_best="mIoU"),
)
randomness = dict(seed=0)
# speed = "auto"  # enables the options that improve speed on this machine; see `slipstream explain recipe.py`
