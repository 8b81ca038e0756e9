"""The models of `make zoo`: real architectures in tiny configurations with random weights, which need no downloads.

Each line of `MODELS` is a model: its library, its class or name, its configuration and its batches.
"""

# ruff: noqa: E501 (a model is one line of the table)
from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

CLASSES, TOKENS, LENGTH = 5, 64, 10


class Entry(NamedTuple):
    """A model, its batch of a given number, and its loss."""

    library: str
    build: Callable[[], nn.Module]
    batch: Callable[[int], Any]
    loss: Callable[[nn.Module, Any], Tensor]
    optimizer: str = "AdamW"
    speed: Mapping[str, Any] = MappingProxyType({})
    backend: str = "aot_eager"


# ---- batches -----------------------------------------------------------------------------------------


def image(size: int | tuple[int, ...], channels: int, dense: bool, flat: bool, number: int) -> Any:
    """Return images and a class of each image or pixel; several sizes take turns."""
    size = size if isinstance(size, int) else size[number % len(size)]
    shape = (size,) * (3 if flat else 2)
    return torch.randn(4, channels, *shape), torch.randint(0, CLASSES, (4, *shape) if dense else (4,))


def pixels(size: int, labels: str, number: int) -> dict[str, Tensor]:
    """Return images as transformers' models take them."""
    kinds = {
        "class": {"labels": torch.randint(0, CLASSES, (4,))},
        "dense": {"labels": torch.randint(0, CLASSES, (4, size, size))},
        "none": {},
    }
    return {"pixel_values": torch.randn(4, 3, size, size), **kinds[labels]}


