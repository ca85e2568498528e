"""The launchers as a user runs them: standard output, standard error, exit codes."""

import dataclasses
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import jax
import pytest

pytest.importorskip('gguf')

import options
import traces

import forked
from eagle_jax import hub
from eagle_jax.config import DrafterConfig
from eagle_jax.draft.drafter import Drafter
from eagle_jax.draft.eagle import Eagle
from eagle_jax.train.configuration import read_configuration
from eagle_jax.weights import naming
from tiny_files import TINY, byte_metadata, random_tensors, write_gguf
from tiny_traces import A_CYCLE

ROOT = Path(__file__).parents[1]
DRAFTER = DrafterConfig(vocab_size=11, width=32, num_heads=4, num_kv_heads=2, head_dim=8, ffn_width=64)


@pytest.fixture(scope='module')
def files(tmp_path_factory):
  """--target and --drafter of a tiny pair without tokenizer."""
  folder = tmp_path_factory.mktemp('models')
  path = write_gguf(folder / 'tiny.gguf', random_tensors(naming.gguf_table(TINY)))
  hub.save_drafter(Drafter(DRAFTER, Eagle(DRAFTER).init_params(jax.random.key(0))), folder / 'drafter')
  return [f'--target={path}', f'--drafter={folder / "drafter"}']


@pytest.fixture(scope='module')
def byte_level_target(tmp_path_factory):
  """A GGUF file of a tiny target with a tokenizer of bytes."""
  folder = tmp_path_factory.mktemp('byte_level')
  config = dataclasses.replace(TINY, vocab_size=259, eos_ids=(258, 257))
  tensors = random_tensors(naming.gguf_table(config))
  return write_gguf(folder / 'bytes.gguf', tensors, config=config, extra=byte_metadata(eos_token_id=None))


def started(name, *flags):
  """By a new interpreter, to be signalled and read from."""
  command = [sys.executable, str(ROOT / 'launch' / f'{name}.py'), *flags]
  environment = os.environ | {'JAX_PLATFORMS': 'cpu'}
  return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)


def launch(name, *flags):
  with forked.start(ROOT / 'launch' / f'{name}.py', *flags) as process:
    return process.completed()


@pytest.mark.parametrize(
  ('flags', 'complaint'),
  [
    (['--prompt=hello', '--target=no-such-model'], "Unknown target 'no-such-model'"),
    ([], '--prompt or --batch_file'),
    (['--prompt=a', '--batch_size=2'], '--batch_size goes with --batch_file only'),
    (['--prompt=hello', '--policy=static', '--width=3'], "--policy=static does not take ['width']"),
    (['--prompt=hello', '--lookup=route'], "--policy=auto does not take ['lookup']"),
    (['--batch_file=no/such/file'], 'No file of prompts at no/such/file'),
    (['--prompt', 'What', 'is this?'], "got ['is this?']"),
    (['--prompt=hello', '--cluster=here'], "'auto' or HOST:PORT,NUMBER,INDEX, got 'here'"),
    (
      ['--prompt=hello', '--cluster=auto'],
      "The cluster 'auto' cannot be joined: coordinator_address should be defined.",
    ),
    (['--prompt=hello', '--cluster=localhost:1,2,5'], 'process_id < num_processes'),
    (['--prompt=hello', '--target=no-such-model', '--show_tree', '--json'], 'drop one, or take --trace_html=FILE'),
    (['--prompt=hello', '--target=no-such-model', '--trace_html=launch'], '--trace_html=launch is a folder'),
    ([f'--batch_file={__file__}', '--batch_size=2', '--trace_html=x'], 'with --batch_size=2: drop --batch_size'),
    (['--prompt=hello', f'--trace_html={__file__}/page.html'], f'{__file__}/page.html cannot be written'),
    (['--prompt=hello', '--num_model=3'], '`num_model` must divide the number of devices, 1, got 3'),
  ],
)
def test_bad_input_is_one_line_and_exit_code_2(flags, complaint):
  done = launch('generate', *flags)
  assert done.returncode == 2
  assert done.stdout == ''
  assert done.stderr.count('error:') == 1
  assert complaint in done.stderr
  assert 'Traceback' not in done.stderr


