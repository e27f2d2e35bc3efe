"""From a command line to a Config: hydra composes the recipe, and every refusal names its option."""

import dataclasses
import difflib
import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_origin, get_type_hints

import yaml
from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException, OverrideParseException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import ConfigAttributeError, ConfigKeyError, OmegaConfBaseException

from colo.config import Config

RECIPES = Path(__file__).resolve().parent.parent / "recipes"
FIRST_LINE = "defaults: [base, _self_]"
OPEN_MAPS = ("engine.vllm.", "engine.speculative.")
"""Maps that take any key, with hydra's `+` or without."""
FLAGS = {"--config-name": "name", "-cn": "name", "--config-dir": "folder", "-cd": "folder"}
KINDS = {
    int: "an integer",
    float: "a number",
    bool: "true or false",
    str: "a string",
    list: "a list of strings",
    dict: "a map",
}

ConfigStore.instance().store(name="schema", node=Config)


def load_config(arguments: list[str]) -> Config:
    """Read a recipe and its overrides, as hydra does, into plain dataclasses; write nothing.

    Args:
        arguments: `--config-name RECIPE` (or a path to a YAML file), `--config-dir FOLDER` (default: recipes/, whose
            base is found from anywhere), and overrides `a.b=value`. New keys of engine.vllm need no `+`.

    Raises:
        ValueError: anything that is wrong with them; the first line names the option, the limit and the value.
    """
    name, folder, overrides = _parse(arguments)
    parsed = [_parse_override(text) for text in overrides]
    try:
        composed = _compose(name, folder, parsed)
        missing = sorted(OmegaConf.missing_keys(composed))
        if missing:
            raise ValueError(
                f"{missing[0]} must be set, got nothing" + (f"; nor {', '.join(missing[1:])}" if missing[1:] else "")
            )
        config = OmegaConf.to_object(composed)
    except (HydraException, OmegaConfBaseException, yaml.YAMLError) as error:
        raise ValueError(_explain(error, name, folder, parsed)) from None
    assert isinstance(config, Config), "the schema is the first thing that a recipe merges with"
    return config


def config_hash(config: Config) -> str:
    """A digest of every option's value: ranks that were started alike have the same one."""
    return hashlib.sha256(json.dumps(dataclasses.asdict(config), sort_keys=True).encode()).hexdigest()


def to_yaml(config: Config) -> str:
    """Every option with its value, as a recipe that `load_config` reads back to the same Config."""
    return f"{FIRST_LINE}\n" + yaml.safe_dump(_escaped(dataclasses.asdict(config)), sort_keys=False, allow_unicode=True)


def recipe_names(folder: Path = RECIPES) -> list[str]:
    """The recipes of a folder; base is what they start from and no recipe."""
    return sorted(path.stem for path in folder.glob("*.yaml") if path.stem != "base")


def _parse(arguments: list[str]) -> tuple[str, Path, list[str]]:
    given: dict[str, str] = {}
    overrides = []
    rest = iter(arguments)
    for argument in rest:
        flag, equals, value = argument.partition("=")
        if flag in FLAGS:
            value = value if equals else next(rest, "")
            if not value:
                raise ValueError(f"{flag} must be followed by a value, got nothing")
            given[FLAGS[flag]] = value
        elif argument in ("-m", "--multirun"):
            raise ValueError(f"{argument} must be left out, got {argument}: one launch is one run")
        elif argument.startswith("-"):
            raise ValueError(f"{flag} is not an option{_did_you_mean(flag, list(FLAGS))}, got {argument!r}")
        else:
            overrides.append(argument)
    folder = Path(given.get("folder", RECIPES)).resolve()
    if not folder.is_dir():
        raise ValueError(f"--config-dir must be a folder that exists, got {given['folder']!r}")
    name = given.get("name", "")
    if name.endswith(".yaml") and Path(name).is_file():
        folder, name = Path(name).resolve().parent, Path(name).stem
    name = name.removesuffix(".yaml")
    if not (folder / f"{name}.yaml").is_file() or name == "base":
        known = ", ".join(recipe_names(folder)) or "nothing"
        raise ValueError(
            f"--config-name must be a recipe of {folder} ({known}), got {repr(name) if name else 'nothing'}"
        )
    return name, folder, overrides


def _parse_override(text: str) -> Override:
    """One override; `+` and `++` say nothing here, since the schema knows every option."""
    try:
        (override,) = OverridesParser.create().parse_overrides([text.lstrip("+")])
    except OverrideParseException as error:
        raise ValueError(f"an override must be option=value, got {text!r}\n{error}") from None
    option = override.key_or_group
    if override.is_delete():
        raise ValueError(f"{option} must be given a value, got {text!r}")
    if override.is_sweep_override():
        raise ValueError(f"{option} must be one value (a list is written [a,b]), got {text.partition('=')[2]}")
    if option.split(".")[0].split("/")[0] == "hydra":
        raise ValueError(f"{option} is not an option, got {override.value()!r}: hydra writes nothing here")
    return override


