"""Final loss by activation, at each one's best learning rate and at one rate, with paired differences to GELU."""

import arms
import choices
import figure
from figure import Drawn
from normlab.ffn import ACTIVATIONS
from normlab.results import Results

STEM = "activation"
KEY = "model.activation"


def draw(data: Results) -> Drawn:
    return choices.draw(data, KEY, "gelu", ACTIVATIONS, sizes(data))


def sizes(data: Results) -> str:
    """How many parameters a model has with each activation."""
    runs, _ = choices.comparable(data, KEY, "gelu", arms.PLACEMENT, choices.LR)
    counts = runs.groupby(KEY).parameters.agg(lambda n: " or ".join(f"{int(x):,}" for x in sorted(n.dropna().unique())))
    rank = {name: i for i, name in enumerate(ACTIVATIONS)}
    told = ", ".join(f"{name} {counts[name]}" for name in sorted(counts.index, key=lambda a: rank.get(a, len(rank))))
    return f" A gated activation has two thirds of the hidden units; parameters of the whole model: {told}."


if __name__ == "__main__":
    figure.main(draw, STEM)