def test_a_switch_with_one_more_value_names_what_it_takes():
  done = launch('generate', '--prompt=hello', '--lookup=other')
  assert '--lookup=other: true, false or route is needed' in done.stderr


@pytest.mark.parametrize(
  ('flags', 'complaint'),
  [
    ([f'--config={ROOT}/configs/smollm2_eagle2.py'], '--out is required'),
    ([f'--config={ROOT}/configs/smollm2_ablation.py', '--out=x', '--variant=none'], "Unknown variant 'none'"),
    (['--config=no/such/file'], 'No such file or directory'),
    (['--config=.'], '. is a folder'),
    ([f'--config={ROOT}/configs/llama3_8b_eagle2.py', '--out=x'], 'TARGET is a TargetConfig; a str is needed'),
    ([f'--config={ROOT}/README.md'], 'README.md'),
  ],
)
def test_bad_input_to_training(flags, complaint):
  done = launch('train', *flags)
  assert done.returncode == 2
  assert complaint in done.stderr
  assert 'Traceback' not in done.stderr


CONFIGURATION = """
from eagle_jax.config import DrafterConfig, TargetConfig
from eagle_jax.train.shards import Data
from eagle_jax.train.step import Objective, Recipe
TARGET = {target!r}
DRAFTER = DrafterConfig(vocab_size=11, width=32, num_heads=4, num_kv_heads=2, head_dim=8, ffn_width=64)
DATA = {{'short': Data(num_shards=1)}}
RECIPE = Recipe(num_steps=2, num_rows=2, num_places=32)
"""


def configuration(path, target='smollm2-135m-instruct', more=''):
  path.write_text(CONFIGURATION.format(target=target) + more, encoding='utf-8')
  return str(path)


@pytest.mark.parametrize(
  ('more', 'variant', 'message'),
  [
    ('del RECIPE', None, 'RECIPE is missing; a Recipe is needed'),
    ('del DATA', None, 'DATA is missing; a dict is needed'),
    (
      'DRAFTER = {}',
      None,
      'DRAFTER is a dict; a DrafterConfig or EagleTapsConfig or BlockConfig or Eagle3Config or MedusaConfig is needed',
    ),
    ('TARGET = TargetConfig(11, 32, 1, 4, 2, 8, 64, 128)', None, 'TARGET is a TargetConfig; a str is needed'),
    ('Recipe(steps=1)', None, "keyword argument 'steps'. The fields of Recipe are num_steps, num_rows, .*seed[.]"),
    ('Objective(top=1)', None, "'top'. The fields of Objective are regression, "),
    ('Data()', None, "'num_shards'. The fields of Data are num_shards, "),
    ('Recipe(num_steps=0)', None, "these must be at least 1: {'num_steps': 0}"),
    ('Objective(top_k=0)', None, "Objective: .*{'top_k': 0}; at least {'top_k': 1}"),
    ('Objective(step_decay=float("nan"))', None, "{'step_decay': nan}; at least {'step_decay': 0}"),
    ('Objective(regression=0, cross_entropy=0)', None, 'Objective: all weights are 0'),
    ('VARIANTS = {"x": {"RECIPES": RECIPE}}', 'x', "variant 'x' has .'RECIPES'.; TARGET, .* may be in one"),
    ('RECIPE = Recipes(num_steps=1)', None, "NameError: name 'Recipes'"),
    ('1 / 0', None, 'ZeroDivisionError'),
    ('RECIPE.steps', None, "AttributeError.*'steps'"),
    ('DATA = {"../../x": Data(1)}', None, "'../../x'"),
    ('DATA = {"/x": Data(1)}', None, "'/x'"),
    ('DATA = {"..": Data(1)}', None, "'..'"),
    ('DATA = {3: Data(1)}', None, 'the name 3;'),
    ('DATA = {"x": 3}', None, "'x': 3"),
    ('NUM_TRACED = "x"', None, 'NUM_TRACED is a str'),
    ('NUM_TRACED = True', None, 'NUM_TRACED is a bool'),
    (
      'from eagle_jax.draft.peagle import PEagleConfig\nDRAFTER = PEagleConfig(9, 8, 1, 1, 8, 8, 8, mask_token_id=1)',
      None,
      'DRAFTER is a PEagleConfig; a DrafterConfig or ',
    ),
    ('VARIANTS = {"../x": {}}', '../x', "'../x'"),
    ('VARIANTS = 3', 'x', 'VARIANTS is 3'),
    ('VARIANTS = {"x": 3}', 'x', "{'x': 3}"),
    ('VARIANTS = {"x": {}}', 'y', "Unknown variant 'y'; the configuration has .'x'."),
  ],
)
def test_a_configuration_says_what_is_wrong_with_it(tmp_path, more, variant, message):
  path = configuration(tmp_path / 'own.py', more=more)
  with pytest.raises(ValueError, match=f'own.py(, line [0-9]+)?: .*{message}'):
    read_configuration(path, variant)


