# The doors. Each makes .venv first if it is missing or older than the lock.
PYTHON ?= python3
VENV   := .venv
PY     := $(VENV)/bin/python

# Studies that train.py runs; jacobian, norm_cost and lr_frontier have doors of their own.
STUDIES := final_norm batchnorm sine precision qk_norm activation norm_type warmup residual_ablation lr_sensitivity \
           depth_placement init_gradients

.PHONY: demo studies test test-faults check bench
.DELETE_ON_ERROR:

$(VENV)/.installed: requirements.lock pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(PY) -m pip install --quiet --disable-pip-version-check -r requirements.lock
	$(PY) -m pip install --quiet --disable-pip-version-check --no-deps --editable .
	touch $@

# The headline study: gradients at initialisation, the small training sweep, figures and report.
# Models this small do best with one thread each, so two processes share the work.
demo: export OMP_NUM_THREADS = 1
demo: $(VENV)/.installed
	$(PY) experiments/init_profile.py log.progress=false & other=$$!; \
	$(PY) experiments/init_profile.py +sweeps=xiong_depth && wait $$other
	$(PY) experiments/train.py +sweeps=demo model.placement=post log.progress=false & other=$$!; \
	$(PY) experiments/train.py +sweeps=demo model.placement=pre && wait $$other
	$(PY) analysis/report.py runs/demo runs/init_profile runs/xiong_depth

# Every study at scale=cpu, and docs/studies.md from them. What is finished is not run again.
studies: export OMP_NUM_THREADS = 1
studies: $(VENV)/.installed
	for study in $(STUDIES); do \
	  $(PY) experiments/train.py +sweeps=$$study hydra/launcher=joblib log=disabled log.progress=false || exit 1; done
	$(PY) experiments/train.py +sweeps=depth_placement model.depth=96 model.placement=pre optim.lr=1e-3 \
	  hydra/launcher=joblib log=disabled log.progress=false
	$(PY) experiments/jacobian.py
	$(PY) experiments/norm_cost.py
	$(PY) experiments/lr_frontier.py
	$(PY) analysis/studies.py runs docs/studies

test: $(VENV)/.installed
	$(PY) -m pytest --numprocesses auto --dist worksteal

# A study of 12 runs that is killed 30 times, about 4 minutes; make test has 3 runs and 4 kills.
test-faults: $(VENV)/.installed
	$(PY) tests/kill_study.py

check: $(VENV)/.installed
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/pyright

# 70 minutes on a machine that does nothing else. NANOGPT: a checkout of karpathy/nanoGPT to compare with.
bench: $(VENV)/.installed
	$(PY) benchmarks/throughput.py $(if $(NANOGPT),--nanogpt $(NANOGPT))
	$(PY) benchmarks/peak_memory.py $(if $(NANOGPT),--nanogpt $(NANOGPT))
	$(PY) benchmarks/statistics_cost.py
	$(PY) benchmarks/startup.py
	$(PY) benchmarks/scheduling.py
	$(PY) benchmarks/many_runs.py
	$(PY) benchmarks/scaling.py
	$(PY) benchmarks/packing.py
