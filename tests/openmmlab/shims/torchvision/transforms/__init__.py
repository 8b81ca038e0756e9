from torchvision.transforms import functional, transforms

__all__ = ["functional", "transforms"]


class RandomResizedCrop:
    """mmpretrain derives a transform from this class. No test uses that transform."""
