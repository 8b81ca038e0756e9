"""`slipstream completion`: print a shell completion script for commands, options and recipe names."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Iterator

from slipstream.cli.parser import Parser, build_parser
from slipstream.recipes import recipes

__all__ = ["run"]

_BASH = """\
_slipstream() {
  local word=${COMP_WORDS[COMP_CWORD]} words
  if [ "$COMP_CWORD" -eq 1 ]; then words=%(commands)s; else
    case ${COMP_WORDS[1]} in
%(cases)s
    esac
  fi
  COMPREPLY=($(compgen -W "$words" -- "$word"))
}
complete -o default -F _slipstream slipstream
"""


def run(args: argparse.Namespace) -> int:
    """Print the script. It contains the installed version's commands, so completion does not need to start Python."""
    commands = dict(build_parser()[1].choices)
    if args.shell == "fish":
        print("\n".join(_fish(commands)))
        return 0
    cases = "\n".join(
        f"    {name}) words={shlex.quote(' '.join(_words(each)))} ;;" for name, each in commands.items()
    )
    script = _BASH % {"commands": shlex.quote(" ".join([*commands, "--help", "--version"])), "cases": cases}
    prefix = "autoload -U +X bashcompinit && bashcompinit\n" if args.shell == "zsh" else ""
    print(prefix + script, end="")
    return 0


def _words(parser: Parser) -> list[str]:
    """Return a command's options and, if it accepts a recipe, the recipe names. The shell completes file names."""
    return [*parser.options(), *(recipes() if parser.takes_recipe else ())]


def _fish(commands: dict[str, Parser]) -> Iterator[str]:
    yield f"complete -c slipstream -n __fish_use_subcommand -f -a {shlex.quote(' '.join(commands))}"
    yield "complete -c slipstream -n __fish_use_subcommand -l version -d 'show the versions and exit'"
    for name, parser in commands.items():
        condition = f"complete -c slipstream -n '__fish_seen_subcommand_from {name}'"
        for option, purpose in parser.options().items():
            yield f"{condition} -l {option.removeprefix('--')} -d {shlex.quote(purpose.replace('%%', '%'))}"
        if parser.takes_recipe:
            yield f"{condition} -a {shlex.quote(' '.join(recipes()))}"
