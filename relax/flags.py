"""From a TOML file and command-line flags to a Config: flag over TOML over default.

Every fault of a file or command line is reported at once, one line each.
"""

from __future__ import annotations

import argparse
import difflib
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, get_args

from pydantic import TypeAdapter, ValidationError
from pydantic.fields import FieldInfo

from relax.config import Allocation, Config, flag_of, section_of, sections, value_of
from relax.errors import ConfigError


def nearest(word: str, words: Iterable[str]) -> str:
    """`; did you mean X?` for the nearest of `words`, or nothing."""
    known = list(words)
    spelled = {known_word.lower(): known_word for known_word in known}
    close = difflib.get_close_matches(word.lower(), spelled, n=1, cutoff=0.6)
    return f"; did you mean {spelled[close[0]]}?" if close else ""


def load_config(path: str | Path | None, overrides: Mapping[str, Any] | None = None) -> Config:
    """Config of a TOML file (None: defaults) with `overrides` (field name -> value) on top.

    Values of overrides may be strings, as flags are; they are converted by the field's type.
    Raises ConfigError with one line per fault.
    """
    tree, faults = _read_toml(path)
    owner, faulty = section_of(), set[str]()
    for name, value in (overrides or {}).items():
        if name not in owner:
            faults.append(f"{flag_of(name)}: no such setting{nearest(name, owner)}")
            continue
        converted, found = _convert(name, value)
        faults += found
        if found:
            faulty.add(name)
        else:
            tree.setdefault(owner[name], {})[name] = converted
    config, found = _validated(tree, faulty, str(path) if path else "settings")
    if config is None or faults:
        raise ConfigError("\n".join([*faults, *found]))
    return config


def _validated(
    tree: dict[str, Any], faulty: set[str], source: str
) -> tuple[Config | None, list[str]]:
    """The configuration, None where the tree has faults; a line for each.

    Settings may be wrong by themselves, and together with others. What is wrong is taken out until
    the rest is sound, and what does not fit a setting that is out (`faulty`) is not told.
    """
    lines: list[str] = []
    while True:
        try:
            config = Config.model_validate(tree, context={"faulty": faulty})
            return (None if lines else config), lines
        except ValidationError as error:
            places = [fault["loc"] for fault in error.errors()]
            lines += _lines(error.errors(), source)
        if () in places:  # the rules for the whole come last
            return None, lines
        for section, *rest in places:
            owner = str(section)
            for name in map(str, rest[:1] or sections()[owner].model_fields):
                faulty.add(name)
                tree[owner].pop(name, None)


def require(config: Config, *names: str) -> None:
    """Raise ConfigError with one line for each setting in `names` that is empty."""
    owner = section_of()
    missing = [n for n in names if not value_of(config, n)]
    if missing:
        raise ConfigError(
            "\n".join(
                f"{owner[n]}.{n}: not set; give {flag_of(n)} or [{owner[n]}] {n} in the TOML file"
                for n in missing
            )
        )


def _read_toml(path: str | Path | None) -> tuple[dict[str, Any], list[str]]:
    """The file's tree and what is wrong with its keys (unknown ones are taken out)."""
    if path is None:
        return {}, []
    try:
        tree = tomllib.loads(Path(path).read_text())
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file; give the path of a TOML configuration") from None
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: not TOML: {error}") from None
    faults = []
    for name in list(tree):
        cls = sections().get(name)
        if cls is None:
            hint = _section_hint(name)
            faults.append(f"{path}: [{name}]: no such section{hint}")
            del tree[name]
        elif not isinstance(tree[name], dict):
            faults.append(f"{path}: {name} = {tree[name]!r}: {name} is a section: write [{name}]")
            del tree[name]
        else:
            for key in [k for k in tree[name] if k not in cls.model_fields]:
                faults.append(f"{path}: {name}.{key}: no such key{_key_hint(key, name)}")
                del tree[name][key]
    return tree, faults


def _section_hint(name: str) -> str:
    owner = section_of()
    if name in owner:
        return f"; it is a key of [{owner[name]}]"
    return nearest(name, sections())


def _key_hint(key: str, section: str) -> str:
    owner = section_of()
    if key in owner:
        return f"; it belongs in [{owner[key]}]"
    return nearest(key, sections()[section].model_fields) or nearest(key, owner)


def _convert(name: str, value: Any) -> tuple[Any, list[str]]:
    """A flag's text as the field's type, or the lines that say why not."""
    section = section_of()[name]
    try:
        return _adapter(sections()[section].model_fields[name]).validate_python(value), []
    except ValidationError as error:
        found = error.errors()
    for fault in found:
        fault["loc"] = (section, name, *fault["loc"])
    if any(len(_place(fault)) > 2 for fault in found):
        return None, list(_lines(found, flag_of(name)))
    return None, [f"{flag_of(name)} = {value!r}: {' or '.join(map(_reason, found))}"]


def _adapter(field: FieldInfo) -> TypeAdapter:
    """The field's type with its bounds, outside its strict section."""
    bare: Any = field.annotation
    for bound in field.metadata:
        if type(bound).__name__ != "Strict":
            bare = Annotated[bare, bound]
    return TypeAdapter(bare)


