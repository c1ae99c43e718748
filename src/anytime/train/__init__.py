"""The training system: runs that can be stopped, used, branched and extended at any step."""

from .branch import branch
from .config import Config, Cooldown, DataConfig, OptimizerConfig, merged
from .errors import UserError
from .evaluate import Evaluation
from .loop import Result, train
from .model import GPT, ModelConfig
from .prepare import prepare
from .presets import PRESETS, preset
from .report import write_report
from .use import Trained, evaluate_model, export, load, sample

__all__ = [
    "GPT",
    "PRESETS",
    "Config",
    "Cooldown",
    "DataConfig",
    "Evaluation",
    "ModelConfig",
    "OptimizerConfig",
    "Result",
    "Trained",
    "UserError",
    "branch",
    "evaluate_model",
    "export",
    "load",
    "merged",
    "prepare",
    "preset",
    "sample",
    "train",
    "write_report",
]
