"""What options are made of: errors, flag names, and checks of single values."""

from __future__ import annotations

import json
from typing import Any

FLAG = "--sparse-decode"

LARGEST = 2**31 - 1
"""Token counts beyond this overflow the kernels' int32; no option is larger."""


class OptionsError(ValueError):
    """An option is wrong. The message is one line that names the flag or field and says what to do."""


class UnsupportedError(OptionsError):
    """Sparse decode does not work with what was asked for. One line: what, and what to use instead."""


def flag(name: str) -> str:
    """The command-line flag of the option `name`."""
    return f"{FLAG}-{name.replace('_', '-')}"


def check_choice(name: str, value: Any, allowed: tuple) -> None:
    """Raises OptionsError unless an option is one of the values `allowed`, of the same type."""
    # 4.0 equals 4, but is no size of anything.
    if not any(type(value) is type(choice) and value == choice for choice in allowed):
        raise OptionsError(f"{flag(name)} is {value!r}: choose one of {', '.join(map(str, allowed))}")


def check_int(name: str, value: Any, minimum: int) -> None:
    """Raises OptionsError unless an option is a whole number of at least `minimum`."""
    if not isinstance(value, int) or isinstance(value, bool) or not minimum <= value <= LARGEST:
        raise OptionsError(f"{flag(name)} is {value!r}: give a whole number from {minimum} to {LARGEST}")


def check_number(name: str, value: Any) -> None:
    """Raises OptionsError unless an option is a finite number."""
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not -LARGEST <= value <= LARGEST:
        raise OptionsError(f"{flag(name)} is {value!r}: give a number")


def layer_numbers(value: Any) -> tuple[int, ...]:
    """Layer indices from a sequence of ints or a text such as `0,1,30-31`."""
    problem = OptionsError(f"{flag('dense_layers')} is {value!r}: give layer numbers such as 0,1 or 0-3")
    if isinstance(value, str):
        parts: list[int] = []
        for item in filter(None, (part.strip() for part in value.split(","))):
            first, dash, last = item.partition("-")
            numbers = (first, last) if dash else (first, first)
            if not all(number.isdecimal() and len(number) < 6 for number in numbers) or int(numbers[1]) < int(first):
                raise problem
            parts.extend(range(int(first), int(last or first) + 1))
        value = parts
    if not isinstance(value, (list, tuple)) or any(
        not isinstance(v, int) or isinstance(v, bool) or v < 0 for v in value
    ):
        raise problem
    return tuple(sorted(set(value)))


def parse_json(text: str, source: str) -> dict:
    """A JSON object without repeated keys; raises OptionsError, which names `source`, if `text` is none."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        values: dict[str, Any] = {}
        for key, value in pairs:
            if key in values:
                raise OptionsError(f"{source}: key {key[:60]!r} is given twice")
            values[key] = value
        return values

    try:
        values = json.loads(text, object_pairs_hook=unique)
    except OptionsError:
        raise
    # Besides JSONDecodeError: an integer of more digits than Python converts.
    except (ValueError, RecursionError) as error:
        raise OptionsError(f"{source}: not valid JSON ({error})") from None
    if not isinstance(values, dict):
        raise OptionsError(f'{source}: give a JSON object such as {{"gamma": 0.95}}')
    return values


GIB = 1 << 30


def parse_memory(text: str, flag_name: str, whole: int, of: str) -> int:
    """Bytes of a flag's value: `96`, `96GiB` or `0.5GiB` are GiB, a bare number below 1 is a share of `whole` bytes.

    Raises OptionsError if it is neither; `of` names the whole.
    """
    given = text.strip().lower()
    number = given.removesuffix("gib").removesuffix("g").strip()
    try:
        value = float(number)
    except ValueError:
        value = -1.0
    if not 0 <= value < 2**30:
        raise OptionsError(f"{flag_name} is {text!r}: give GiB, such as 96, or a share of {of} below 1, such as 0.8")
    return int(value * whole) if value < 1 and number == given else int(value * GIB)
