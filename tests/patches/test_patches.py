"""`python -m sglang_sparse.patches` on pristine trees of both releases."""

from __future__ import annotations

import ast
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from sglang_sparse import hook_targets
from sglang_sparse.patches import __main__ as command
from sglang_sparse.patches.tree import Tree

POINTS = "sglang/srt/sparse_decode_points.py"
TARGETS = {target for targets in hook_targets.by_group().values() for target in targets}


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> Any:
    """The command: returns its exit code, and what it said."""

    def call(action: str, folder: Path, *more: str) -> tuple[int, str]:
        monkeypatch.setattr(sys, "argv", ["patches", action, "--tree", str(folder), *more])
        code = command.main()
        shown = capsys.readouterr()
        said: str = shown.out + shown.err
        assert said.count("\n") == 1, said
        return code, said

    return call


def contents(tree: Path) -> dict[Path, bytes]:
    """What the patches may touch, and what lies beside it."""
    folders = {(tree / file).parent for file in files_of_series(tree)}
    return {file: file.read_bytes() for folder in folders for file in folder.iterdir() if file.is_file()}


def files_of_series(tree: Path) -> list[str]:
    return [path.removeprefix("python/") for path in Tree(tree).texts]


def marked_functions(tree: Path) -> set[str]:
    """Dotted paths of all functions in the patched files that are points."""
    found = set()
    for path in files_of_series(tree):
        module = path.removesuffix(".py").replace("/", ".")
        nodes = [(module, node) for node in ast.parse((tree / path).read_text()).body]
        while nodes:
            owner, node = nodes.pop()
            if isinstance(node, ast.ClassDef):
                nodes += [(f"{owner}.{node.name}", inner) for inner in node.body]
            # The last decorator: below classmethod and staticmethod, which do not give functions.
            elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and "sparse_decode_point" in map(
                ast.unparse, node.decorator_list[-1:]
            ):
                found.add(f"{owner}.{node.name}")
    return found


def test_apply_check_revert(pristine: tuple[str, Path], tree: Path, run: Any) -> None:
    release, original = pristine
    before = contents(tree)
    assert run("check", tree) == (0, f"SGLang {release} in {tree}/sglang is not patched; the patches fit\n")
    assert run("revert", tree) == (0, f"SGLang {release} in {tree}/sglang is not patched: nothing to do\n")
    assert contents(tree) == before

    assert run("apply", tree)[0] == 0
    patched = contents(tree)
    assert {file for file in patched if patched[file] != before.get(file)} == {
        tree / file for file in files_of_series(tree)
    }
    assert f'SGLANG_RELEASE = "{release}"' in (tree / POINTS).read_text()
    assert marked_functions(tree) == TARGETS
    assert run("check", tree) == (0, f"SGLang {release} in {tree}/sglang is patched\n")
    assert run("apply", tree) == (0, f"SGLang {release} in {tree}/sglang is patched already: nothing to do\n")
    assert contents(tree) == patched
    # The other tree's files were the same ones.
    assert "sparse_decode" not in (original / "sglang/srt/server_args.py").read_text()
    assert not (original / POINTS).exists()

    assert run("revert", tree)[0] == 0
    assert contents(tree) == before


def test_the_series_are_small(tree: Path) -> None:
    series = Tree(tree).series
    added = sum(len(hunk.after) - len(hunk.before) for patch in series for hunk in patch.hunks)
    removed = [line for patch in series for hunk in patch.hunks for line in hunk.before if line not in hunk.after]
    assert added < 60
    assert not removed


def test_layouts_and_moved_lines(tree: Path, run: Any) -> None:
    checkout = tree.parent / "checkout"
    (checkout / "python").mkdir(parents=True)
    (tree / "sglang").rename(checkout / "python" / "sglang")
    arguments = checkout / "python" / "sglang" / "srt" / "server_args.py"
    text = "# A fork's own lines.\n" * 50 + arguments.read_text()
    arguments.unlink()
    arguments.write_text(text)
    assert run("apply", checkout)[0] == 0
    assert run("check", checkout / "python")[1].endswith("is patched\n")
    assert run("revert", checkout / "python" / "sglang")[0] == 0
    assert arguments.read_text() == text


@pytest.mark.parametrize("action", ["apply", "check", "revert"])
def test_trees_that_do_not_fit_stay_as_they_are(tree: Path, run: Any, action: str) -> None:
    path = files_of_series(tree)[-1]
    changed = tree / path
    text = changed.read_text().replace("sglang.srt.", "fork.srt.")
    changed.unlink()
    changed.write_text(text)
    before = contents(tree)
    code, said = run(action, tree)
    assert code == 1
    assert f"python/{path}: hunk 1 of " in said
    assert contents(tree) == before


