"""Layer x step picture of the blocks' gradient norms, of bounded size however long the run is."""

import io
from collections.abc import Sequence
from typing import Any

import numpy as np

COLUMNS = 512  # at most so many buckets of steps


class HeatMap:
    """Running maximum of each block's norm over buckets of steps."""

    def __init__(self, blocks: Sequence[tuple[str, int]], steps: int) -> None:
        """blocks: (stack, layer), a stack's in order. steps: the planned length of the run."""
        self._blocks = list(blocks)
        self._width = max(1, -(-steps // COLUMNS))  # steps in a bucket
        self._grid = np.full((len(self._blocks), max(1, -(-steps // self._width))), -np.inf)
        self.steps = 0

    def push(self, step: int, norms: np.ndarray) -> None:
        """The norms (blocks,) of one step. One that is not finite marks its bucket."""
        column = self._grid[:, step // self._width]
        np.maximum(column, np.where(np.isfinite(norms), norms, np.inf), out=column)
        self.steps = max(self.steps, step + 1)

    @property
    def grid(self) -> np.ndarray:
        """(blocks, buckets) up to the last step: largest norm, inf where one was not finite."""
        return self._grid[:, : -(-self.steps // self._width)]

    def png(self) -> bytes:
        """One panel per stack on one logarithmic colour scale."""
        from matplotlib import colormaps
        from matplotlib.figure import Figure
        from matplotlib.ticker import MaxNLocator

        grid = self.grid
        with np.errstate(divide="ignore"):
            shown = np.log10(grid)
        drawn = shown[np.isfinite(shown)]
        low, high = (drawn.min(), drawn.max()) if drawn.size else (-0.5, 0.5)
        if high - low < 1e-6:
            low, high = low - 0.5, high + 0.5
        stacks = list(dict.fromkeys(stack for stack, _ in self._blocks))
        figure = Figure(figsize=(8, 1 + 2.8 * len(stacks)), dpi=100, layout="constrained")
        panels = figure.subplots(len(stacks), 1, sharex=True, squeeze=False)[:, 0]
        colours = colormaps["viridis"].with_extremes(bad="red", under="lightgrey")
        image: Any = None
        for panel, stack in zip(panels, stacks, strict=True):
            rows = [i for i, (owner, _) in enumerate(self._blocks) if owner == stack]
            values = np.ma.masked_equal(np.where(np.isneginf(shown[rows]), low - 1, shown[rows]), np.inf)
            extent = (-0.5, grid.shape[1] * self._width - 0.5, -0.5, len(rows) - 0.5)
            image = panel.imshow(values, cmap=colours, vmin=low, vmax=high, aspect="auto", origin="lower",
                                 interpolation="nearest", extent=extent)  # fmt: skip
            panel.set_ylabel("layer (0 = input side)")
            panel.set_title(stack)
            for axis in (panel.xaxis, panel.yaxis):
                axis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
        panels[-1].set_xlabel("optimizer step" + (f", largest of each {self._width}" if self._width > 1 else ""))
        notes = ["red: not finite"] * bool(np.isinf(grid).any()) + ["grey: zero"] * bool((grid == 0).any())
        figure.suptitle("; ".join(["weight-gradient norm of each block", *notes]), fontsize="medium")
        figure.colorbar(image, ax=list(panels), label="log10 of the L2 norm")
        buffer = io.BytesIO()
        figure.savefig(buffer, format="png", dpi="figure")  # whatever the process's own style says
        return buffer.getvalue()
