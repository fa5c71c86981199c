"""What pages of the docs take from the code: options of the command line, keys of a job file.

Sphinx puts it in place of ``<!-- NAME -->`` (conf.py); ``python docs/reference.py`` prints it.
"""

from __future__ import annotations

import argparse
import importlib
import inspect
import re
from collections.abc import Callable, Iterator
from dataclasses import fields

from mpidist import data, models, optim
from mpidist.cli.main import COMMANDS
from mpidist.elasticity.elastic_settings import Elastic
from mpidist.training import job, strategies

#: Table of a job file -> what its ``name`` may be, and what makes each.
CHOICES = {
    "data": data.SOURCES,
    "model": models.MODELS,
    "optimizer": optim.OPTIMIZERS,
    "strategy": {name: strategies.maker(name) for name in strategies.STRATEGIES},
}
#: Keys of a table that belong to none of its choices.
COMMON = {"data": {"cache": ""}, "optimizer": {"clip_norm": ""}}
#: In place of a default: the key must be given.
NEEDED = "needed"


def parsers() -> Iterator[argparse.ArgumentParser]:
    """Yield the parser of every command, and after it those of its sub-commands."""
    commands = argparse.ArgumentParser(prog="mpidist").add_subparsers()
    for name in COMMANDS:
        importlib.import_module(f"mpidist.cli.{name}").add_parser(commands)
    for parser in commands.choices.values():
        yield from _within(parser)


def _within(parser: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    yield parser
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for inner in action.choices.values():
                yield from _within(inner)


def arguments(parser: argparse.ArgumentParser) -> list[argparse.Action]:
    """Return what a command takes besides ``--help`` and sub-commands."""
    other = argparse._HelpAction | argparse._SubParsersAction
    return [action for action in parser._actions if not isinstance(action, other)]


def summaries() -> dict[str, str]:
    """Return the one line that says what each command is for."""
    said = {f"mpidist {name}": text for name, text in COMMANDS.items()}
    for parser in parsers():
        for action in parser._actions:
            if isinstance(action, argparse._SubParsersAction):
                lines = {one.dest: one.help or "" for one in action._choices_actions}
                said |= {p.prog: lines.get(name, "") for name, p in action.choices.items()}
    return said


def command_line() -> str:
    """Return a section for each command: what it is for, and a table of what it takes."""
    said = summaries()
    lines = []
    for parser in parsers():
        level = "#" * len(parser.prog.split())
        lines += [f"{level} {parser.prog}", ""]
        if said[parser.prog]:
            lines += [f"{said[parser.prog][0].upper()}{said[parser.prog][1:]}.", ""]
        rows = [(_words(each), _default(each.default), each.help) for each in arguments(parser)]
        lines += _table(("argument", "default", "what"), rows)
    return "\n".join(lines)


def _words(action: argparse.Action) -> str:
    choices = f"{{{','.join(map(str, action.choices))}}}" if action.choices else ""
    value = action.metavar or choices or ("" if action.nargs == 0 else action.dest.upper())
    if not action.option_strings:
        return f"`{value}`"
    return ", ".join(f"`{option} {value}`".replace(" `", "`") for option in action.option_strings)


def _default(value) -> str:
    if value in (None, False, "", [], argparse.SUPPRESS):
        return ""
    return _code(" ".join(map(str, value)) if isinstance(value, list) else str(value))


def job_file() -> str:
    """Return the keys of a job file, then those of each table and choice."""
    said = descriptions(job.Job)
    defaults = {each.name: getattr(job.Job(), each.name) for each in fields(job.Job)}
    rows = [(f"`{key}`", _code(_toml(value)), said[key]) for key, value in defaults.items()]
    lines = ["## Keys", "", *_table(("key", "default", "what"), rows)]
    for table, choices in CHOICES.items():
        lines += [f"## [{table}]", ""]
        rows = [(f"`{name}`", _keys(settings(make))) for name, make in choices.items()]
        rows += [("any", _keys(COMMON[table]))] if table in COMMON else []
        lines += _table(("name", "keys, with their defaults"), rows)
        if table == "optimizer":
            lines += ["`lr` is a number, or a table with one of these as its `schedule`:", ""]
            schedules = {name: settings(make) for name, make in optim.SCHEDULES.items()}
            rows = [(f"`{name}`", _keys(given)) for name, given in schedules.items()]
            lines += _table(("schedule", "keys, with their defaults"), rows)
    for table, kind in {"loading": data.Loading, "elastic": Elastic}.items():
        rows = [(_keys(settings(kind)),)]
        lines += [f"## [{table}]", "", *_table(("keys, with their defaults",), rows)]
    return "\n".join(lines)


def settings(make: Callable) -> dict[str, str]:
    """Return the keys that a choice takes, each with its default as TOML; NEEDED where none is."""
    return {
        name: NEEDED if each.default is each.empty else _toml(each.default)
        for name, each in inspect.signature(make).parameters.items()
    }


def descriptions(kind: type) -> dict[str, str]:
    """Return what the section "Attributes" of a class says of each of them."""
    text = inspect.getdoc(kind) or ""
    found = {}
    section = text.partition("Attributes\n----------\n")[2]
    for names, words in re.findall(r"^(\w[\w, ]*)\n((?:[ ]+.*\n?)+)", section, re.MULTILINE):
        found |= {name: " ".join(words.split()) for name in names.split(", ")}
    return found


def _code(text: str) -> str:
    return f"`{text}`" if text else ""


def _toml(value) -> str:
    if value is None or value == "" or value == {}:
        return ""
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{key} = {_toml(each)}" for key, each in value.items()) + " }"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_toml, value))}]"
    if isinstance(value, bool | str):
        return str(value).lower() if isinstance(value, bool) else f'"{value}"'
    return str(value)


def _keys(given: dict[str, str]) -> str:
    """Return keys for a cell of a table; those that must be given are bold."""
    words = []
    for key, value in given.items():
        if value == NEEDED:
            words.append(f"**`{key}`**")
        else:
            words.append(f"`{key} = {value}`" if value else f"`{key}`")
    return ", ".join(words)


def _table(heads: tuple, rows: list[tuple]) -> list[str]:
    """Return a Markdown table and an empty line; nothing without rows."""
    if not rows:
        return []
    cells = [heads, ["---"] * len(heads), *rows]
    return [
        *(f"| {' | '.join(str(c).replace('|', chr(92) + '|') for c in r)} |" for r in cells),
        "",
    ]


#: What a page names in ``<!-- ... -->``.
GENERATED = {"command_line": command_line, "job_file": job_file}


def filled(text: str) -> str:
    """Return a page with what the code says in place of each mark."""
    for name, make in GENERATED.items():
        if f"<!-- {name} -->" in text:
            text = text.replace(f"<!-- {name} -->", make())
    return text


if __name__ == "__main__":
    print("\n".join(make() for make in GENERATED.values()))
