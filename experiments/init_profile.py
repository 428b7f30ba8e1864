"""Gradients and activations per layer at initialisation, without training: a sweep whose runs take no step.

python experiments/init_profile.py                              # sweeps/init_profile.yaml
python experiments/init_profile.py model.placement=pre,sandwich model.depth=6,12
python experiments/init_profile.py +sweeps=xiong_depth          # the theory setting of Xiong et al. 2020
"""

import sys
from pathlib import Path

from normlab import cli
from normlab.train import train

if __name__ == "__main__":
    if any(argument.lstrip("+").startswith("steps=") for argument in sys.argv[1:]):
        print("init_profile.py: steps: a profile takes none; experiments/train.py trains", file=sys.stderr)
        sys.exit(2)
    chosen = any(argument.startswith("+sweeps=") for argument in sys.argv[1:])
    also = ("steps=0",) if chosen else ("steps=0", "+sweeps=init_profile")
    cli.main(train, Path(__file__).resolve().parents[1], also=also)
