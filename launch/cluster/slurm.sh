#!/usr/bin/env bash
# Several GPU nodes under Slurm, one process a GPU.
#
#   sbatch launch/cluster/slurm.sh
#   sbatch --nodes=4 launch/cluster/slurm.sh launch/train.py --config=CONFIG.py --out=/shared/runs/mine
#
# Expects: this repository and its environment (PYTHON) on a file system that all nodes see, and as many tasks as GPUs.
# Arguments replace the command below; --cluster=auto reads Slurm's variables in every task.
#SBATCH --job-name=eagle_jax
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=8
#SBATCH --time=01:00:00
#SBATCH --output=%x-%j.log
set -euo pipefail
cd "${SLURM_SUBMIT_DIR:-.}"

if [ $# -eq 0 ]; then
  set -- launch/generate.py --prompt="Explain why the sky is blue." --dtype=bfloat16 --num_model="${NUM_MODEL:-8}"
fi
# One task that fails would leave the others waiting in a collective, so all are ended with it.
srun --kill-on-bad-exit=1 "${PYTHON:-python}" "$@" --cluster=auto
