#!/usr/bin/env bash
# One host with several GPUs: one process holds them all.
#
#   bash launch/cluster/gpus.sh
#   NUM_MODEL=2 bash launch/cluster/gpus.sh launch/bench.py --num_questions=10 --out=runs/bench
#
# Expects: this repository as the current folder, installed with the extras demo and gpu. NUM_MODEL GPUs share one copy of the
# model and the others split the batch; CUDA_VISIBLE_DEVICES chooses among them.
set -euo pipefail

if [ $# -eq 0 ]; then
  set -- launch/generate.py --prompt="Explain why the sky is blue." --dtype=bfloat16
fi
exec "${PYTHON:-python}" "$@" --num_model="${NUM_MODEL:-1}"