def tokens(labels: str, number: int, padded: bool = False) -> dict[str, Tensor]:
    """Return token numbers; `labels` is 'class', 'token' (as many as tokens) or 'answer' (encoder-decoder)."""
    ids = torch.randint(3, TOKENS, (4, LENGTH))
    mask = torch.ones_like(ids)
    if padded:
        mask[1, LENGTH // 2 :] = 0
    target = torch.randint(0, CLASSES, (4,)) if labels == "class" else torch.randint(3, TOKENS, (4, LENGTH))
    return {"input_ids": ids, "attention_mask": mask, "labels": target}


def audio(samples: int, number: int) -> dict[str, Tensor]:
    return {"input_values": torch.randn(4, samples), "labels": torch.randint(0, 2, (4,))}


def speech(number: int) -> dict[str, Tensor]:
    return {"input_features": torch.randn(2, 8, 40), "labels": torch.randint(3, TOKENS, (2, LENGTH))}


def pairs(number: int) -> dict[str, Any]:
    ids = torch.randint(3, TOKENS - 1, (4, LENGTH))
    ids[:, -1] = TOKENS - 1  # CLIP's end of text
    return {"input_ids": ids, "pixel_values": torch.randn(4, 3, 32, 32), "return_loss": True}


def noisy(shape: tuple[int, ...], context: int, number: int) -> tuple[Any, Tensor]:
    """Return a noisy sample with its time step and the text's tokens, and the noise to predict."""
    words = {"encoder_hidden_states": torch.randn(2, 6, context)} if context else {}
    return (torch.randn(2, *shape), {"timestep": torch.randint(0, 1000, (2,)), **words}), torch.randn(
        2, *shape
    )


def detection(number: int) -> tuple[list[Tensor], list[dict[str, Tensor]]]:
    """Return images with one to three boxes each."""
    targets = []
    for index in range(2):
        count = 1 + (number + index) % 3
        corner = torch.rand(count, 2) * 30
        boxes = torch.cat([corner, corner + 8 + torch.rand(count, 2) * 20], 1)
        masks = torch.zeros(count, 64, 64, dtype=torch.uint8)
        for mask, (x1, y1, x2, y2) in zip(masks, boxes.int().tolist(), strict=True):
            mask[y1:y2, x1:x2] = 1
        points = torch.cat([boxes[:, :2], torch.ones(count, 1)], 1)[:, None].repeat(1, 3, 1)
        labels = torch.ones(count, dtype=torch.int64)
        targets.append({"boxes": boxes, "labels": labels, "masks": masks, "keypoints": points})
    return [torch.rand(3, 64, 64) for _ in targets], targets


def nodes(count: int, number: int) -> tuple[tuple[Tensor, Tensor], Tensor]:
    return (torch.randn(count, 8), torch.randint(0, count, (2, 3 * count))), torch.randint(
        0, CLASSES, (count,)
    )


# ---- losses ------------------------------------------------------------------------------------------


def classify(model: nn.Module, batch: Any) -> Tensor:
    outputs = model(batch[0])
    main, *auxiliary = outputs if isinstance(outputs, list | tuple) else [outputs]
    losses = [F.cross_entropy(output, batch[1]) for output in (main, *auxiliary)]
    return torch.stack(losses).mean()


def own_loss(model: nn.Module, batch: Any) -> Tensor:
    return model(**batch).loss


def reconstruct(model: nn.Module, batch: Any) -> Tensor:
    outputs = model(batch[0])
    return F.mse_loss(getattr(outputs, "sample", outputs), batch[0])


def denoise(model: nn.Module, batch: Any) -> Tensor:
    return F.mse_loss(model(batch[0][0], **batch[0][1]).sample, batch[1])


def detect(model: nn.Module, batch: Any) -> Tensor:
    return torch.stack(list(model(*batch).values())).sum()


def label_nodes(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(*batch[0]), batch[1])


# ---- libraries ---------------------------------------------------------------------------------------


def timm(
    name: str,
    size: int | tuple[int, ...] = 32,
    entry: dict[str, Any] | None = None,
    grad_checkpointing: bool = False,
    **options: Any,
) -> Entry:
    def build() -> nn.Module:
        define_torchvision_operators()
        model = importlib.import_module("timm").create_model(name, num_classes=CLASSES, **options)
        if grad_checkpointing:
            model.set_grad_checkpointing(True)
        return model

    return Entry("timm", build, partial(image, size, 3, False, False), classify, **entry or {})


def hugging_face(
    name: str, batch: Callable[[int], Any], entry: dict[str, Any] | None = None, **options: Any
) -> Entry:
    """Return a model of transformers; `options` replace those of a configuration that most models share."""
    tiny = {
        "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
        "intermediate_size": 48, "vocab_size": TOKENS, "max_position_embeddings": 64, "pad_token_id": 0,
        "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1,
    }  # fmt: skip

    def build() -> nn.Module:
        define_torchvision_operators()
        kind = getattr(importlib.import_module("transformers"), name)
        image_model = "image_size" in options or "Image" in name or "Semantic" in name
        kept = (
            {}
            if options.get("bare")
            else {k: v for k, v in tiny.items() if k != "pad_token_id" or not image_model}
        )
        labels = {"num_labels": CLASSES} if "For" in name and "LM" not in name else {}
        return kind(kind.config_class(**kept | labels | {k: v for k, v in options.items() if k != "bare"}))

    return Entry("transformers", build, batch, own_loss, **entry or {})


def other(
    path: str,
    batch: Callable[[int], Any],
    loss: Callable[..., Tensor],
    entry: dict[str, Any] | None = None,
    **options: Any,
) -> Entry:
    """Return a model of another library; `path` is the module and the class or function."""
    module, _, name = path.rpartition(".")

    def build() -> nn.Module:
        define_torchvision_operators()
        return getattr(importlib.import_module(module), name)(**options)

    return Entry(module.partition(".")[0], build, batch, loss, **entry or {})


def segmentation(name: str, entry: dict[str, Any] | None = None, size: int = 32, **options: Any) -> Entry:
    options = {"encoder_name": "resnet18", "encoder_weights": None, "classes": CLASSES} | options
    batch = partial(image, size, 3, True, False)
    return other(f"segmentation_models_pytorch.{name}", batch, classify, entry, **options)


def detector(name: str, entry: dict[str, Any] | None = None, **options: Any) -> Entry:
    options = {
        "weights": None,
        "weights_backbone": None,
        "num_classes": 3,
        "min_size": 64,
        "max_size": 64,
    } | options
    return other(f"torchvision.models.detection.{name}", detection, detect, entry, **options)


def nonmaximum_suppression(boxes: Tensor, scores: Tensor, threshold: float) -> Tensor:
    """Return the boxes to keep, best first, as torchvision's operator does."""
    order, areas, keep = (
        scores.argsort(descending=True, stable=True),
        (boxes[:, 2:] - boxes[:, :2]).prod(1),
        [],
    )
    while len(order):
        best, rest = order[0], order[1:]
        keep.append(best)
        low = torch.maximum(boxes[best, :2], boxes[rest, :2])
        high = torch.minimum(boxes[best, 2:], boxes[rest, 2:])
        common = (high - low).clamp(min=0).prod(1)
        order = rest[common / (areas[best] + areas[rest] - common) <= threshold]
    return torch.stack(keep) if keep else order


def roi_align(
    features: Tensor, boxes: Tensor, scale: float, height: int, width: int, samples: int, aligned: bool
) -> Tensor:
    """Return the features in boxes (number of the image, corners), as torchvision's operator does within images."""
    samples = max(samples, 2)
    low, high = (boxes[:, 1:] * scale - 0.5 * aligned).view(-1, 2, 2).unbind(1)
    extent = high - low if aligned else (high - low).clamp(min=1)
    x, y = (
        low[:, axis, None] + extent[:, axis, None] * (torch.arange(count * samples) + 0.5) / (count * samples)
        for axis, count in enumerate((width, height))
    )
    grid = torch.stack(torch.broadcast_tensors(x[:, None], y[:, :, None]), -1)
    grid = (2 * grid + 1) / torch.tensor([features.shape[3], features.shape[2]]) - 1
    found = F.grid_sample(features[boxes[:, 0].long()], grid, padding_mode="border", align_corners=False)
    return F.avg_pool2d(found, samples)


_operators: list[torch.library.Library] = []


def define_torchvision_operators() -> None:
    """Define the operators that torchvision requires, whose compiled ones are only in builds for the same torch."""
    if _operators or importlib.util.find_spec("torchvision") is None:
        return
    library = torch.library.Library("torchvision", "DEF")
    _operators.append(library)
    for name in ("nms", "qnms"):
        library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    library.define(
        "roi_align(Tensor input, Tensor rois, float spatial_scale, SymInt pooled_height, SymInt pooled_width, "
        "int sampling_ratio, bool aligned) -> Tensor"
    )
    library.impl("nms", nonmaximum_suppression, "CompositeExplicitAutograd")
    library.impl("roi_align", roi_align, "CompositeImplicitAutograd")
    # Each module of torchvision has its own reference to the check that its compiled operators exist.
    importlib.import_module("torchvision.ops.boxes")._assert_has_ops = lambda: None
    align: Any = sys.modules["torchvision.ops.roi_align"]
    align._assert_has_ops, align._has_ops = lambda: None, lambda: True


# ---- the table ---------------------------------------------------------------------------------------

SGD = {"optimizer": "SGD"}
CHECKPOINT = {"speed": {"activation_checkpointing": True}}
INDUCTOR = {"backend": "inductor"}
TEXT, WORDS, NEXT = partial(tokens, "class"), partial(tokens, "token"), partial(tokens, "token", padded=True)
PICTURE, SEGMENT = partial(pixels, 32, "class"), partial(pixels, 32, "dense")
SLICE, VOLUME = partial(image, 32, 1, True, False), partial(image, 32, 1, True, True)
GRAPH = partial(nodes, 20)
FEW = {"rpn_pre_nms_top_n_train": 30, "rpn_post_nms_top_n_train": 15, "box_batch_size_per_image": 8}
ONE_BLOCK, VIT = (
    {"layers": (1, 1, 1, 1)},
    {"img_size": 32, "patch_size": 8, "embed_dim": 48, "depth": 2, "num_heads": 4},
)

# aot_eager assumes wrong strides for two models, for which torch.compile(model, backend="aot_eager") fails as well.
MODELS: dict[str, Entry] = {
    "timm resnet18": timm("resnet18", drop_rate=0.1, drop_path_rate=0.1, entry=SGD),
    "timm resnet18, inductor": timm("resnet18", drop_rate=0.1, entry=INDUCTOR),
    "timm resnet18, sizes": timm("resnet18", (32, 48), drop_rate=0.1),
    "timm resnet18, set_grad_checkpointing": timm("resnet18", grad_checkpointing=True),
    "timm resnet26d": timm("resnet26d", **ONE_BLOCK, drop_block_rate=0.1, entry=SGD),
    "timm seresnet50": timm("seresnet50", **ONE_BLOCK),
    "timm efficientnet_b0": timm("efficientnet_b0", drop_rate=0.1, drop_path_rate=0.1),
    "timm efficientnet_b0, set_grad_checkpointing": timm("efficientnet_b0", drop_path_rate=0.1, grad_checkpointing=True),
    "timm mobilenetv3_small_050": timm("mobilenetv3_small_050", drop_rate=0.1, entry=SGD),
    "timm regnetx_002": timm("regnetx_002", drop_path_rate=0.1),
    "timm regnety_002, activation_checkpointing": timm("regnety_002", entry=CHECKPOINT),
    "timm convnext_atto": timm("convnext_atto", depths=(1, 1, 2, 1), dims=(8, 16, 24, 32), drop_path_rate=0.1),
    "timm convnext_atto, set_grad_checkpointing": timm("convnext_atto", depths=(1, 1, 2, 1), dims=(8, 16, 24, 32), drop_path_rate=0.1, grad_checkpointing=True),
    "timm densenet121": timm("densenet121", block_config=(2, 2, 2, 2), growth_rate=8, drop_rate=0.1),
    "timm vit_tiny": timm("vit_tiny_patch16_224", **VIT, drop_rate=0.1, drop_path_rate=0.1, attn_drop_rate=0.1),
    "timm vit_tiny, sizes": timm("vit_tiny_patch16_224", (32, 48, 64), **VIT, dynamic_img_size=True),
    "timm vit_tiny, set_grad_checkpointing": timm("vit_tiny_patch16_224", **VIT, drop_rate=0.1, attn_drop_rate=0.1, grad_checkpointing=True),
    "timm vit_tiny, activation_checkpointing": timm("vit_tiny_patch16_224", **VIT, drop_rate=0.1, drop_path_rate=0.1, entry=CHECKPOINT),
    "timm vit_tiny, inductor": timm("vit_tiny_patch16_224", **VIT, entry=INDUCTOR),
    "timm deit_tiny_distilled": timm("deit_tiny_distilled_patch16_224", **VIT, drop_path_rate=0.1),
    "timm swin_tiny": timm("swin_tiny_patch4_window7_224", img_size=32, window_size=4, depths=(1, 2), num_heads=(2, 4), embed_dim=16),
    "timm swin_tiny, set_grad_checkpointing": timm("swin_tiny_patch4_window7_224", img_size=32, window_size=4, depths=(1, 2), num_heads=(2, 4), embed_dim=16, grad_checkpointing=True),
    "timm mixer_s16": timm("mixer_s16_224", img_size=32, drop_path_rate=0.1),
    "timm cait_xxs24": timm("cait_xxs24_224", img_size=32, patch_size=8, embed_dim=32, depth=2, num_heads=4, drop_path_rate=0.1),
    "timm pvt_v2_b0": timm("pvt_v2_b0", depths=(1, 1, 1, 1), num_heads=(1, 2, 4, 8), embed_dims=(8, 16, 32, 64), drop_path_rate=0.1),
    "timm poolformer_s12": timm("poolformer_s12", drop_path_rate=0.1),
    "timm ghostnet_100": timm("ghostnet_100", drop_rate=0.1),
    "timm mobilevit_xxs": timm("mobilevit_xxs", drop_rate=0.1),
    "timm repvgg_a0": timm("repvgg_a0", entry=SGD),
    "timm nf_regnet_b0": timm("nf_regnet_b0", drop_path_rate=0.1),
    "timm xcit_nano": timm("xcit_nano_12_p16_224", img_size=32, patch_size=8, embed_dim=32, depth=2, num_heads=4, drop_path_rate=0.1),
    "transformers BERT": hugging_face("BertForSequenceClassification", TEXT),
    "transformers BERT, activation_checkpointing": hugging_face("BertForSequenceClassification", TEXT, CHECKPOINT),
    "transformers BERT, inductor": hugging_face("BertForSequenceClassification", TEXT, INDUCTOR),
    "transformers RoBERTa": hugging_face("RobertaForMaskedLM", NEXT, entry=SGD),
    "transformers DistilBERT": hugging_face("DistilBertForSequenceClassification", TEXT),
    "transformers ALBERT": hugging_face("AlbertForMaskedLM", WORDS, embedding_size=16),
    "transformers ELECTRA": hugging_face("ElectraForMaskedLM", WORDS, embedding_size=16),
    "transformers DeBERTa V2": hugging_face("DebertaV2ForSequenceClassification", TEXT, relative_attention=True, pos_att_type=["p2c", "c2p"]),
    "transformers GPT-2": hugging_face("GPT2LMHeadModel", NEXT),
    "transformers GPT-2, activation_checkpointing": hugging_face("GPT2LMHeadModel", NEXT, CHECKPOINT),
    "transformers GPT-2, inductor": hugging_face("GPT2LMHeadModel", WORDS, INDUCTOR),
    "transformers GPT-NeoX": hugging_face("GPTNeoXForCausalLM", WORDS, hidden_dropout=0.1, attention_dropout=0.1),
    "transformers OPT": hugging_face("OPTForCausalLM", NEXT, word_embed_proj_dim=32, ffn_dim=48, layerdrop=0.2),
    "transformers BLOOM": hugging_face("BloomForCausalLM", NEXT, hidden_dropout=0.1, attention_dropout=0.1),
    "transformers Llama": hugging_face("LlamaForCausalLM", NEXT, attention_dropout=0.1),
    "transformers Llama, activation_checkpointing": hugging_face("LlamaForCausalLM", NEXT, CHECKPOINT),
    "transformers Mistral": hugging_face("MistralForCausalLM", NEXT, sliding_window=4),
    "transformers Mixtral": hugging_face("MixtralForCausalLM", WORDS, num_local_experts=3, output_router_logits=True),
    "transformers Qwen2": hugging_face("Qwen2ForCausalLM", NEXT),
    "transformers Gemma 2": hugging_face("Gemma2ForCausalLM", WORDS, sliding_window=4),
    "transformers Phi": hugging_face("PhiForCausalLM", WORDS, resid_pdrop=0.1, embd_pdrop=0.1),
    "transformers Mamba": hugging_face("MambaForCausalLM", WORDS, state_size=4),
    "transformers T5": hugging_face("T5ForConditionalGeneration", NEXT, d_kv=8, d_ff=48, num_decoder_layers=2),
    "transformers T5, activation_checkpointing": hugging_face("T5ForConditionalGeneration", NEXT, CHECKPOINT, d_kv=8, d_ff=48, num_decoder_layers=2),
    "transformers BART": hugging_face("BartForConditionalGeneration", NEXT, encoder_layers=2, decoder_layers=2, encoder_ffn_dim=48, decoder_ffn_dim=48, encoder_layerdrop=0.2, encoder_attention_heads=4, decoder_attention_heads=4),
    "transformers Whisper": hugging_face("WhisperForConditionalGeneration", speech, d_model=32, num_mel_bins=8, max_source_positions=20, max_target_positions=20, encoder_layers=2, decoder_layers=2, encoder_ffn_dim=48, decoder_ffn_dim=48, encoder_attention_heads=4, decoder_attention_heads=4, dropout=0.1),
    "transformers Wav2Vec2": hugging_face("Wav2Vec2ForSequenceClassification", partial(audio, 2000), conv_dim=(16, 16), conv_stride=(5, 4), conv_kernel=(10, 8), num_conv_pos_embeddings=16, num_conv_pos_embedding_groups=4, num_feat_extract_layers=2, mask_time_length=2, mask_time_prob=0.3),
    "transformers ViT": hugging_face("ViTForImageClassification", PICTURE, image_size=32, patch_size=8, hidden_dropout_prob=0.1),
    "transformers BEiT": hugging_face("BeitForImageClassification", PICTURE, image_size=32, patch_size=8, drop_path_rate=0.1),
    "transformers ViT MAE": hugging_face("ViTMAEForPreTraining", partial(pixels, 32, "none"), image_size=32, patch_size=8, decoder_hidden_size=32, decoder_num_hidden_layers=1, decoder_num_attention_heads=4, decoder_intermediate_size=48),
    "transformers Swin": hugging_face("SwinForImageClassification", PICTURE, bare=True, image_size=32, patch_size=2, window_size=4, embed_dim=16, depths=[1, 2], num_heads=[2, 4]),
    "transformers SegFormer": hugging_face("SegformerForSemanticSegmentation", partial(pixels, 64, "dense"), bare=True, depths=[1, 1, 1, 1], hidden_sizes=[8, 16, 24, 32], decoder_hidden_size=16),
    "transformers ConvNeXt": hugging_face("ConvNextForImageClassification", PICTURE, bare=True, depths=[1, 1, 2, 1], hidden_sizes=[8, 16, 24, 32], drop_path_rate=0.1),
    "transformers RegNet": hugging_face("RegNetForImageClassification", PICTURE, CHECKPOINT, bare=True, depths=[2, 2, 2, 2], hidden_sizes=[8, 16, 24, 32], groups_width=8, embedding_size=8),
    "transformers CLIP": hugging_face("CLIPModel", pairs, bare=True, projection_dim=16, text_config={"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48, "vocab_size": TOKENS, "max_position_embeddings": 16, "eos_token_id": TOKENS - 1}, vision_config={"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48, "image_size": 32, "patch_size": 8}),
    "diffusers UNet2D": other("diffusers.UNet2DModel", partial(noisy, (3, 16, 16), 0), denoise, sample_size=16, block_out_channels=(8, 16), down_block_types=("DownBlock2D", "AttnDownBlock2D"), up_block_types=("AttnUpBlock2D", "UpBlock2D"), norm_num_groups=4, layers_per_block=1, dropout=0.1),
    "diffusers UNet2DCondition": other("diffusers.UNet2DConditionModel", partial(noisy, (4, 16, 16), 16), denoise, sample_size=16, block_out_channels=(8, 16), down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"), up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"), norm_num_groups=4, layers_per_block=1, cross_attention_dim=16, attention_head_dim=4, dropout=0.1),
    "diffusers AutoencoderKL": other("diffusers.AutoencoderKL", partial(image, 16, 3, False, False), reconstruct, block_out_channels=(8, 16), down_block_types=("DownEncoderBlock2D",) * 2, up_block_types=("UpDecoderBlock2D",) * 2, norm_num_groups=4),
    "diffusers Transformer2D, inductor": other("diffusers.Transformer2DModel", partial(noisy, (4, 8, 8), 16), denoise, INDUCTOR, in_channels=4, num_layers=1, num_attention_heads=2, attention_head_dim=8, norm_num_groups=2, cross_attention_dim=16, dropout=0.1),
    "smp Unet": segmentation("Unet", SGD),
    "smp FPN": segmentation("FPN", decoder_dropout=0.2),
    "smp DeepLabV3Plus": segmentation("DeepLabV3Plus"),
    "smp PSPNet": segmentation("PSPNet", psp_dropout=0.2),
    "smp MAnet": segmentation("MAnet"),
    "smp Segformer": segmentation("Segformer"),
    "monai UNet": other("monai.networks.nets.UNet", VOLUME, classify, spatial_dims=3, in_channels=1, out_channels=CLASSES, channels=(4, 8, 16), strides=(2, 2), num_res_units=1, dropout=0.1),
    "monai SegResNet": other("monai.networks.nets.SegResNet", SLICE, classify, spatial_dims=2, in_channels=1, out_channels=CLASSES, init_filters=8, blocks_down=(1, 1), blocks_up=(1,), dropout_prob=0.1),
    "monai UNETR, inductor": other("monai.networks.nets.UNETR", SLICE, classify, INDUCTOR, in_channels=1, out_channels=CLASSES, img_size=32, spatial_dims=2, feature_size=4, hidden_size=24, mlp_dim=32, num_heads=3, dropout_rate=0.1),
    "monai AttentionUnet": other("monai.networks.nets.AttentionUnet", SLICE, classify, SGD, spatial_dims=2, in_channels=1, out_channels=CLASSES, channels=(4, 8, 16), strides=(2, 2), dropout=0.1),
    "torch_geometric GCN": other("torch_geometric.nn.GCN", GRAPH, label_nodes, in_channels=8, hidden_channels=16, num_layers=2, out_channels=CLASSES, dropout=0.2),
    "torch_geometric GAT": other("torch_geometric.nn.GAT", GRAPH, label_nodes, in_channels=8, hidden_channels=16, num_layers=2, out_channels=CLASSES, heads=2, dropout=0.2),
    "torch_geometric GraphSAGE": other("torch_geometric.nn.GraphSAGE", GRAPH, label_nodes, SGD, in_channels=8, hidden_channels=16, num_layers=2, out_channels=CLASSES, dropout=0.2),
    "torch_geometric GIN": other("torch_geometric.nn.GIN", GRAPH, label_nodes, in_channels=8, hidden_channels=16, num_layers=2, out_channels=CLASSES, norm="batch_norm"),
    "torchvision Faster R-CNN": detector("fasterrcnn_mobilenet_v3_large_320_fpn", **FEW),
    "torchvision RetinaNet": detector("retinanet_resnet50_fpn"),
    "torchvision FCOS": detector("fcos_resnet50_fpn"),
    "torchvision SSDlite": other("torchvision.models.detection.ssdlite320_mobilenet_v3_large", detection, detect, SGD, weights=None, weights_backbone=None, num_classes=3),
    "torchvision Mask R-CNN": detector("maskrcnn_resnet50_fpn", **FEW),
    "torchvision Keypoint R-CNN": detector("keypointrcnn_resnet50_fpn", num_classes=2, num_keypoints=3, **FEW),
}  # fmt: skip
