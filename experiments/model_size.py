"""Parameters by part and the memory of training, before anything is allocated.

python experiments/model_size.py model=llama3_8b
python experiments/model_size.py model=gpt2,gpt2_xl optim=sgd data.batch_size=1
"""

import sys
from pathlib import Path

from normlab import composing, size
from normlab.explain import ConfigError


def main(arguments: list[str]) -> int:
    """Print a report for each model. Exit status 2 for the user's mistake, told in one line."""
    if {"-h", "--help"} & set(arguments):
        print(__doc__)
        return 0
    models = [a.removeprefix("model=").split(",") for a in arguments if a.startswith("model=")]
    others = [a for a in arguments if not a.startswith("model=") and a not in {"-m", "--multirun"}]
    root = Path(__file__).resolve().parents[1]
    try:
        names = models[-1] if models else ["nano"]
        for name, cfg in [(name, composing.config(root, [f"model={name}", *others])) for name in names]:
            print(f"model={name}", size.report(cfg), "", sep="\n", flush=True)
    except ConfigError as error:
        print(f"model_size.py: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
