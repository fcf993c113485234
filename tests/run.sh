#!/usr/bin/env bash
# Sets everything up on a fresh machine and runs the tests, two files at a time; further arguments go to pytest.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
.ci/setup
unset PYTHONDONTWRITEBYTECODE # or each of the many processes compiles the files of memrewrite anew
export OMP_NUM_THREADS=1 # a thread for each process: two of each on two cores take a third longer
.venv/bin/python -m pytest -n 2 --dist loadfile "$@"
