"""Writes the patch series for an SGLang release anew: after the plugin's hook targets change, or for a new release.

    make_patches.py WHEEL

WHEEL is the release's wheel (`pip download --no-deps sglang==0.5.23`). Every hook target of the plugin becomes a point:
a decorated function. The series replaces that in patches/sglang-<release>. Needs git.
"""

from __future__ import annotations

import argparse
import ast
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from sglang_sparse import hook_targets  # noqa: E402
from sglang_sparse import sglang_compat as compat  # noqa: E402

# Patches are for a checkout of SGLang, which keeps the package in this folder.
SOURCE = Path("python")
POINT = "sparse_decode_point"
IMPORT = f"from {compat.POINTS_MODULE} import {POINT}\n"
POINTS = '''"""Where sparse decode takes part in this SGLang: the functions marked with `sparse_decode_point`.

sglang_sparse's plugin does nothing where this module exists. Without sglang_sparse the functions are what they were.
"""

SGLANG_RELEASE = "{release}"

try:
    from sglang_sparse.fork import sparse_decode_point as sparse_decode_point
except ModuleNotFoundError as error:
    if error.name != "sglang_sparse":
        raise

    def sparse_decode_point(function):
        return function
'''
STEPS = (
    (
        "Add the flags of sparse decode",
        "--sparse-decode and its options, where sglang_sparse is installed; the\nplugin then does nothing.",
        [
            target
            for name, targets in hook_targets.by_group().items()
            for target in targets
            if name != "SCHEDULER_TARGETS"
        ],
    ),
    (
        "Call sparse decode in the scheduler process",
        "It builds the decode backend, takes its memory out of the KV budget,\nreports, and allocates pages on a CPU.",
        hook_targets.SCHEDULER_TARGETS,
    ),
)
# The same input gives the same bytes.
IDENTITY = {
    f"GIT_{role}_{what}": value
    for role in ("AUTHOR", "COMMITTER")
    for what, value in (("NAME", "sglang-sparse"), ("EMAIL", "sglang-sparse@localhost"), ("DATE", "2026-11-30T00:00Z"))
}


def find(package: Path, target: str) -> tuple[Path, list[str]]:
    """The file of `target` below `package`, the folder that holds `sglang`, and the names inside the module."""
    parts = target.split(".")
    for count in range(len(parts) - 1, 0, -1):
        file = package.joinpath(*parts[:count]).with_suffix(".py")
        if file.is_file():
            return file, parts[count:]
    raise SystemExit(f"error: this SGLang has no module of {target}")


def mark(file: Path, names: list[str]) -> None:
    """Puts the decorator on the function `names` and its import among SGLang's own."""
    text = file.read_text()
    body: list[ast.stmt] = ast.parse(text).body
    imports = [
        node for node in body if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("sglang.srt")
    ]
    found: ast.stmt | None = None
    for name in names:
        found = next((node for node in body if getattr(node, "name", None) == name), None)
        if found is None:
            raise SystemExit(f"error: {file} has no {'.'.join(names)}")
        body = getattr(found, "body", [])
    assert isinstance(found, (ast.FunctionDef, ast.AsyncFunctionDef))
    lines = text.splitlines(keepends=True)
    lines.insert(found.lineno - 1, f"{' ' * found.col_offset}@{POINT}\n")
    if IMPORT not in lines:
        before = [node for node in imports if str(node.module) < compat.POINTS_MODULE]
        lines.insert((before or imports)[-1].end_lineno or 0, IMPORT)
    file.write_text("".join(lines))


def write_series(wheel: Path) -> Path:
    """Writes the series for the release in `wheel` and returns its folder."""
    release = wheel.name.split("-")[1]
    folder = ROOT / "patches" / f"sglang-{release}"
    with tempfile.TemporaryDirectory() as temporary:
        work = Path(temporary)

        def git(*arguments: str) -> None:
            command = ["git", "-c", "init.defaultBranch=main", "-c", "core.autocrlf=false", *arguments]
            environment = {**os.environ, **IDENTITY, "GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_NOSYSTEM": "1"}
            subprocess.run(command, cwd=work, env=environment, check=True, stdout=subprocess.DEVNULL)

        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(
                work / SOURCE,
                [name for name in archive.namelist() if name.startswith("sglang/") and name.endswith(".py")],
            )
        git("init", "--quiet")
        git("add", "--all", "--force")
        git("commit", "--quiet", "--no-gpg-sign", "--message", release)
        for number, (subject, reason, targets) in enumerate(STEPS):
            if number == 0:
                points = work.joinpath(SOURCE, *compat.POINTS_MODULE.split(".")).with_suffix(".py")
                points.write_text(POINTS.format(release=release))
            for target in targets:
                mark(*find(work / SOURCE, target))
            git("add", "--all", "--force")
            git("commit", "--quiet", "--no-gpg-sign", "--message", subject, "--message", reason)
        git("format-patch", "--quiet", "--zero-commit", "--no-signature", f"-{len(STEPS)}", "--output-directory", "out")
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(work / "out", folder)
    return folder


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("wheel", type=Path)
    print(write_series(parser.parse_args().wheel))
    return 0


if __name__ == "__main__":
    sys.exit(main())
