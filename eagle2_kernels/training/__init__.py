"""Training draft heads: `write_text(DataConfig(...))`, then `train(TrainConfig(...))`."""

from eagle2_kernels.training.generate import DataConfig, write_text
from eagle2_kernels.training.trainer import TrainConfig, Trainer, train

__all__ = ["DataConfig", "TrainConfig", "Trainer", "train", "write_text"]
