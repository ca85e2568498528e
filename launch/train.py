"""Train a drafter on the target's answers to prompts; the same command resumes a run that was stopped.

python launch/train.py --config=configs/smollm2_eagle2.py --prompts=PROMPTS.jsonl.gz --out=runs/smollm2_eagle2
"""

import json
import sys
from pathlib import Path

import cluster
import entry
from absl import flags

from eagle_jax.sharding import make_mesh
from eagle_jax.train import run
from eagle_jax.train.configuration import read_configuration

FLAGS = flags.FLAGS
flags.adopt_module_key_flags(cluster)
flags.DEFINE_string('config', None, 'Configuration file, as in configs/.', required=True)
flags.DEFINE_string('prompts', None, 'File with a prompt or conversation a line, perhaps gzipped; default: synthesize.')
flags.DEFINE_string('out', None, 'Run folder for shards of answers, checkpoints, metrics and the drafter.')
flags.DEFINE_string('variant', None, 'One of the VARIANTS of the configuration.')
flags.DEFINE_string('initial', None, 'Drafter to start from: a shipped name or a folder; default: random weights.')
flags.DEFINE_string('vocabulary', None, 'JSON file, {"ids": [...]}, of ids to draft; default: those most frequent.')
flags.DEFINE_integer('report_every', 100, 'Number of steps between evaluations with a checkpoint.', lower_bound=1)
flags.DEFINE_bool('second_stage', False, 'Train on the places alone that decoding with the --initial drafter reaches.')
flags.DEFINE_integer('num_model', 1, 'Number of devices that share a copy; the others split the batch.', lower_bound=1)
flags.DEFINE_bool('dry_run', False, 'Compile the step from shapes and print bytes a device, without loading weights.')
flags.DEFINE_bool('json', False, 'Print only JSON to standard output.')


def main(_):
  cluster.join()
  config = read_configuration(FLAGS.config, FLAGS.variant, shapes_alone=FLAGS.dry_run, second_stage=FLAGS.second_stage)
  mesh = make_mesh(num_model=FLAGS.num_model)
  if FLAGS.out is None and not FLAGS.dry_run:
    raise ValueError('--out is required: pass the run folder.')
  if FLAGS.dry_run:
    numbers = run.dry_run(config, mesh)
  else:
    out = Path(FLAGS.out).expanduser()
    numbers = run.run(
      config,
      out / FLAGS.variant if FLAGS.variant else out,
      shards=out / 'shards',
      prompts=FLAGS.prompts and str(Path(FLAGS.prompts).expanduser()),
      initial=FLAGS.initial,
      vocabulary=FLAGS.vocabulary,
      mesh=mesh if mesh.size > 1 else None,
      report_every=FLAGS.report_every,
      command='launch/train.py ' + ' '.join(sys.argv[1:]),
    )
  print(json.dumps(numbers) if FLAGS.json else '\n'.join(f'{name}: {x:.6g}' for name, x in numbers.items()))


if __name__ == '__main__':
  entry.run(main)
