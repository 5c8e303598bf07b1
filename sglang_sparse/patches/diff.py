"""Unified diffs, applied to text: what `git apply` does with the patches of this project, without git."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

_HUNK = re.compile(r"@@ -(\d+)(?:,(\d+))? \+(\d+)(?:,(\d+))? @@")


class PatchError(Exception):
    """A patch cannot be read, or does not fit. One line: which file, and what to do."""


@dataclass(frozen=True)
class Hunk:
    """Lines `before` at about line `line` (from 1), to be replaced by `after`; all with their line ends."""

    line: int
    before: tuple[str, ...]
    after: tuple[str, ...]

    def reversed(self) -> Hunk:
        return Hunk(self.line, self.after, self.before)


@dataclass(frozen=True)
class FilePatch:
    """Changes of one file. A file that is created has no text before, one that is deleted none after."""

    path: str
    hunks: tuple[Hunk, ...]
    creates: bool = False
    deletes: bool = False

    def reversed(self) -> FilePatch:
        return FilePatch(self.path, tuple(hunk.reversed() for hunk in self.hunks), self.deletes, self.creates)


def parse(text: str, name: str) -> list[FilePatch]:
    """The file patches of one `git format-patch` file; PatchError, which names `name`, if it is not one."""
    patches: list[FilePatch] = []
    old = new = ""
    lines = text.splitlines(keepends=True)
    index = 0
    while index < len(lines):
        line = lines[index]
        index += 1
        if line.startswith("diff --git "):
            old = new = ""
        elif line.startswith("--- ") and index < len(lines) and lines[index].startswith("+++ "):
            old, new = line[4:].strip(), lines[index][4:].strip()
            index += 1
            path = (old if new == "/dev/null" else new).partition("/")[2]
            patches.append(FilePatch(path, (), creates=old == "/dev/null", deletes=new == "/dev/null"))
        elif new and line.startswith("@@"):
            found = _HUNK.match(line)
            if found is None:
                raise PatchError(f"{name} ends inside a hunk: get the patches of this project anew")
            hunk, index = _hunk(lines, index, found, name)
            last = patches[-1]
            patches[-1] = FilePatch(last.path, (*last.hunks, hunk), last.creates, last.deletes)
    if not patches or any(not patch.hunks for patch in patches):
        raise PatchError(f"{name} is not a patch of text files: get the patches of this project anew")
    return patches


def _hunk(lines: list[str], index: int, found: re.Match[str], name: str) -> tuple[Hunk, int]:
    """The hunk whose header is `found`, and the index of the line after it."""
    left, right = int(found[2] or 1), int(found[4] or 1)
    before: list[str] = []
    after: list[str] = []
    while left > 0 or right > 0:
        line = lines[index] if index < len(lines) else ""
        kind, text = line[:1], line[1:]
        if kind not in (" ", "-", "+"):
            raise PatchError(f"{name} ends inside a hunk: get the patches of this project anew")
        if kind in " -":
            before.append(text)
            left -= 1
        if kind in " +":
            after.append(text)
            right -= 1
        index += 1
    return Hunk(int(found[1]), tuple(before), tuple(after)), index


def apply(patch: FilePatch, text: str | None) -> str | None:
    """`text` of the file with `patch` applied; None stands for no file.

    A hunk may have moved: it goes where its lines are, nearest to where it was. Raises PatchError if they are nowhere.
    """
    if patch.creates:
        if text is not None:
            raise PatchError(f"{patch.path} exists, but the patch creates it")
        return "".join(patch.hunks[0].after)
    if text is None:
        raise PatchError(f"{patch.path} does not exist")
    lines = text.splitlines(keepends=True)
    if patch.deletes:
        if lines != list(patch.hunks[0].before):
            raise PatchError(f"{patch.path} is not the file that the patch deletes")
        return None
    moved = 0
    for number, hunk in enumerate(patch.hunks, 1):
        at = _nearest(lines, list(hunk.before), hunk.line - 1 + moved)
        if at is None:
            raise PatchError(f"{patch.path}: hunk {number} of {len(patch.hunks)} does not fit")
        lines[at : at + len(hunk.before)] = hunk.after
        moved = at - (hunk.line - 1) + len(hunk.after) - len(hunk.before)
    return "".join(lines)


def _nearest(lines: list[str], wanted: list[str], expected: int) -> int | None:
    """Index of the place nearest to `expected` where `lines` has `wanted`."""
    places = [at for at in range(len(lines) - len(wanted) + 1) if lines[at : at + len(wanted)] == wanted]
    return min(places, key=lambda at: abs(at - expected), default=None)


def apply_all(patches: list[FilePatch], texts: Mapping[str, str | None]) -> dict[str, str | None]:
    """The texts of all patched files after `patches`, in order; `texts` has those before. Raises PatchError."""
    result = dict(texts)
    for patch in patches:
        result[patch.path] = apply(patch, result[patch.path])
    return result


def reverse(patches: list[FilePatch]) -> list[FilePatch]:
    """Patches that undo `patches`."""
    return [patch.reversed() for patch in reversed(patches)]
