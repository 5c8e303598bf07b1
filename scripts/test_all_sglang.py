"""Runs the CPU serving tests and those of the patches on the other SGLang releases: ``make test-all-sglang``.

    test_all_sglang.py [--release 0.5.23 ...] -- [pytest's arguments]

Each release has an environment of its own in build/sglang, made on the first run (see release_venv.py). Ends with a
line for each release, and with 1 if a test failed.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time

import release_venv
from setup_venv import ROOT, SetupError, has_cuda_device

RELEASES = ("0.5.20", "0.5.23")
# Other tests have nothing to do with the release.
TESTS = ("tests/server", "tests/patches")
VERSIONS = """
import platform
from importlib.metadata import version
names = ("torch", "transformers", "triton")
print(", ".join([f"Python {platform.python_version()}", *(f"{name} {version(name)}" for name in names)]))
"""


def run(release: str, arguments: list[str]) -> tuple[int, str]:
    """pytest's exit code on `release`, and one line that sums it up."""
    python = release_venv.make(release)
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    found = subprocess.run([python, "-c", VERSIONS], env=environment, capture_output=True, text=True, check=True).stdout
    title = f"SGLang {release} ({found.strip()})"
    print(f"== {title}", flush=True)
    start, shown = time.monotonic(), b""
    with subprocess.Popen(
        [python, "-m", "pytest", *TESTS, *arguments], cwd=ROOT, env=environment, stdout=subprocess.PIPE
    ) as tests:
        assert tests.stdout is not None
        # As it comes, not by line: a line of dots takes minutes.
        while part := os.read(tests.stdout.fileno(), 4096):
            os.write(sys.stdout.fileno(), part)
            shown = (shown + part)[-4096:]
    last = shown.decode(errors="replace").strip().splitlines()[-1:] or ["no output"]
    # pytest says how it went unless something else ended it.
    end = last[0].strip(" =") if 0 <= tests.returncode <= 5 else f"ended by signal or exit code {tests.returncode}"
    return tests.returncode, f"{title}: {end}, {time.monotonic() - start:.0f} s"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--release", action="append", choices=RELEASES, help="one of them; may be given again")
    parser.add_argument("arguments", nargs="*", metavar="PYTEST_ARGUMENT")
    given = parser.parse_args()
    try:
        if has_cuda_device():
            raise SetupError("make test-all-sglang tests servers without a GPU: run it on a host that has none")
        results = [run(release, given.arguments) for release in given.release or RELEASES]
    except SetupError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    print("\n".join(["", *(line for _, line in results)]))
    return int(any(code != 0 for code, _ in results))


if __name__ == "__main__":
    sys.exit(main())
