"""Unified diffs: parsing, applying where lines have moved, taking back, and what does not fit."""

from __future__ import annotations

import pytest

from sglang_sparse.patches import diff
from sglang_sparse.patches.diff import PatchError

PATCH = """\
From 0 Mon Sep 17 00:00:00 2001
Subject: [PATCH] Something
---
 2 files changed

diff --git a/python/a.py b/python/a.py
index 111..222 100644
--- a/python/a.py
+++ b/python/a.py
@@ -1,3 +1,4 @@
 one
+one and a half
 two
 three
@@ -7,3 +8,3 @@ class Seven:
 seven
-eight
+8
 nine
diff --git a/python/new.py b/python/new.py
new file mode 100644
--- /dev/null
+++ b/python/new.py
@@ -0,0 +1,2 @@
+first
+second
"""
WORDS = ("one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")
BEFORE = "".join(f"{word}\n" for word in WORDS)
AFTER = BEFORE.replace("one\n", "one\none and a half\n").replace("eight", "8")


def parsed() -> list[diff.FilePatch]:
    return diff.parse(PATCH, "0001-x.patch")


def test_apply_and_take_back() -> None:
    texts = {"python/a.py": BEFORE, "python/new.py": None}
    patched = diff.apply_all(parsed(), texts)
    assert patched == {"python/a.py": AFTER, "python/new.py": "first\nsecond\n"}
    assert diff.apply_all(diff.reverse(parsed()), patched) == texts


@pytest.mark.parametrize("lines_before", [1, 5, 40])
def test_hunks_follow_lines_that_moved(lines_before: int) -> None:
    moved = "# license\n" * lines_before + BEFORE.replace("five\n", "five\n" * 9)
    change = parsed()[0]
    patched = diff.apply(change, moved)
    assert patched == "# license\n" * lines_before + AFTER.replace("five\n", "five\n" * 9)
    assert diff.apply(change.reversed(), patched) == moved


def test_of_equal_places_the_nearest_is_taken() -> None:
    hunk = diff.Hunk(5, ("x\n",), ("y\n",))
    assert diff.apply(diff.FilePatch("a", (hunk,)), "x\n\n\nx\n\nx\n\n\n\n\nx\n") == "x\n\n\ny\n\nx\n\n\n\n\nx\n"


@pytest.mark.parametrize(
    ("index", "text", "named"),
    [
        (0, BEFORE.replace("eight", "acht"), "python/a.py: hunk 2 of 2 does not fit"),
        (0, AFTER, "python/a.py: hunk 1 of 2 does not fit"),
        (0, None, "python/a.py does not exist"),
        (1, "", "python/new.py exists, but the patch creates it"),
    ],
)
def test_what_does_not_fit(index: int, text: str | None, named: str) -> None:
    with pytest.raises(PatchError, match=named):
        diff.apply(parsed()[index], text)


def test_a_created_file_that_was_changed_is_not_deleted() -> None:
    with pytest.raises(PatchError, match="is not the file that the patch deletes"):
        diff.apply(parsed()[1].reversed(), "first\nsecond\nthird\n")


CUTS = ("@@", "+8,", "+8\n")


@pytest.mark.parametrize("text", ["", "Subject: nothing\n", *(PATCH[: PATCH.index(cut)] for cut in CUTS)])
def test_broken_patches(text: str) -> None:
    with pytest.raises(PatchError, match="0001-x"):
        diff.parse(text, "0001-x.patch")