def test_an_error_of_a_configuration_is_one_line_that_names_its_line(tmp_path):
  path = configuration(tmp_path / 'own.py', more='RECIPE = Recipes(num_steps=1)')
  done = launch('train', f'--config={path}', f'--out={tmp_path / "run"}')
  assert done.returncode == 2
  *_, line = done.stderr.splitlines()
  assert line.startswith('error: ')
  assert f'{path}, line 9' in line
  assert 'Traceback' not in done.stderr
  assert [*tmp_path.iterdir()] == [tmp_path / 'own.py']


def test_a_variant_is_the_configuration_but_for_its_changes(tmp_path):
  path = configuration(tmp_path / 'own.py', more='VARIANTS = {"x": {"NUM_TRACED": 3}}')
  plain, variant = read_configuration(path), read_configuration(path, 'x')
  assert plain.keys() == {'TARGET', 'DRAFTER', 'DATA', 'RECIPE'}
  assert variant == {**plain, 'NUM_TRACED': 3}


def test_a_second_stage_is_the_configuration_but_for_the_places_it_trains_on(tmp_path):
  path = configuration(tmp_path / 'own.py')
  plain, second = read_configuration(path), read_configuration(path, second_stage=True)
  assert second == {**plain, 'RECIPE': dataclasses.replace(plain['RECIPE'], second_stage=True)}
  done = launch('train', f'--config={path}', f'--out={tmp_path / "run"}', '--second_stage')
  assert done.returncode == 2
  assert 'second_stage trains only at positions that decoding with the initial drafter reaches' in done.stderr


def test_a_dry_run_needs_the_target_s_configuration_alone(files, tmp_path):
  more = 'DATA["long"] = Data(num_shards=1, taps=(0,))'  # more than the drafter reads
  done = launch(
    'train',
    f'--config={configuration(tmp_path / "own.py", files[0].removeprefix("--target="), more=more)}',
    '--dry_run',
    '--json',
  )
  assert done.returncode == 0, done.stderr
  sizes = json.loads(done.stdout)
  # Features are stored: of the target there are embedding and head, and no layers.
  drafter_bytes = 4 * sum(x.size for x in jax.tree.leaves(Eagle(DRAFTER).init_params(jax.random.key(0))))
  batch_bytes = 2 * 32 * (6 * 4 + 2 * 32)
  assert sizes['stored_per_token'] == 2 * 32 * 2
  assert sizes['arguments'] == pytest.approx(3 * drafter_bytes + batch_bytes + 4 * (2 * 11 * 32 + 11), rel=0.01)


def test_a_target_without_tokenizer_refuses_text(files):
  done = launch('generate', *files, '--prompt=hello')
  assert done.returncode == 2
  assert 'no tokenizer' in done.stderr


def test_many_faults_are_one_line(files, tmp_path):
  shutil.copytree(files[1].removeprefix('--drafter='), tmp_path / 'drafter')
  path = tmp_path / 'drafter' / 'config.json'
  path.write_text(path.read_text(encoding='utf-8').replace('64', '48'), encoding='utf-8')
  done = launch('generate', files[0], f'--drafter={tmp_path / "drafter"}', '--prompt=hello')
  assert done.returncode == 2
  *_, line = done.stderr.splitlines()
  assert line.startswith('error: ')
  assert line.count('needed; ') >= 1