def _compose(name: str, folder: Path, overrides: list[Override]) -> DictConfig:
    lines = [f"hydra.searchpath=['file://{RECIPES}']"]
    for override in overrides:
        prefix = "++" if override.key_or_group.startswith(OPEN_MAPS) else ""
        lines.append(f"{prefix}{override.input_line}")
    with initialize_config_dir(config_dir=str(folder), version_base="1.3"):
        composed = compose(config_name=name, overrides=lines)
    if OmegaConf.get_type(composed) is not Config:
        raise ValueError(f"{folder / name}.yaml must start with {FIRST_LINE!r}, got a file without it")
    return composed


def _explain(error: Exception, name: str, folder: Path, overrides: list[Override]) -> str:
    """What hydra or OmegaConf found wrong, in one line that names option, limit and value; then its own words."""
    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark is not None:
        mark = error.problem_mark
        return f"{mark.name} must be YAML, got line {mark.line + 1}, column {mark.column + 1}: {error.problem}"
    source = next((e for e in _chain(error) if isinstance(e, OmegaConfBaseException)), None)
    if source is None:
        return f"{folder / name}.yaml must compose, got {str(error).splitlines()[0]}\n{error}"
    given = _given(name, folder, overrides)
    option = source.full_key or _section_that_is_no_map(given)
    value = given.get(option, next((v for key, v in given.items() if key.startswith(f"{option}.")), "nothing"))
    if isinstance(source, (ConfigKeyError, ConfigAttributeError)):
        if option not in given:  # hydra stops at the first part of a dotted name that is unknown
            option = next((key for key in given if key.startswith(f"{option}.")), option)
        return f"{option} is not an option{_did_you_mean(option, list(_options(Config)))}, got {value!r}"
    if source.full_key and option not in _options(Config):
        return f"{option} must be a value that resolves, got {value!r}\n{source}"
    kind = _options(Config).get(option)
    limit = KINDS.get(kind, "a map of options") if kind is not None else "a value of its own type"
    if isinstance(value, str) and "${" in value:
        limit = "a value that resolves"
    return f"{option} must be {limit}, got {value!r}\n{source}"


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _given(name: str, folder: Path, overrides: list[Override]) -> dict[str, Any]:
    """Dotted option to value, as the recipe and then the command line spell them; sections too."""
    given = _given_by_recipe(name, folder)
    for override in overrides:
        given |= _flat({override.key_or_group: override.value()}, "")
    return given


def _given_by_recipe(name: str, folder: Path) -> dict[str, Any]:
    path = next((f / f"{name}.yaml" for f in (folder, RECIPES) if (f / f"{name}.yaml").is_file()), None)
    if path is None:  # the schema, which is no file
        return {}
    tree = OmegaConf.to_container(OmegaConf.load(path))
    assert isinstance(tree, dict), "hydra refuses another kind of file before"
    given: dict[str, Any] = {}
    for parent in tree.pop("defaults", []):
        given |= _given_by_recipe(parent, folder) if parent != "_self_" else {}
    return given | _flat(tree, "")


def _flat(tree: Any, prefix: str) -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in (tree or {}).items():
        flat[f"{prefix}{key}"] = value
        if isinstance(value, dict):
            flat |= _flat(value, f"{prefix}{key}.")
    return flat


def _section_that_is_no_map(given: dict[str, Any]) -> str:
    """OmegaConf does not say which section was given a plain value in a recipe."""
    sections = [name for name, kind in _options(Config).items() if dataclasses.is_dataclass(kind)]
    return next((name for name in sections if name in given and not isinstance(given[name], dict)), "a section")


def _options(section: type, prefix: str = "") -> dict[str, Any]:
    """Dotted option to its type; of list[str] and dict[str, Any] the outer one."""
    options: dict[str, Any] = {}
    for name, kind in get_type_hints(section).items():
        options[f"{prefix}{name}"] = get_origin(kind) or kind
        if dataclasses.is_dataclass(kind):
            options |= _options(kind, f"{prefix}{name}.")  # type: ignore[arg-type]
    return options


def _did_you_mean(option: str, known: list[str]) -> str:
    section, _, word = option.rpartition(".")
    same_section = [name for name in known if name.rpartition(".")[0] == section]
    same_word = [name for name in known if name.rpartition(".")[2] == word]
    close = (
        difflib.get_close_matches(option, same_section, 1, 0.75)
        or same_word
        or difflib.get_close_matches(option, known, 1, 0.75)
    )
    return f" (did you mean {close[0]}?)" if close else ""


def _escaped(value: Any) -> Any:
    """The same tree with `${` in strings kept from being read as an interpolation."""
    if isinstance(value, dict):
        return {key: _escaped(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_escaped(item) for item in value]
    return value.replace("${", "\\${") if isinstance(value, str) else value
