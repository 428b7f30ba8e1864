"""Train one run, or a sweep of them.

python experiments/train.py model.depth=24 model.placement=post optim.lr=1e-3
python experiments/train.py -m model.depth=6,24 model.placement=pre,post seed=0,1
python experiments/train.py +sweeps=demo
python experiments/train.py -m seed=0,1,2,3 pack=4                    # four at once in one process
"""

from pathlib import Path

from normlab import cli
from normlab.pack_launch import train

if __name__ == "__main__":
    cli.main(train, Path(__file__).resolve().parents[1])
