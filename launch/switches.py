"""A flag that is a switch and may be given one more value: `--lookup`, `--nolookup`, `--lookup=route`."""

from absl import flags


class _Parser(flags.ArgumentParser):
  def __init__(self, other: str):
    self.other = other

  def parse(self, argument):
    try:
      return argument if argument == self.other else flags.BooleanParser().parse(argument)
    except ValueError:
      raise ValueError(f'true, false or {self.other} is needed') from None


def DEFINE_switch(name: str, other: str, text: str) -> None:
  """Define the flag, None by default, which `other` may be given to instead of true and false."""
  flags.DEFINE_flag(flags.Flag(_Parser(other), None, name, None, text, boolean=True))
