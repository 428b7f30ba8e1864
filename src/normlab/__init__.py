"""normlab: which norm placement trains stably, how deep, and which layer breaks first when it does not."""

import os

# OpenMP threads should spin only shortly while they wait, then sleep. Left alone, they spin long: 60 steps at depth 24,
# width 64 took 5 s on two idle cores but 24-77 s beside one busy process; so, 4.5 s and 10 s.
# Read when torch is first imported, so it stands here.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("GOMP_SPINCOUNT", "1000")
