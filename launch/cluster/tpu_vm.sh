#!/usr/bin/env bash
# A Cloud TPU VM, or all hosts of a pod slice: creates it, installs this repository, runs a command, deletes it.
#
#   PROJECT=my-project ZONE=us-west4-a TYPE=v5litepod-16 bash launch/cluster/tpu_vm.sh
#   ... bash launch/cluster/tpu_vm.sh launch/train.py --config=CONFIG.py --out=/mnt/shared/mine
#
# Expects: gcloud, logged in, with quota for TYPE in ZONE; this repository as the current folder. KEEP=1 keeps the TPU.
# Arguments replace the command below. A run folder must lie where all hosts see it, such as a mounted bucket.
set -euo pipefail

NAME="${NAME:-eagle-jax}"
TYPE="${TYPE:-v5litepod-8}"
VERSION="${VERSION:-v2-alpha-tpuv5-lite}"  # of the TPU's software; it belongs to TYPE
PACKAGE="$(mktemp -d)/eagle_jax.tar.gz"
at=(--project="${PROJECT:?the Google Cloud project}" --zone="${ZONE:?a zone that has TYPE}")

if [ $# -eq 0 ]; then
  set -- launch/generate.py --prompt="Explain why the sky is blue." --dtype=bfloat16 --num_model="${NUM_MODEL:-8}"
fi

on_all_hosts() {
  gcloud compute tpus tpu-vm ssh "$NAME" "${at[@]}" --worker=all --command="$1"
}

gcloud compute tpus tpu-vm create "$NAME" "${at[@]}" --accelerator-type="$TYPE" --version="$VERSION"
if [ -z "${KEEP:-}" ]; then
  trap 'gcloud compute tpus tpu-vm delete "$NAME" "${at[@]}" --quiet' EXIT
fi
git archive --prefix=eagle_jax/ --output="$PACKAGE" HEAD
gcloud compute tpus tpu-vm scp "$PACKAGE" launch/cluster/tpu_startup.sh "$NAME": "${at[@]}" --worker=all
on_all_hosts 'bash tpu_startup.sh'
on_all_hosts "cd eagle_jax && ../venv/bin/python $(printf '%q ' "$@") --cluster=auto"
