"""Trains a drafter: the target answers prompts, the drafter learns to foresee what it answers.

python launch/train.py --config=configs/smollm2_eagle2.py --prompts=PROMPTS.jsonl.gz --out=runs/smollm2_eagle2
"""

import hashlib
import json
import runpy
import sys
from importlib.metadata import version
from pathlib import Path

import entry
from absl import flags
from tqdm import tqdm

import eagle_jax
from eagle_jax.text import read_prompts
from eagle_jax.train.features import generate_shards
from eagle_jax.train.loop import train

FLAGS = flags.FLAGS
flags.DEFINE_string('config', None, 'A file of configs/.', required=True)
flags.DEFINE_string('prompts', None, 'Prompts, one a line or JSON Lines; may be gzipped.', required=True)
flags.DEFINE_string('out', None, 'Run folder: shards of answers, and the drafter.', required=True)
flags.DEFINE_integer('report_every', 100, 'Steps between two reports; the drafter so far is saved at each.')


def main(_):
  config, out = runpy.run_path(FLAGS.config), Path(FLAGS.out)
  target = eagle_jax.load_target(config['TARGET'])
  shards = generate_shards(target, read_prompts(FLAGS.prompts), out / 'shards', config['DATA'])
  *shards, held_out = tqdm(shards, total=config['DATA'].num_shards, desc='shards of answers')
  examples = [example for shard in shards for example in shard]
  provenance = {
    'command': 'launch/train.py ' + ' '.join(sys.argv[1:]),
    'target': config['TARGET'],
    'prompts_sha256': hashlib.sha256(Path(FLAGS.prompts).read_bytes()).hexdigest(),
    'data': repr(config['DATA']),
    'recipe': repr(config['RECIPE']),
    'num_answer_tokens': int(sum(len(example.token) - example.num_prompt for example in examples)),
    'versions': {name: version(name) for name in ('eagle_jax', 'jax', 'flax', 'optax')},
  }
  progress = tqdm(total=config['RECIPE'].num_steps, desc='steps')

  def report(step, drafter, metrics):
    progress.update(step - progress.n)
    progress.set_postfix(top1=f'{metrics["top1"]:.3f}', cross_entropy=f'{metrics["cross_entropy"]:.3f}')
    own = provenance | {'step': step, 'metrics': metrics}
    eagle_jax.save_drafter(drafter, out / 'drafter', own, dtype='bfloat16')

  settings = {'report': report, 'report_every': FLAGS.report_every}
  _, metrics = train(target, config['DRAFTER'], examples, held_out, config['RECIPE'], **settings)
  print(json.dumps(metrics), file=sys.stdout)


if __name__ == '__main__':
  entry.run(main)
