"""What the doors beside train.py share: help, one line about a mistake, the configs of a study that trains nothing."""

import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

from hydra.errors import HydraException

from normlab import composing, distributed
from normlab.config import Config, load
from normlab.explain import ConfigError

T = TypeVar("T")


def asked(door: str, doc: str | None, arguments: Sequence[str], plan: Callable[[list[str]], T]) -> T:
    """What `plan` makes of the overrides. Exits with 0 after the help, with 2 after one line on the user's mistake."""
    if {"-h", "--help"} & set(arguments):
        print(doc)
        sys.exit(0)
    os.environ["NORMLAB_CWD"] = str(Path.cwd())
    try:
        if distributed.world()[1] > 1:
            raise ConfigError("torchrun with several ranks: accepted by train.py alone")
        return plan([a for a in arguments if a not in {"-m", "--multirun"}])
    except (ConfigError, HydraException) as error:
        print(f"{door}: {' '.join(str(error).split())}", file=sys.stderr)
        sys.exit(2)


def configs(root: Path, study: str, overrides: list[str], instead: str) -> list[Config]:
    """One config for each combination of the listed choices, without a training step. Raises ConfigError.

    study: the sweep that is meant where the overrides name none. instead: what is done, for who asks for steps.
    """
    if any(override.lstrip("+").startswith("steps=") for override in overrides):
        raise ConfigError(f"steps: {instead}; experiments/train.py trains")
    sweep = [] if any(override.startswith("+sweeps=") for override in overrides) else [f"+sweeps={study}"]
    with composing.conf(root):
        jobs = composing.expand(["steps=0", *sweep, *overrides], multirun=True)
        return [load(raw) for raw in composing.each(jobs)]
