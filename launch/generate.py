"""Generate text with a target and its drafter, then print one line of statistics.

python launch/generate.py --prompt "Explain why the sky is blue."
A model too large for one device: --num_model=8 --dtype=bfloat16, and on a TPU pod --cluster=auto on all its hosts.
"""

import json
import sys

import cluster
import common
import entry
import options
from absl import flags
from tqdm import tqdm

from eagle_jax import decode
from eagle_jax.text import read_prompts

FLAGS = flags.FLAGS
flags.adopt_module_key_flags(options)  # so that --help explains them
flags.adopt_module_key_flags(cluster)
flags.DEFINE_string('prompt', None, 'The prompt.')
flags.DEFINE_string('batch_file', None, 'File with one prompt a line, or JSON Lines with `prompt`.')
flags.DEFINE_integer('batch_size', None, 'Number of prompts decoded together; default all.', lower_bound=1)
flags.DEFINE_bool('stream', True, 'Print the text while it is decoded (a single --prompt, without --json).')
flags.DEFINE_bool('json', False, 'Print only JSON to standard output, one object for each prompt.')


def requested_prompts():
  if (FLAGS.prompt is None) == (FLAGS.batch_file is None) or (FLAGS.batch_size and FLAGS.prompt is not None):
    raise ValueError('Pass either --prompt or --batch_file; --batch_size goes with --batch_file only.')
  return [FLAGS.prompt] if FLAGS.batch_file is None else list(read_prompts(FLAGS.batch_file))


def main(_):
  cluster.join()
  prompts = requested_prompts()
  request = options.requested()
  target, drafter = common.models()
  if FLAGS.stream and not FLAGS.json and FLAGS.prompt is not None:
    out = decode.stream(target, drafter, prompts[0], **request)
    for chunk in out:
      print(chunk.text, end='', flush=True)
    print()
  else:
    out = decode.generate_each(target, drafter, prompts, batch_size=FLAGS.batch_size, **request)
    for one in tqdm(out, total=len(prompts), disable=FLAGS.batch_size is None):
      shown = {'text': one.text, 'tokens': one.tokens, 'stats': out.stats}
      print(json.dumps(shown) if FLAGS.json else f'{one.text}\n', flush=True)
  line = (
    '{num_new_tokens} new tokens in {num_target_passes} target passes, tau {tau:.2f}, {tok_per_s:.1f} tokens/s '
    '(prefill {prefill_s:.2f} s, decode {decode_s:.2f} s, compile {compile_s:.1f} s apart), {policy}'
  )
  print(line.format(**out.stats), file=sys.stderr)


if __name__ == '__main__':
  entry.run(main, starts_often=True)
