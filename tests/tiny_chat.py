"""A tokenizer so small that tokens and masks of a conversation are counted by hand."""

import dataclasses

from eagle_jax.train.conversations import Script, user


@dataclasses.dataclass(frozen=True)
class Toy:
  """A token a character. Template: a role's first letter, the text, the EOS '.', and a new line: 'Uhi.', 'Ayes.'."""

  has_chat_template: bool = True

  alphabet = '.\nUASabcdefghijklmnopqrstuvwxyz'  # ids in this order, so the EOS is 0; 5 and above are plain text
  essential_ids = (0, 1)

  def render(self, messages, add_generation_prompt):
    if any(' ' in message['content'] for message in messages):
      raise ValueError('the toy refuses blanks')
    turns = [f'{message["role"][0].upper()}{message["content"]}.\n' for message in messages]
    return ''.join(turns) + ('A' if add_generation_prompt else '')

  def encode(self, text):
    return [self.alphabet.index(letter) for letter in text]

  def encode_chat(self, messages, add_generation_prompt=True):
    return self.encode(self.render(messages, add_generation_prompt))

  def encode_prompt(self, text):
    return self.encode_chat([user(text)]) if self.has_chat_template else self.encode(text)

  def decode(self, ids):
    return ''.join(self.alphabet[i] for i in ids if i >= 5)


TOY, EOS = Toy(), (0,)


def spoken(script: Script) -> tuple[str, str]:
  """Return a script's text, and a line with '^' below each token that the assistant says."""
  return ''.join(TOY.alphabet[i] for i in script.token), ''.join('^' if own else ' ' for own in script.is_answer)
