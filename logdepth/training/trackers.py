"""Optional trackers of metrics: TensorBoard and Weights & Biases. metrics.jsonl is always written."""

import importlib
import secrets
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from logdepth.atomic import replacing
from logdepth.config import to_dict
from logdepth.errors import UserError
from logdepth.runs import RunConfig


class Tracker(Protocol):
    def log(self, step: int, values: dict[str, float]) -> None: ...
    def close(self) -> None: ...


def check_trackers(config: RunConfig) -> None:
    """An error if a tracker that the config asks for is not installed."""
    for name in config.train.trackers:
        try:
            importlib.import_module(name)
        except ImportError:
            raise UserError(f"the tracker {name} is not installed; `pip install '.[trackers]'`") from None


def open_trackers(config: RunConfig, folder: Path, step: int) -> list[Tracker]:
    """The trackers that the config asks for; what they logged after `step` is overwritten."""
    return [TRACKERS[name](config, folder, step) for name in config.train.trackers]


class _TensorBoard:
    def __init__(self, _config: RunConfig, folder: Path, step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self.writer: Any = SummaryWriter(str(folder / "tensorboard"), purge_step=step + 1)

    def log(self, step: int, values: dict[str, float]) -> None:
        for name, value in values.items():
            self.writer.add_scalar(name, value, step)

    def close(self) -> None:
        self.writer.close()


class _WeightsAndBiases:
    def __init__(self, config: RunConfig, folder: Path, _step: int) -> None:
        import wandb

        file = folder / "wandb-id.txt"  # the name of a folder is not unique
        if not file.is_file():
            with replacing(file) as partial:
                partial.write_text(secrets.token_hex(8))
        self.run: Any = wandb.init(
            project="logdepth",
            name=folder.resolve().name,
            id=file.read_text(),
            resume="allow",
            dir=str(folder),
            config=to_dict(config),
        )

    def log(self, step: int, values: dict[str, float]) -> None:
        self.run.log(values, step=step)

    def close(self) -> None:
        self.run.finish()


TRACKERS: dict[str, Callable[[RunConfig, Path, int], Tracker]] = {
    "tensorboard": _TensorBoard,
    "wandb": _WeightsAndBiases,
}
