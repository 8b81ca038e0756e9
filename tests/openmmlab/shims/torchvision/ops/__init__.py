from torchvision.ops import boxes

__all__ = ["boxes"]
