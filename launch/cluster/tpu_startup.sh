#!/usr/bin/env bash
# On every host of a TPU: an environment, and the repository out of eagle_jax.tar.gz beside this script.
# Where the host's Python is older than 3.11, uv brings a newer one.
set -euo pipefail
cd "$(dirname "$0")"
PYTHON="${PYTHON:-python3}"

if "$PYTHON" -c 'import sys; sys.exit(sys.version_info < (3, 11))'; then
  "$PYTHON" -m venv venv
else
  "$PYTHON" -m pip install --quiet --user uv
  "$PYTHON" -m uv venv --seed --python=3.12 venv
fi
tar -xzf eagle_jax.tar.gz
venv/bin/python -m pip install --quiet -e 'eagle_jax[demo,tpu]'
