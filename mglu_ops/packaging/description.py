"""JSON from a file that anyone may have written: read strictly, and compared with rules that name the field.

`csrc/library/json.cpp` and `csrc/library/package_description.cpp` are the same in C++, with the same words.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any

from .archive import PackageError, quoted

DEEPEST = 8
"""The most lists and objects inside each other. A description has four."""

_TOKEN = re.compile(r'"(?:[^"\\]|\\.?)*(?:"|\Z)|[\[{]|[\]}]', re.DOTALL)
"""A string, which may lack its end so that each character is looked at once, or a bracket."""


class _NoInteger:
    """A number that is no 64-bit integer."""


def parse(text: bytes, what: str) -> Any:
    """The value of a JSON text in UTF-8.

    Raises:
        PackageError: `what` is not valid JSON, is nested deeper than `DEEPEST`, or has an object with a name twice.
    """
    twice: list[str] = []

    def unique(entries: list[tuple[str, Any]]) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for name, value in entries:
            if name in found:
                twice.append(name)
            found[name] = value
        return found

    try:
        decoded = text.decode()
        if _depth(decoded) > DEEPEST:
            raise ValueError
        value = json.loads(
            decoded, object_pairs_hook=unique, parse_int=_integer, parse_float=_no_integer, parse_constant=_no_integer
        )
    except ValueError:
        raise PackageError(f"{what} is not valid JSON, or is nested more than {DEEPEST} deep") from None
    if twice:
        raise PackageError(f"{what}: {quoted(twice[0])} is there twice")
    return value


def _depth(text: str) -> int:
    depth = deepest = 0
    for token in _TOKEN.finditer(text):
        depth += {"[": 1, "{": 1, "]": -1, "}": -1}.get(token[0], 0)
        deepest = max(deepest, depth)
    return deepest


def _integer(digits: str) -> int | _NoInteger:
    value = int(digits) if len(digits) <= 20 else 1 << 63
    return value if -(1 << 63) <= value < 1 << 63 else _NoInteger()


def _no_integer(_: str) -> _NoInteger:
    return _NoInteger()


def _described(value: Any) -> str:
    """A value of JSON for a message."""
    if isinstance(value, str):
        return quoted(value)
    if isinstance(value, _NoInteger):
        return "a number that is no 64-bit integer"
    if isinstance(value, (list, dict)):
        return "a list" if isinstance(value, list) else "an object"
    return json.dumps(value)


# --- Rules ----------------------------------------------------------------------------------------------------------

Rule = Callable[[str, Any], None]
"""`rule(field, value)` raises a `PackageError` with the name of the field if the value breaks the rule."""


def _refuse(field: str, value: Any, must_be: str) -> None:
    raise PackageError(f"{field}: got {_described(value)}, must be {must_be}")


def string(field: str, value: Any) -> None:
    if not isinstance(value, str):
        _refuse(field, value, "text")


def text(field: str, value: Any) -> None:
    """Text without control characters and without halves of surrogate pairs, so that it can be printed."""
    if not isinstance(value, str) or re.search("[\x00-\x1f\x7f\ud800-\udfff]", value):
        _refuse(field, value, "printable text")


def boolean(field: str, value: Any) -> None:
    if not isinstance(value, bool):
        _refuse(field, value, "true or false")


def size(field: str, value: Any) -> None:
    if type(value) is not int or value < 0:
        _refuse(field, value, "an integer of at least 0")


def size_or_range(field: str, value: Any) -> None:
    """A size, or `[lowest, highest or null, expression]`."""
    (items(size, optional(size), text) if isinstance(value, list) else size)(field, value)


def one_of(*allowed: str) -> Rule:
    def rule(field: str, value: Any) -> None:
        if not isinstance(value, str) or value not in allowed:
            _refuse(field, value, f"one of {', '.join(allowed)}")

    return rule


def integer(low: int, high: int) -> Rule:
    def rule(field: str, value: Any) -> None:
        if type(value) is not int or not low <= value <= high:
            _refuse(field, value, f"an integer from {low} to {high}")

    return rule


def equal(wanted: int, otherwise: str) -> Rule:
    """This integer; the message for any other ends with what to do."""

    def rule(field: str, value: Any) -> None:
        if type(value) is not int or value != wanted:
            _refuse(field, value, f"{wanted}; {otherwise}")

    return rule


def optional(rule: Rule) -> Rule:
    """null, or what the rule allows."""
    return lambda field, value: None if value is None else rule(field, value)


def list_of(rule: Rule) -> Rule:
    def of_list(field: str, value: Any) -> None:
        if not isinstance(value, list):
            _refuse(field, value, "a list")
        for index, item in enumerate(value):
            rule(f"{field}[{index}]", item)

    return of_list


def items(*rules: Rule) -> Rule:
    """A list with one item for each rule."""

    def rule(field: str, value: Any) -> None:
        if not isinstance(value, list) or len(value) != len(rules):
            _refuse(field, value, f"a list of {len(rules)}")
        for index, (item, of_item) in enumerate(zip(value, rules, strict=True)):
            of_item(f"{field}[{index}]", item)

    return rule


def entries(rules: Mapping[str, Rule], prefix: str = ".") -> Rule:
    """An object that has the entries of the rules and no other. `prefix` joins its field and the name of an entry."""

    def rule(field: str, value: Any) -> None:
        if not isinstance(value, dict):
            _refuse(field, value, "an object")
        for name, of_entry in rules.items():
            if name not in value:
                raise PackageError(f"{field}{prefix}{name}: is missing")
            of_entry(f"{field}{prefix}{name}", value[name])
        for name in value:
            if name not in rules:
                raise PackageError(f"{field}: {quoted(name)} is unknown to this version of mglu_ops")

    return rule


def object_of(rule: Rule) -> Rule:
    """An object with any entries, each of which follows the rule."""

    def of_object(field: str, value: Any) -> None:
        if not isinstance(value, dict):
            _refuse(field, value, "an object")
        for name, entry in value.items():
            rule(f"{field}: {quoted(name)}", entry)

    return of_object
