"""Training draft heads: `train(TrainConfig(data=..., output=...))`."""

from eagle2_kernels.training.trainer import TrainConfig, Trainer, train

__all__ = ["TrainConfig", "Trainer", "train"]