@pytest.mark.parametrize('name', ['bench', 'cost', 'compare'])
def test_questions_need_a_tokenizer(files, name, tmp_path):
  done = launch(name, *files, f'--out={tmp_path / "out"}')
  assert done.returncode == 2
  assert 'must have a tokenizer' in done.stderr
  assert not (tmp_path / 'out').exists()


@pytest.mark.parametrize(
  ('name', 'flags', 'complaint'),
  [
    ('cost', ['--draft_vocab_size=9'], '--draft_vocab_size needs --random_shape'),
    ('cost', ['--draft_vocab_size=513', '--random_shape=tiny'], 'vocab_size=512, or None for all ids, got 513'),
    ('cost', ['--random_shape=tiny', '--batch=1000000000'], 'cache of 1000000000 sequences'),
    ('cost', ['--random_shape=tiny', '--batch=100000000000000000000'], 'cache of 100000000000000000000 sequences'),
    ('convert', ['--drafter='], 'pass --drafter'),
  ],
)
def test_a_pair_that_cannot_be_had_is_refused(files, name, flags, complaint, tmp_path):
  done = launch(name, files[0], f'--out={tmp_path / "out"}', *flags)
  assert done.returncode == 2
  assert complaint in done.stderr


@pytest.fixture(scope='module')
def examined(byte_level_target, tmp_path_factory):
  """Return the flags of a short examination of the byte-level target, with a random head and one for another target."""
  folder = tmp_path_factory.mktemp('examined')
  (folder / 'short.jsonl').write_text(
    ''.join(json.dumps({'question_id': n, 'turns': [text]}) + '\n' for n, text in enumerate(('why', 'who', 'how')))
  )
  for name, vocab_size in (('random', 259), ('other', 11)):
    config = dataclasses.replace(DRAFTER, vocab_size=vocab_size)
    hub.save_drafter(Drafter(config, Eagle(config).init_params(jax.random.key(0))), folder / name)
  questions = [f'--questions={folder}', '--tasks=short', '--max_new_tokens=16', '--nospeed']
  return [f'--target={byte_level_target}', *questions], folder


@pytest.mark.slow
@pytest.mark.parametrize(('drafter', 'code', 'kinds'), [('random', 1, ['untrained']), ('ngram', 0, [])])
def test_the_doctor_s_exit_code_says_whether_something_is_wrong(examined, drafter, code, kinds):
  flags, folder = examined
  done = launch('doctor', *flags, f'--drafter={folder / drafter if drafter == "random" else drafter}', '--json')
  assert done.returncode == code, done.stderr
  report = json.loads(done.stdout)
  assert report['ok'] == (code == 0)
  assert [one['kind'] for one in report['findings']] == kinds
  assert all(one.keys() == {'kind', 'evidence', 'try'} for one in report['findings'])
  assert report['texts']['compared'] == 6
  assert report['speed'] is None


@pytest.mark.parametrize(('drafter', 'complaint'), [('', 'pass --drafter'), ('other', 'vocab_size 11 instead of 259')])
def test_the_doctor_refuses_what_is_no_pair(examined, drafter, complaint):
  flags, folder = examined
  done = launch('doctor', *flags, f'--drafter={drafter and folder / drafter}')
  assert done.returncode == 2
  *_, line = done.stderr.splitlines()
  assert line.startswith('error: ')
  assert complaint in line


def test_a_flag_that_would_be_ignored_is_refused():
  done = launch('cost', '--temperature=1')
  assert done.returncode == 1
  assert "Unknown command line flag 'temperature'" in done.stderr


@pytest.fixture
def interruptible():
  """A process in the background ignores interrupts, and so would its children."""
  before = signal.signal(signal.SIGINT, signal.default_int_handler)
  yield
  signal.signal(signal.SIGINT, before)


