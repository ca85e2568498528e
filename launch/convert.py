"""Read a drafter of any layout, report what it is, and write it in another layout, checked bit for bit.

python launch/convert.py --to=sglang --out=runs/for_sglang
"""

import json
from pathlib import Path

import common
import entry
import jax
from absl import flags

from eagle_jax import hub
from eagle_jax.draft.export import LAYOUTS
from eagle_jax.draft.kinds import kind_of

FLAGS = flags.FLAGS
flags.adopt_module_key_flags(common)
flags.DEFINE_enum('to', 'eagle_jax', ['eagle_jax', *LAYOUTS], "Layout to write: our own, or another engine's.")
flags.DEFINE_string('out', None, 'Folder to write; default: only report what the drafter is.')
flags.DEFINE_bool('json', False, 'Print the report as JSON.')


def main(_):
  if FLAGS['to'].present and FLAGS.out is None:
    raise ValueError('--to needs --out, the folder to write.')
  target, drafter = common.pair()
  config, leaves = drafter.config, jax.tree.leaves(drafter.params)
  report = {
    'drafter': config.name,
    'kind': kind_of(config).title,
    'target': target.config.name,
    'tapped_layers': config.tapped_layers(target.config.num_layers),
    'draft_vocabulary': config.num_ids,
    'parameters': sum(x.size for x in leaves),
    'bytes': sum(x.size * x.dtype.itemsize for x in leaves),
  }
  if FLAGS.out is not None:
    write(target, drafter, Path(FLAGS.out).expanduser())
    report |= {'layout': FLAGS.to, 'written': FLAGS.out}
  print(json.dumps(report) if FLAGS.json else '\n'.join(f'{name}: {value}' for name, value in report.items()))


def write(target, drafter, out: Path) -> None:
  """Write the folder, and check that it reads back the same."""
  if out.exists() and any(out.iterdir()):
    raise ValueError(f'--out must be empty or not exist yet, got {out}, which has files: choose another, or empty it.')
  if FLAGS.to == 'eagle_jax':
    hub.save_drafter(drafter, out)
  else:
    hub.export_drafter(drafter, out, target, layout=FLAGS.to)
  again = hub.load_drafter(out, target, dtype=FLAGS.drafter_dtype)
  hub.require_same(drafter, again, target)


if __name__ == '__main__':
  entry.run(main)
