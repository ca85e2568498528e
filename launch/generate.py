"""Generate text with a target and its drafter, then print one line of statistics.

python launch/generate.py --prompt "Explain why the sky is blue."
A model too large for one device: --num_model=8 --dtype=bfloat16, and on a TPU pod --cluster=auto on all its hosts.
"""

import json

import cluster
import common
import entry
import inputs
import options
import output
import traces
from absl import flags
from store import programs

from eagle_jax import decode
from eagle_jax.progress import progress_bar

FLAGS = flags.FLAGS
flags.adopt_module_key_flags(inputs)  # so that --help explains them
flags.adopt_module_key_flags(options)
flags.adopt_module_key_flags(cluster)
flags.adopt_module_key_flags(traces)
flags.DEFINE_bool('stream', True, 'Print the text while it is decoded (a single --prompt, without --json).')
flags.DEFINE_bool('json', False, 'Print only JSON to standard output, one object for each prompt.')


def main(_):
  cluster.join()
  prompts = inputs.requested()
  request, is_traced = options.requested() | {'stop': FLAGS.stop}, traces.requested(len(prompts))
  if FLAGS.num_model is None:  # programs for several devices are not stored
    programs().read_ahead()
  target, drafter = common.models()
  if FLAGS.stream and not FLAGS.json and not is_traced and FLAGS.prompt is not None:
    out = decode.stream(target, drafter, inputs.with_system(prompts)[0], **request)
    for chunk in out:
      print(chunk.text, end='', flush=True)
    print()
  else:
    chats, how = inputs.with_system(prompts), {'batch_size': FLAGS.batch_size, 'trace': is_traced}
    out = decode.generate_each(target, drafter, chats, **how, **request)
    answers = progress_bar(out, total=len(prompts), unit='answer') if FLAGS.batch_size else out
    for number, one in enumerate(answers):
      if FLAGS.show_tree:
        traces.show(out.trace[number], target.tokenizer)
      shown = {'text': one.text, 'tokens': one.tokens, 'stats': out.stats}
      print(json.dumps(shown) if FLAGS.json else f'{one.text}\n', flush=True)
    if FLAGS.trace_html is not None:
      traces.write(out.trace, target.tokenizer, prompts)
  output.print_statistics(out.stats)


if __name__ == '__main__':
  entry.run(main, starts_often=True)
