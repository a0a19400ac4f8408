#!/usr/bin/env bash
# Everything about expert parallelism over 4 and 8 GPUs of one machine, in under eight minutes: the
# GPU tests with a rank on each GPU, then figures for EP4 and EP8. Needs no network and no
# installation, only the packages (torch, CUDA's, pytest) where python finds them.
#
#   bench/ep8.sh FOLDER              eight GPUs; results and logs go to FOLDER
#   bench/ep8.sh --rehearse FOLDER   two GPUs: 8 ranks on them are checked, EP2 is measured
#   bench/ep8.sh --dry-run FOLDER    print the commands
#
# Exit code 0: every step passed. PYTHON: which python; LIMIT_S: seconds for everything.
set -euo pipefail
cd "$(dirname "$0")/.."
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
limit="${LIMIT_S:-465}"
# Its own limits end in time; this is for the case that they do not.
exec timeout --kill-after=5 "$((limit + 15))" "${PYTHON:-python3}" bench/ep8.py --limit "$limit" "$@"
