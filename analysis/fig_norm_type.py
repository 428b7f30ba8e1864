"""Final loss by norm type, at each one's best learning rate and at one rate, with paired differences to LayerNorm."""

import choices
import figure
from figure import Drawn
from normlab.norm import NORMS
from normlab.results import Results

STEM = "norm_type"


def draw(data: Results) -> Drawn:
    return choices.draw(data, "model.norm", "layernorm", NORMS)


if __name__ == "__main__":
    figure.main(draw, STEM)
