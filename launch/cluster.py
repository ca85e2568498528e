"""The flag that connects several processes of one launcher."""

import os
import sys

from absl import flags

from eagle_jax import processes

FLAGS = flags.FLAGS
flags.DEFINE_string(
  'cluster',
  None,
  "Where this is one of several processes that run this command, as on a TPU pod: 'auto' (Cloud TPU, Slurm, Open MPI, "
  'Kubernetes), or HOST:PORT,NUMBER,INDEX, with an address of the first of them.',
)


def join():
  """Connect to the other processes, if there are any; only the main one prints. Must run before anything else."""
  if FLAGS.cluster is None:
    return
  processes.join(FLAGS.cluster)
  if not processes.is_main_process():
    sys.stdout = open(os.devnull, 'w')  # noqa: SIM115 for as long as the process lives
