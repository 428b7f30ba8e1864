"""Shared fixtures: configs composed from conf/, the optional data beside the checkout, one tiny real study."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from launching import Starter

import figure
from normlab import composing
from normlab.config import Config
from normlab.results import Results
from normlab.train import train

torch.set_num_threads(1)  # tiny models: a second thread costs more than it brings

ROOT = Path(__file__).resolve().parents[1]
SHARED = ROOT.parent / "shared" / "data"
TINY = [
    *("data=markov", "data.vocab=16", "data.order=1", "data.batch_size=4", "eval.batches=2", "probe.batches=2"),
    *("model.depth=2", "model.width=16", "model.heads=2", "model.context=16", "steps=6", "log=disabled"),
]


def compose(*overrides: str) -> Config:
    return composing.config(ROOT, list(overrides))


def drawn(module: Any, data: Results) -> figure.Drawn:
    """The figure of these runs, closed."""
    found = module.draw(data)
    figure.plt.close(found.figure)
    return found


def tiny(folder: Path, *overrides: str) -> Config:
    return compose(*TINY, f"runs_dir={folder}", *overrides)


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def study(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny real study: depth x placement x warm-up x seed, trained."""
    folder = tmp_path_factory.mktemp("runs")
    for depth in (2, 3, 4):
        for placement in ("pre", "post"):
            for warmup in (0, 3):
                for seed in (0, 1):
                    overrides = [f"model.depth={depth}", f"model.placement={placement}", f"seed={seed}"]
                    train(tiny(folder, *overrides, f"optim.warmup_steps={warmup}", "study=tiny", "eval.every=2"))
    return folder / "tiny"


@pytest.fixture
def shared_data() -> Path:
    if not SHARED.is_dir():
        pytest.skip(f"{SHARED} is not there: real text for this test is kept outside the project")
    return SHARED


@pytest.fixture(scope="session")
def starter() -> Iterator[Starter]:
    """Launches of the scripts without the time of the imports."""
    starter = Starter()
    yield starter
    starter.close()