def test_half_a_series_is_refused(tree: Path, run: Any) -> None:
    assert run("apply", tree)[0] == 0
    (tree / POINTS).unlink()
    before = contents(tree)
    for action in ("apply", "check", "revert"):
        code, said = run(action, tree)
        assert code == 1
        assert "neither" in said
        assert "revert them with the sglang_sparse that applied them" in said
    assert contents(tree) == before


def test_an_error_while_writing_changes_nothing(tree: Path, run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    replace, calls = os.replace, []

    def failing(source: Path, target: Path) -> None:
        calls.append(target)
        if len(calls) == 4:
            raise OSError(28, "No space left on device", str(target))
        replace(source, target)

    before = contents(tree)
    monkeypatch.setattr(os, "replace", failing)
    code, said = run("apply", tree)
    assert code == 1
    assert "No space left on device): nothing was changed" in said
    assert len(calls) > 4
    assert contents(tree) == before


def test_a_file_that_is_a_link_leaves_what_it_links_to(tree: Path, run: Any) -> None:
    """Some installers link into a cache that environments share."""
    link = tree / "sglang" / "srt" / "server_args.py"
    target = tree.parent / "cached.py"
    target.write_bytes(link.read_bytes())
    target.chmod(0o444)
    link.unlink()
    link.symlink_to(target)
    before = target.read_bytes()
    assert run("apply", tree)[0] == 0
    assert target.read_bytes() == before != link.read_bytes()
    assert link.stat().st_mode & 0o777 == 0o444
    assert run("revert", tree)[0] == 0
    assert link.read_bytes() == before


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_while_writing_waits(tree: Path, number: int) -> None:
    before = contents(tree)
    # The signal comes before the third of thirteen files is put in place; by default it ends the process.
    code = f"""if True:
        import os, signal, sys
        from sglang_sparse.patches import __main__
        signal.signal({int(number)}, signal.SIG_DFL)
        replace, calls = os.replace, []
        def interrupted(source, target):
            calls.append(target)
            if len(calls) == 3:
                os.kill(os.getpid(), {int(number)})
            replace(source, target)
        os.replace = interrupted
        sys.exit(__main__.main())
    """
    command = [sys.executable, "-c", code, "apply", "--tree", str(tree)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == -number, result.stderr
    assert Tree(tree).state() == "patched"
    assert set(contents(tree)) == {*before, tree / POINTS}


def test_another_error_while_writing_changes_nothing(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    replace, calls = os.replace, []

    def failing(source: Path, target: Path) -> None:
        calls.append(target)
        if len(calls) == 4:
            raise KeyboardInterrupt
        replace(source, target)

    before = contents(tree)
    monkeypatch.setattr(os, "replace", failing)
    with pytest.raises(KeyboardInterrupt):
        Tree(tree).change("patched")
    assert contents(tree) == before


def test_what_cannot_be_read_is_one_line(tree: Path, run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    (tree / "sglang" / "_version.py").unlink()
    (tree / "sglang" / "_version.py").write_bytes(b"\xff\xfe")
    assert "add --release" in run("check", tree)[1]

    def denied(path: Path, **_: Any) -> bool:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "is_file", denied)
    code, said = run("check", tree)
    assert code == 1
    assert "Permission denied" in said


def with_version(tree: Path, version: str | None) -> Path:
    """The tree, saying that it is `version`, or nothing."""
    file = tree / "sglang" / "_version.py"
    file.unlink()
    if version is not None:
        file.write_text(f"__version__ = version = '{version}'\n")
    return tree


def test_other_releases_are_refused(pristine: tuple[str, Path], tree: Path, run: Any) -> None:
    release = pristine[0]
    for version in ("0.5.20", f"{release}.post1", "0.6.0rc1"):
        code, said = run("apply", with_version(tree, version))
        assert code == 1
        assert f"there are no patches for SGLang {version}: there are some for 0.5.17, 0.5.23" in said
    code, said = run("apply", with_version(tree, "0.5.20"), "--release", release)
    assert code == 1
    assert f"is SGLang 0.5.20, not {release}" in said
    assert not (tree / POINTS).exists()
    assert run("apply", with_version(tree, f"{release}+ourfork"))[0] == 0


@pytest.mark.parametrize("version", [None, "0.5.24.dev7+g1234567"])
def test_a_tree_between_releases_needs_to_be_told(
    pristine: tuple[str, Path], tree: Path, run: Any, version: str | None
) -> None:
    code, said = run("apply", with_version(tree, version))
    assert code == 1
    assert "add --release" in said
    assert run("apply", tree, "--release", pristine[0])[0] == 0
    shutil.rmtree(tree / "sglang" / "srt" / "mem_cache")
    assert run("check", tree, "--release", pristine[0])[0] == 1


def test_folders_without_sglang(tmp_path: Path, run: Any) -> None:
    for folder in (tmp_path, tmp_path / "missing"):
        code, said = run("apply", folder)
        assert code == 1
        assert said == (
            f"sglang-sparse: error: --tree {folder} holds no SGLang: "
            "name a checkout, an unpacked wheel or site-packages\n"
        )
