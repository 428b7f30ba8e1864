"""A user's mistake in one line: the key, its value, what is accepted."""

import difflib
from typing import Any

from pydantic import BaseModel, ValidationError


class ConfigError(ValueError):
    """A user's mistake, told in one line."""


def explain(error: ValidationError, config: type[BaseModel]) -> str:
    """All that pydantic found wrong, in one line."""
    return "; ".join(_one(detail, config) for detail in error.errors())


def _one(detail: Any, config: type[BaseModel]) -> str:
    path, kind = [str(part) for part in detail["loc"]], detail["type"]
    known = known_keys(config, member=path[1] if path[:1] == ["data"] and len(path) > 2 else None)
    if path[:1] == ["data"] and len(path) > 2:
        del path[1]  # pydantic adds the name of the union's member
    key = ".".join(path)
    if kind == "extra_forbidden":
        return f"{key}={detail['input']!r}: unknown key{suggest(key, known)}"
    if kind == "missing":
        return f"{key}: missing"
    if kind == "union_tag_invalid":
        return f"data.name={detail['ctx']['tag']!r}: accepted: {detail['ctx']['expected_tags']}"
    message = detail["msg"].removeprefix("Value error, ")
    if kind == "value_error" and key not in known:  # a rule between keys, which names them itself
        return message
    nullable = ", or null for none" if kind != "value_error" and key in _nullable(config) else ""
    return f"{key}={detail['input']!r}: {message[0].lower()}{message[1:]}{nullable}"


def suggest(key: str, known: list[str]) -> str:
    """'; did you mean ...?' for a misspelt key, else the keys that its section accepts."""
    close = [k for k in difflib.get_close_matches(key, known, 2, cutoff=0.75) if k != key]
    if close:
        return f"; did you mean {close[0]}?"
    section = key.rpartition(".")[0]
    return f"; accepted: {', '.join(k for k in known if k.rpartition('.')[0] == section) or ', '.join(known)}"


def known_keys(config: type[BaseModel], prefix: str = "", member: str | None = None) -> list[str]:
    """Every dotted key that a config has; of a section with several forms, those of the named `member` only."""
    found = []
    for name, field in config.model_fields.items():
        sections = [s for s in _sections(field.annotation) if member is None or _form(s) in {None, member}]
        found += [k for s in sections for k in known_keys(s, f"{prefix}{name}.", member)] or [prefix + name]
    return list(dict.fromkeys(found))


def _sections(annotation: Any) -> list[type[BaseModel]]:
    members = getattr(annotation, "__args__", None) or (annotation,)
    return [m for m in members if isinstance(m, type) and issubclass(m, BaseModel)]


def _form(section: type[BaseModel]) -> str | None:
    """The value of `name` that tells this form of a section from its others (data=text, data=markov)."""
    name = section.model_fields.get("name")
    values = getattr(name.annotation, "__args__", ()) if name else ()
    return values[0] if len(values) == 1 else None


def _nullable(config: type[BaseModel], prefix: str = "") -> set[str]:
    found: set[str] = set()
    for name, field in config.model_fields.items():
        for section in _sections(field.annotation):
            found |= _nullable(section, f"{prefix}{name}.")
        if type(None) in (getattr(field.annotation, "__args__", None) or ()):
            found.add(prefix + name)
    return found
