#!/usr/bin/env bash
# Sets everything up on a fresh machine and fits EfficientNet-B0's training step into 60 % of its memory, on the CPU.
# Further arguments go to memrewrite, for example --force to write over an earlier result.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
.ci/setup
.venv/bin/memrewrite optimize examples/efficientnet.py --input 8x3x96x96 --budget 60% -o out "$@"
