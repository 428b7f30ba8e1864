"""Train one run, or a sweep of them.

python experiments/train.py model.depth=24 model.placement=post optim.lr=1e-3
python experiments/train.py -m model.depth=6,24 model.placement=pre,post seed=0,1
python experiments/train.py +sweeps=demo
"""

from pathlib import Path

from normlab import cli
from normlab.train import train

if __name__ == "__main__":
    cli.main(train, Path(__file__).resolve().parents[1])
