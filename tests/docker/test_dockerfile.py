"""The Dockerfile and its scripts: lint, every step a script, nothing run as root, nothing copied that is not there."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from monitoring import ROOT

DOCKER = ROOT / "docker"
SCRIPTS = sorted(DOCKER.glob("*.sh"))


def instructions() -> list[tuple[str, str]]:
    """The Dockerfile's instructions and their arguments, continued lines joined, comments dropped."""
    lines = [line for line in (DOCKER / "Dockerfile").read_text().splitlines() if not line.lstrip().startswith("#")]
    text = re.sub(r"\\\n\s*", " ", "\n".join(lines))
    return [(word, rest.strip()) for word, _, rest in (line.partition(" ") for line in text.splitlines() if line)]


def arguments(word: str) -> list[str]:
    return [rest for found, rest in instructions() if found == word]


def tool(name: str) -> str:
    """A linter that pip installs beside the interpreter, or one on PATH."""
    beside = Path(sys.executable).parent / name
    found = str(beside) if beside.exists() else shutil.which(name)
    if found is None:
        pytest.skip(f"{name} is not installed: pip install 'sglang-sparse[dev]'")
    return found


def run(*command: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(list(map(str, command)), capture_output=True, text=True, check=False)


def test_hadolint_finds_nothing() -> None:
    result = run(tool("hadolint"), "--no-color", DOCKER / "Dockerfile")
    assert (result.returncode, result.stdout) == (0, ""), result.stdout + result.stderr


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_shellcheck_finds_nothing(script: Path) -> None:
    result = run(tool("shellcheck"), script)
    assert result.returncode == 0, result.stdout + result.stderr


def test_every_step_is_a_script_of_the_repository() -> None:
    steps = arguments("RUN")
    assert steps
    for step in steps:
        found = re.fullmatch(r"/(?:build|opt)/docker/(\w+\.sh)( [\w/]+)*", step)
        assert found, f"RUN {step}"
        script = DOCKER / found[1]
        assert script in SCRIPTS
        assert script.stat().st_mode & 0o111, f"{script} is not executable"


def test_what_is_copied_is_there_and_in_the_build_context() -> None:
    allowed = {
        line[1:] for line in (DOCKER / "Dockerfile.dockerignore").read_text().splitlines() if line.startswith("!")
    }
    sources = [source for rest in arguments("COPY") if "--from" not in rest for source in rest.split()[:-1]]
    assert "pyproject.toml" in sources
    for source in sources:
        assert (ROOT / source).exists(), source
        assert source.split("/")[0] in allowed, f"{source} is not in the build context"


def test_all_that_the_project_is_built_from_is_copied() -> None:
    settings = (ROOT / "pyproject.toml").read_text()
    tool = settings[settings.index("[tool.setuptools]") : settings.index("[tool.pytest")]
    paths = {path.split("/")[0] for path in re.findall(r'"([^"]*)"', tool)}
    needed = {path for path in paths if path.strip(".*") and (ROOT / path).exists()} | {"README.md", "LICENSE"}
    assert {"kernels", "patches"} < needed
    copied = {source for rest in arguments("COPY") for source in rest.split()[:-1]}
    assert needed - {"."} <= copied, f"{needed - copied} is not in the image"


def test_the_server_is_not_root_and_is_checked() -> None:
    last_stage = instructions()[max(i for i, (word, _) in enumerate(instructions()) if word == "FROM") :]
    users = [rest for word, rest in last_stage if word == "USER"]
    user_id = re.search(r"USER_ID=(\d+)", (DOCKER / "system.sh").read_text())
    assert user_id
    assert users == [f"{user_id[1]}:{user_id[1]}"]
    words = [word for word, _ in last_stage]
    assert words.index("USER") > max(i for i, word in enumerate(words) if word in ("RUN", "COPY"))
    (check,) = arguments("HEALTHCHECK")
    assert "healthcheck.py" in check
    assert "/health_generate" in (DOCKER / "healthcheck.py").read_text()


def test_what_is_compiled_or_downloaded_lands_in_the_cache_volume() -> None:
    (environment,) = arguments("ENV")
    variables = dict(entry.split("=", 1) for entry in environment.split())
    assert arguments("VOLUME") == ["/cache"]
    for name in ("HF_HOME", "TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "FLASHINFER_WORKSPACE_BASE"):
        assert variables[name].startswith("/cache/"), name
    assert variables["SGLANG_SPARSE_PORT"] == arguments("EXPOSE")[0]


def test_variables_of_the_image_are_documented() -> None:
    text = "".join(path.read_text() for path in [DOCKER / "Dockerfile", *SCRIPTS, DOCKER / "healthcheck.py"])
    readme = (DOCKER / "README.md").read_text()
    for name in set(re.findall(r"SGLANG_SPARSE_[A-Z_]+", text)):
        assert f"`{name}`" in readme, name


@pytest.mark.parametrize("step", [[], ["upgrade"]])
def test_system_packages_need_a_step(step: list[str]) -> None:
    result = run(DOCKER / "system.sh", *step)
    assert result.returncode == 2
    assert result.stderr.count("\n") == 1
    assert "give build or serve" in result.stderr
