"""A tree of SGLang, its release, and the patch series for it: applied or taken back as a whole."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from sglang_sparse.patches import diff
from sglang_sparse.patches.diff import FilePatch, PatchError

# In a checkout of SGLang, the package is in this folder; the paths in patches begin with it.
SOURCE = "python/"
State = Literal["pristine", "patched"]


def find_package(tree: Path) -> Path:
    """The folder `sglang` of `tree`: a checkout, an unpacked wheel, site-packages, or the package itself."""
    for package in (tree / "python" / "sglang", tree / "sglang", tree):
        if (package / "srt" / "server_args.py").is_file():
            return package
    raise PatchError(f"--tree {tree} holds no SGLang: name a checkout, an unpacked wheel or site-packages")


def release_of(package: Path) -> str | None:
    """The release that the tree says it is, such as 0.5.17; None if it does not say, or is between two releases."""
    versions = []
    generated = package / "_version.py"
    if generated.is_file():
        versions = re.findall(r"^__version__ = .*?'([^']+)'", generated.read_text(errors="replace"), re.MULTILINE)
    versions = versions or [folder.name.split("-")[1] for folder in package.parent.glob("sglang-*.dist-info")]
    if len(versions) != 1 or ".dev" in versions[0]:
        return None
    return versions[0].split("+")[0]


def series_folder() -> Path:
    """Where the patches are: beside the package in a checkout of this project, else where its wheel put them."""
    checkout = Path(__file__).resolve().parents[2] / "patches"
    installed = Path(sysconfig.get_path("data")) / "share" / "sglang-sparse" / "patches"
    for folder in (checkout, installed):
        if any(folder.glob("sglang-*/*.patch")):
            return folder
    raise PatchError(f"there are no patches in {checkout} or {installed}: run from a checkout of sglang-sparse")


def read_series(release: str) -> list[FilePatch]:
    """The patches for `release`, in order; PatchError if there are none."""
    folder = series_folder()
    files = sorted((folder / f"sglang-{release}").glob("*.patch"))
    if not files:
        known = sorted(found.name.removeprefix("sglang-") for found in folder.glob("sglang-*") if found.is_dir())
        raise PatchError(f"there are no patches for SGLang {release}: there are some for {', '.join(known)}")
    return [patch for file in files for patch in diff.parse(file.read_text(encoding="utf-8"), file.name)]


@contextlib.contextmanager
def _uninterrupted() -> Iterator[None]:
    """Makes signals that end a process wait, so that they do not leave a tree half patched."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


class Tree:
    """One tree and the series for its release.

    Args:
        tree: see `find_package`.
        release: the release, where the tree does not say it.

    Raises:
        PatchError: if there is no SGLang, it is of another release than `release`, or there are no patches for it.
    """

    def __init__(self, tree: Path, release: str | None = None) -> None:
        self.package = find_package(tree)
        found = release_of(self.package)
        if found is None and release is None:
            raise PatchError(f"{self.package} does not say which release it is: add --release, such as 0.5.17")
        if found is not None and release is not None and found != release:
            raise PatchError(f"{self.package} is SGLang {found}, not {release}: remove --release {release}")
        self.release = found or release or ""
        self.series = read_series(self.release)
        self.texts = {patch.path: self._read(patch.path) for patch in self.series}

    def state(self) -> State:
        """Whether the series is applied; PatchError if it is neither applied as a whole nor can be."""
        with contextlib.suppress(PatchError):
            diff.apply_all(diff.reverse(self.series), self.texts)
            return "patched"
        try:
            diff.apply_all(self.series, self.texts)
        except PatchError as error:
            raise PatchError(
                f"{self.package} is neither SGLang {self.release} nor that with all patches ({error}): "
                "revert them with the sglang_sparse that applied them, apply these by hand, or "
                "start from an unchanged tree"
            ) from None
        return "pristine"

    def change(self, wanted: State) -> bool:
        """Brings the tree into the state `wanted`, as a whole or not at all; returns whether that changed anything."""
        if self.state() == wanted:
            return False
        patches = self.series if wanted == "patched" else diff.reverse(self.series)
        texts = diff.apply_all(patches, self.texts)
        with _uninterrupted():
            self._write(texts)
        return True

    def _path(self, path: str) -> Path:
        return self.package.parent / path.removeprefix(SOURCE)

    def _read(self, path: str) -> str | None:
        try:
            with self._path(path).open(encoding="utf-8", newline="") as file:
                return file.read()
        except FileNotFoundError:
            return None
        except (OSError, UnicodeDecodeError) as error:
            raise PatchError(f"{self._path(path)} cannot be read ({error})") from None

    def _write(self, texts: dict[str, str | None]) -> None:
        """Writes all files beside the old ones first, then puts them in place; takes everything back on an error."""
        staged: dict[Path, Path | None] = {}
        done: list[str] = []
        try:
            for path, text in texts.items():
                target = self._path(path)
                staged[target] = self._stage(target, text)
            for path in texts:
                self._replace(self._path(path), staged[self._path(path)])
                done.append(path)
        except BaseException as error:
            for path in done:
                self._replace(self._path(path), self._stage(self._path(path), self.texts[path]))
            if not isinstance(error, OSError):
                raise
            name = error.filename or self.package
            raise PatchError(f"{name} cannot be written ({error.strerror}): nothing was changed") from None
        finally:
            for temporary in staged.values():
                if temporary is not None:
                    temporary.unlink(missing_ok=True)

    @staticmethod
    def _stage(target: Path, text: str | None) -> Path | None:
        """A file beside `target` with `text` and the mode of `target`; None for no text."""
        if text is None:
            return None
        temporary = target.with_name(f".{target.name}.{os.getpid()}.tmp")
        try:
            with temporary.open("w", encoding="utf-8", newline="") as file:
                file.write(text)
            if target.exists():
                shutil.copymode(target, temporary)
        except OSError:
            temporary.unlink(missing_ok=True)
            raise
        return temporary

    @staticmethod
    def _replace(target: Path, staged: Path | None) -> None:
        if staged is None:
            target.unlink(missing_ok=True)
        else:
            os.replace(staged, target)
