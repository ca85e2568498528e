"""Report what the compiler says of a decode step for a TPU or GPU that need not be present: compiled, not run.

JAX_PLATFORMS=cpu TPU_SKIP_MDS_QUERY=1 python launch/compile_cost.py --shape=llama3_8b --topology=v5e:2x2
JAX_PLATFORMS=cpu python launch/compile_cost.py --topology=h100 --num_devices=1

Needs libtpu (extra: tpu), or the CUDA plugin (extra: gpu). Bytes, FLOPs and times are of one device.
"""

import json

import entry
import jax
from absl import flags

from eagle_jax.bench.aot import compiled, described
from eagle_jax.evaluate import random_pairs
from eagle_jax.sharding import make_mesh

FLAGS = flags.FLAGS
flags.DEFINE_enum('shape', 'llama3_8b', random_pairs.NAMES, 'Shape of the pair; the target is in bfloat16.')
flags.DEFINE_string('topology', 'v5e:2x2', 'TPUs as named by jax.experimental.topologies, or GPUs: h100, h200:4.')
flags.DEFINE_integer('num_devices', 4, 'Number of devices of the topology that share one model.', lower_bound=1)
flags.DEFINE_integer('draft_vocab_size', None, 'Number of ids that the drafter drafts; default all.', lower_bound=1)
flags.DEFINE_enum('drafter_dtype', 'bfloat16', ['bfloat16', 'int8'], "The drafter's dtype.")
flags.DEFINE_integer('batch', 1, 'Number of sequences decoded together.', lower_bound=1)
flags.DEFINE_integer('context', 1024, 'Number of tokens before the step.', lower_bound=1)
flags.DEFINE_bool('json', False, 'Print only JSON to standard output.')


def main(_):
  jax.config.update('jax_enable_compilation_cache', False)  # programs for a described device cannot be read back
  devices = described.devices(FLAGS.topology)
  configs = random_pairs.configs(FLAGS.shape, draft_vocab_size=FLAGS.draft_vocab_size)
  mesh = make_mesh(devices[: FLAGS.num_devices], num_model=FLAGS.num_devices)
  options = {'num_prompt': FLAGS.context, 'batch': FLAGS.batch, 'is_quantised': FLAGS.drafter_dtype == 'int8'}
  pair = compiled.ShapedPair(*configs, mesh, **options)
  found = compiled.steps(pair)
  print(json.dumps({name: one._asdict() for name, one in found.items()}) if FLAGS.json else compiled.table(found))


if __name__ == '__main__':
  entry.run(main)
