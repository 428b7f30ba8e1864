#!/usr/bin/env bash
# The tests that touch the device, then what training costs on it; at most 8 minutes. The table comes last, and on a
# card is written to benchmarks/gpu.md too.
#
#   benchmarks/gpu_check.sh                         # one NVIDIA card; makes .venv where there is none
#   PYTHON=python3 benchmarks/gpu_check.sh          # with this interpreter, which has the dependencies
#   benchmarks/gpu_check.sh --device cpu --quick    # the script itself, on any machine in two minutes
set -euo pipefail
cd "$(dirname "$0")/.."

if [ -z "${PYTHON:-}" ]; then
  [ -x .venv/bin/python ] || make .venv/.installed
  PYTHON=.venv/bin/python
fi
export PYTHONPATH="$PWD/src${PYTHONPATH:+:$PYTHONPATH}"
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"

selection=(tests/test_kernels.py tests/test_precision.py -k "not resumed")
case " $* " in *" --quick "*) selection=(tests/test_kernels.py -k "device or kernel or flops") ;; esac

begun=$SECONDS
log=$(mktemp)
trap 'rm -f "$log"' EXIT
passed=0
timeout 200 "$PYTHON" -m pytest -p no:cacheprovider "${selection[@]}" 2>&1 | tee "$log" || passed=$?
tests=$(tail -n 1 "$log")
[ "$passed" -ne 124 ] || tests="not done in 200 s"

"$PYTHON" benchmarks/gpu_check.py --tests "$tests" --seconds "$((begun + 420 - SECONDS))" "$@"
exit "$passed"