def test_an_interrupt_is_one_line_and_exit_code_130(interruptible, tmp_path):
  pipe = tmp_path / 'prompts'
  os.mkfifo(pipe)
  with started('generate', f'--batch_file={pipe}') as process, open(pipe, 'w', encoding='utf-8'):  # waits for a reader
    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate(timeout=600)
  assert (process.returncode, stderr) == (130, 'interrupted\n')


def test_a_reader_that_has_gone_is_no_error(files):
  with started('convert', *files) as process:
    process.stdout.close()
    stderr = process.stderr.read()
  assert process.returncode == 141
  assert 'error' not in stderr.lower()


@pytest.mark.parametrize(
  ('redirection', 'reason'), [('>&-', 'standard output is closed'), ('>/dev/full', 'No space left on device')]
)
def test_output_that_cannot_be_written_is_one_line_and_exit_code_2(files, redirection, reason):
  command = shlex.join([sys.executable, str(ROOT / 'launch' / 'convert.py'), *files])
  environment = os.environ | {'JAX_PLATFORMS': 'cpu'}
  done = subprocess.run(['sh', '-c', f'{command} {redirection}'], stderr=subprocess.PIPE, text=True, env=environment)
  assert done.returncode == 2
  *_, line = done.stderr.splitlines()
  assert line.startswith('error: ')
  assert reason in line
  assert 'Traceback' not in done.stderr
  assert 'Exception' not in done.stderr


def test_closed_standard_error_leaves_standard_output_alone(files):
  command = shlex.join([sys.executable, str(ROOT / 'launch' / 'convert.py'), *files, '--json'])
  environment = os.environ | {'JAX_PLATFORMS': 'cpu'}
  done = subprocess.run(['sh', '-c', f'{command} 2>&-'], stdout=subprocess.PIPE, text=True, env=environment)
  assert done.returncode == 0
  assert json.loads(done.stdout)['kind'] == 'EAGLE-1/2'


def test_a_character_that_a_terminal_lacks_is_escaped(files, tmp_path, monkeypatch):
  named = dataclasses.replace(DRAFTER, name='caf\u00e9')
  hub.save_drafter(Drafter(named, Eagle(named).init_params(jax.random.key(0))), tmp_path / 'drafter')
  monkeypatch.setenv('PYTHONIOENCODING', 'ascii')
  with started('convert', files[0], f'--drafter={tmp_path / "drafter"}') as process:
    stdout, stderr = process.communicate(timeout=600)
  assert process.returncode == 0, stderr
  assert 'drafter: caf\\xe9\n' in stdout
  assert 'parameters: ' in stdout


def test_a_prompt_that_is_not_unicode_is_one_line_and_exit_code_2(byte_level_target):
  done = launch('generate', f'--target={byte_level_target}', '--drafter=', '--prompt', os.fsdecode(b'caf\xe9 au lait'))
  assert done.returncode == 2, done.stderr
  *_, line = done.stderr.splitlines()
  assert line.startswith('error: ')
  assert 'au lait' in line
  assert 'Traceback' not in done.stderr


def test_a_full_disk_is_one_line_and_exit_code_2(files, tmp_path):
  flags = [*files, '--to=safeailab', f'--out={tmp_path / "out"}']
  command = shlex.join([sys.executable, str(ROOT / 'launch' / 'convert.py'), *flags])
  environment = os.environ | {'JAX_PLATFORMS': 'cpu', 'JAX_ENABLE_COMPILATION_CACHE': 'false'}
  done = subprocess.run(['sh', '-c', f'ulimit -f 8; {command}'], stderr=subprocess.PIPE, text=True, env=environment)
  assert done.returncode == 2, done.stderr
  *_, line = done.stderr.splitlines()
  assert line.startswith('error: ')
  assert str(tmp_path / 'out') in line


def test_help_explains_every_flag():
  done = launch('generate', '--help')
  every = 'target', 'drafter', 'policy', 'num_nodes', 'smaller', 'lookup', 'max_new_tokens', 'temperature'
  for flag in (*every, *options.NUMBERS):
    assert f'--{flag}:' in done.stdout or f'--[no]{flag}:' in done.stdout


