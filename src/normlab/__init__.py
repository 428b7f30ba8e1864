"""normlab: which norm placement trains stably, how deep, and which layer breaks first when it does not."""

import os

# OpenMP threads that wait by spinning slow a small model 5-18 times as soon as another process wants a core.
# Read when torch is first imported, so it stands here.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