def _reason(fault: Mapping[str, Any]) -> str:
    text = str(fault["msg"]).removeprefix("Value error, ")
    return text[0].lower() + text[1:]


def _place(fault: Mapping[str, Any]) -> tuple[str, ...]:
    """Section and key, and further keys in a table [slurm.allocations.NAME]."""
    place = tuple(map(str, fault["loc"]))
    if place[1:2] != ("allocations",):
        return place[:2]
    return place[: 5 if place[3:4] == ("extra",) else 4]


def _lines(faults: Iterable[Mapping[str, Any]], source: str) -> Iterable[str]:
    """One line a faulty field, the alternatives of a union joined, and one a broken rule."""
    grouped: dict[str, list[Mapping[str, Any]]] = {}
    for fault in faults:
        if fault["type"] == "extra_forbidden":  # in an allocation: of sections they are out
            hint = nearest(str(fault["loc"][-1]), Allocation.model_fields)
            yield f"{source}: {'.'.join(_place(fault))}: no such key{hint}"
        elif len(fault["loc"]) < 2:
            yield from (f"{source}: {line}" for line in _reason(fault).splitlines())
        else:
            grouped.setdefault(".".join(_place(fault)), []).append(fault)
    for where, found in grouped.items():
        reason = " or ".join(map(_reason, found))
        yield f"{source}: {where} = {found[0]['input']!r}: {reason}"


# --- flags -------------------------------------------------------------------------------------


class _Parser(argparse.ArgumentParser):
    """argparse whose errors are ConfigErrors, so that all messages leave by one door."""

    def error(self, message: str) -> Any:
        raise ConfigError(f"{message}; see {self.prog} --help")


def command_parser(prog: str, description: str, examples: str) -> argparse.ArgumentParser:
    """A parser for a command that asks about runs; its help ends in examples."""
    return _Parser(
        prog=prog,
        description=description,
        epilog=examples,
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )


def build_parser(prog: str, description: str, example: str = "") -> argparse.ArgumentParser:
    """A parser with one flag for each field, grouped by section, helped by the field's doc."""
    parser = _Parser(
        prog=prog,
        usage=f"{prog} [CONFIG.toml] [--setting value ...]",
        description=description,
        epilog=example and f"example: {example}",
        allow_abbrev=False,
        argument_default=argparse.SUPPRESS,
        formatter_class=lambda prog: argparse.HelpFormatter(prog, max_help_position=34, width=100),
    )
    parser.add_argument("config", nargs="?", default=None, help="TOML file (see recipes/)")
    for name, cls in sections().items():
        group = parser.add_argument_group(f"[{name}]", (cls.__doc__ or "").strip())
        for field_name, field in cls.model_fields.items():
            _add_flag(group, field_name, field)
    return parser


def _add_flag(group: argparse._ArgumentGroup, name: str, field: FieldInfo) -> None:
    text = f"{field.description} [{_shown(field.default)}]".replace("%", "%%")
    if field.annotation is bool:
        group.add_argument(
            flag_of(name), dest=name, action=argparse.BooleanOptionalAction, help=text
        )
    elif isinstance(field.default, tuple):
        group.add_argument(flag_of(name), dest=name, nargs="*", metavar="X", help=text)
    else:
        group.add_argument(flag_of(name), dest=name, metavar=_metavar(field), help=text)


def _shown(default: Any) -> str:
    if default is None or default in ("", ()):
        return "unset"
    return str(default)


def _metavar(field: FieldInfo) -> str:
    choices = [c for c in get_args(field.annotation) if isinstance(c, str)]
    return "{" + ",".join(choices) + "}" if choices else "X"


def parse_flags(parser: argparse.ArgumentParser, argv: Sequence[str]) -> argparse.Namespace:
    """The known flags of `argv`; an unknown one is a ConfigError naming the nearest."""
    known, unknown = parser.parse_known_args(argv)
    if unknown:
        flags = [flag for action in parser._actions for flag in action.option_strings]
        raise ConfigError("\n".join(_unknown(unknown, flags)))
    return known


ALIASES = {
    "--learning-rate": "--lr",
    "--model": "--hf-checkpoint",
    "--algorithm": "--advantage-estimator",
}
"""Names that other programs have for a flag."""


def _unknown(words: Sequence[str], flags: Sequence[str]) -> Iterable[str]:
    """A line for each unknown flag, not for the value after it; words alone are not expected."""
    is_value = False
    for word in words:
        flag = word.split("=")[0]
        if word.startswith("--"):
            meant = ALIASES.get(flag)
            hint = f"; did you mean {meant}?" if meant in flags else nearest(flag, flags)
            yield f"{word}: no such flag{hint}"
        elif not is_value:
            yield f"{word}: not expected here"
        is_value = word.startswith("--") and "=" not in word


def overrides_of(known: argparse.Namespace) -> dict[str, Any]:
    """The settings among parsed flags."""
    owner = section_of()
    return {name: value for name, value in vars(known).items() if name in owner}