def test_json_of_one_prompt_and_of_a_batch(byte_level_target, tmp_path):
  flags = [f'--target={byte_level_target}', '--drafter=', '--max_new_tokens=4', '--json']
  single = launch('generate', '--prompt=Say hello.', *flags)
  assert single.returncode == 0, single.stderr
  out = json.loads(single.stdout)
  assert set(out) == {'text', 'tokens', 'stats'}
  assert out['stats']['policy'] == 'plain'
  assert 'ing run_prefill' in single.stderr  # compiling or reading

  lines, text = tmp_path / 'prompts.jsonl', tmp_path / 'prompts.txt'
  lines.write_text('Name a colour.\n{"prompt": "Say hello."}\n', encoding='utf-8')
  text.write_text('Name a colour.\nSay hello.\n', encoding='utf-8')
  together = launch('generate', f'--batch_file={lines}', *flags)
  one_by_one = launch('generate', f'--batch_file={text}', '--batch_size=1', *flags)
  said = [[json.loads(line)['tokens'] for line in run.stdout.splitlines()] for run in (together, one_by_one)]
  assert len(said[0]) == 2, together.stderr
  assert said[0][1] == out['tokens']
  assert said[0] == said[1], one_by_one.stderr


@pytest.mark.real
def test_stream_prints_the_text_and_a_line_of_statistics(smollm2):
  flags = ['--drafter=', '--prompt=Say hello.', '--max_new_tokens=4', '--system=Be brief.', '--stop=\n\n']
  done = launch('generate', *flags)
  assert done.returncode == 0, done.stderr
  assert done.stdout.strip()
  assert 'tau 1.00' in done.stderr.splitlines()[-1]


@pytest.mark.parametrize(('is_terminal', 'no_colour'), [(True, False), (True, True), (False, False)])
def test_trees_are_coloured_on_a_terminal(monkeypatch, capsys, is_terminal, no_colour):
  monkeypatch.setattr(sys.stdout, 'isatty', lambda: is_terminal)
  monkeypatch.delenv('NO_COLOR', raising=False)
  if no_colour:
    monkeypatch.setenv('NO_COLOR', '')
  traces.show([A_CYCLE], None)
  printed = capsys.readouterr().out
  assert printed.startswith('pass 1 of 1, nodes: 5, new tokens: 3\n97\n')
  assert ('\033[' in printed) == (is_terminal and not no_colour)


def test_trees_are_printed_and_written(byte_level_target, tmp_path):
  flags = [f'--target={byte_level_target}', '--drafter=ngram', '--policy=chain', '--max_depth=2', '--max_new_tokens=12']
  done = launch('generate', *flags, '--prompt=</script>', '--show_tree', f'--trace_html={tmp_path / "page.html"}')
  assert done.returncode == 0, done.stderr
  num_tokens, num_passes = map(int, re.search(r'(\d+) new tokens in (\d+) target', done.stderr).groups())
  passes = re.findall(r'^pass \d+ of (\d+), nodes: \d+, new tokens: (\d+)$', done.stdout, re.MULTILINE)
  assert [int(of) for of, _ in passes] == [num_passes] * num_passes
  assert sum(int(num) for _, num in passes) + 1 == num_tokens  # one is the prefill's
  assert done.stdout.count('(bonus') == num_passes
  assert '\\u003c/script>' in (tmp_path / 'page.html').read_text(encoding='utf-8')


@pytest.mark.slow
def test_convert(files, tmp_path):
  out = tmp_path / 'sglang'
  run = launch(
    'convert', *files, '--dtype=bfloat16', '--drafter_dtype=float32', '--to=sglang', f'--out={out}', '--json'
  )
  assert run.returncode == 0, run.stderr
  report = json.loads(run.stdout)
  assert (report['kind'], report['layout'], report['draft_vocabulary']) == ('EAGLE-1/2', 'sglang', 11)
  back = launch('convert', files[0], f'--drafter={out}', '--json')
  assert json.loads(back.stdout)['parameters'] == report['parameters']
  again = launch('convert', *files, '--to=sglang', f'--out={out}')
  assert again.returncode == 2
  assert '--out must be empty' in again.stderr
