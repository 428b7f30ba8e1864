"""Hydra takes sweepers from the namespace hydra_plugins alone."""

import copy
import pickle
from collections.abc import Sequence
from typing import Any

from hydra._internal.config_repository import CachingConfigRepository
from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.plugins.config_source import ConfigResult
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig

# by the sources; a process reads each file once in a launch. Pickled: a fifth of the time of a deep copy
_READ: dict[str, dict[str, bytes]] = {}


class KeptFiles(CachingConfigRepository):
    """What Hydra composes a job from. Hydra's own keeps a file for one job, though every job reads the same."""

    def load_config(self, config_path: str) -> ConfigResult | None:
        """The file's content, which the caller may change."""
        read = _READ.setdefault(str([(s.provider, s.path) for s in self.get_sources()]), {})
        if config_path not in read:
            read[config_path] = pickle.dumps(self.delegate.load_config(config_path))
        return pickle.loads(read[config_path])

    def __deepcopy__(self, memo: object) -> "KeptFiles":
        """Hydra makes one for each job, to set the job's own search path, which replaces the list of sources."""
        copied = copy.copy(self)
        copied.delegate = copy.copy(self.delegate)
        return copied


class CheckedSweeper(BasicSweeper):
    """Hydra's own, for jobs that normlab.cli has composed and checked before: composing each again doubles the cost."""

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        _READ.clear()
        loader: Any = hydra_context.config_loader
        loader.repository = KeptFiles(loader.repository)
        super().setup(hydra_context=hydra_context, task_function=task_function, config=config)

    def validate_batch_is_legal(self, batch: Sequence[Sequence[str]]) -> None:
        """Nothing is left to check."""
