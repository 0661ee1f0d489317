"""A run's configuration from the command line and from a TOML file, and back."""

from __future__ import annotations

import argparse
import dataclasses
import json
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn, get_args, get_type_hints

from rich.table import Table
from rich.text import Text

from .config import TrainConfig

TYPES = {
    name: next(kind for kind in (*get_args(hint), hint) if kind is not type(None))
    for name, hint in get_type_hints(TrainConfig).items()
}


class _OneLineParser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ValueError(f"{message}; see --help")


def parse_arguments(arguments: Sequence[str]) -> TrainConfig:
    """Make the configuration from command-line arguments, over those of the file that `--config` names.

    Raises:
        ValueError: an argument or a key of the file is unknown, has the wrong type, or does not fit the others;
            or the file cannot be read. One line.
    """
    parser = _OneLineParser(
        prog="train_gpt.py",
        description="Train a byte-level GPT, started by torchrun if there are several ranks.",
        allow_abbrev=False,
    )
    parser.add_argument("--config", type=Path, help="TOML file of the values below, written with _ for -")
    for item in dataclasses.fields(TrainConfig):
        settings: dict[str, Any] = {"default": argparse.SUPPRESS}
        settings["help"] = item.metadata["help"].replace("%", "%%") + _default_text(item.default)
        if TYPES[item.name] is bool:
            settings["action"] = argparse.BooleanOptionalAction
        else:
            settings |= {"type": TYPES[item.name], "choices": item.metadata["choices"]}
        parser.add_argument("--" + item.name.replace("_", "-"), **settings)
    given = vars(parser.parse_args(arguments))
    file = given.pop("config")
    return TrainConfig(**(read_config(file) if file else {}) | given)


def _default_text(default: object) -> str:
    return "" if default in (None, "") else f" (default: {default})"


def read_config(path: Path) -> dict[str, Any]:
    """Read a configuration file.

    Raises:
        ValueError: it is missing, no TOML, has an unknown key or a value of the wrong type. One line.
    """
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"expected a readable file for --config but got {path} ({error})") from None
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"expected TOML in {path} but got: {error}") from None
    return typed(content, where=str(path))


def typed(content: Mapping[str, Any], *, where: str) -> dict[str, Any]:
    """Give values from a file the types of the configuration's fields.

    Raises:
        ValueError: a key is unknown, or a value has another type.
    """
    values = {}
    for key, value in content.items():
        if key not in TYPES:
            hint = "; write _ for -" if key.replace("-", "_") in TYPES else "; see --help for the names"
            raise ValueError(f"expected only names of flags in {where} but got {key!r}{hint}")
        kind = TYPES[key]
        stored: tuple[type, ...] = (str,) if kind is Path else (int, float) if kind is float else (kind,)
        if not isinstance(value, stored) or (isinstance(value, bool) and kind is not bool):
            raise ValueError(
                f"expected {key} in {where} to be of type {kind.__name__} but got {value!r} ({type(value).__name__})"
            )
        values[key] = kind(value)
    return values


def plain(config: TrainConfig) -> dict[str, Any]:
    """The configuration as values that TOML and JSON know, without what was left out."""
    values = {item.name: getattr(config, item.name) for item in dataclasses.fields(config)}
    return {
        name: str(value) if isinstance(value, Path) else value
        for name, value in values.items()
        if value is not None and name not in ("dry_run", "show_config")
    }


def to_toml(config: TrainConfig) -> str:
    """The configuration as a file for `--config`."""
    # JSON's strings, numbers and booleans are TOML's, too.
    return "".join(
        f"{name} = {json.dumps(value, ensure_ascii=False)}\n" for name, value in plain(config).items()
    )


def config_table(config: TrainConfig) -> Table | None:
    """The configuration for people: what differs from the defaults, if anything does, or all of it."""
    table = Table("flag", "value", "default")
    for item in dataclasses.fields(config):
        value = getattr(config, item.name)
        if config.show_config or value != item.default:
            table.add_row("--" + item.name.replace("_", "-"), _cell(value), _cell(item.default))
    return table if table.row_count else None


def _cell(value: object) -> Text:
    return Text("-" if value in (None, "") else str(value))
