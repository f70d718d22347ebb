"""The Dockerfile: its copied files exist, its packages fit the project, and its user is unprivileged."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

from dockerfile_parse import DockerfileParser
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

import native_front
from rsrv.cli import main as command_line
from rsrv.settings import load_settings
from tests.unit.deploy.manifests import ROOT

DOCKERFILE = ROOT / "docker" / "Dockerfile"
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())


def stages() -> list[list[tuple[str, str]]]:
    """Return the instructions of each stage. The first list has the instructions before the first stage."""
    with DOCKERFILE.open("rb") as file:
        instructions: list[list[tuple[str, str]]] = [[]]
        for line in DockerfileParser(fileobj=file).structure:
            if line["instruction"] == "FROM":
                instructions.append([])
            if line["instruction"] != "COMMENT":
                instructions[-1].append((line["instruction"], line["value"]))
    return instructions


def values(stage: list[tuple[str, str]], instruction: str) -> list[str]:
    return [value for name, value in stage if name == instruction]


def named(name: str) -> list[tuple[str, str]]:
    (stage,) = [s for s in stages() if s[0][0] == "FROM" and s[0][1].endswith(f" AS {name}")]
    return stage


def locked(file: str) -> dict[str, Version]:
    """Return the packages in a lock file, by canonical name. All packages have hashes."""
    text = (ROOT / "docker" / file).read_text()
    lines = re.findall(r"^([\w.-]+)==([^\s\\]+)", text, re.MULTILINE)
    blocks = re.split(r"\n(?=[a-z])", text)[1:]
    assert len(blocks) == len(lines)
    assert all("--hash=sha256:" in block for block in blocks)
    return {canonicalize_name(name): Version(version) for name, version in lines}


def wanted(extra: str) -> list[Requirement]:
    """Return the requirements of an extra, including those of other extras that it names."""
    project = PROJECT["project"]
    requirements = [Requirement(text) for text in project["dependencies"]]
    for text in project["optional-dependencies"][extra]:
        requirement = Requirement(text)
        if requirement.name == project["name"]:
            requirements += [each for other in requirement.extras for each in wanted(other)]
        else:
            requirements.append(requirement)
    return requirements


def test_a_linter_has_nothing_to_say() -> None:
    """hadolint finds nothing, notes included."""
    linter = Path(sys.executable).with_name("hadolint")
    result = subprocess.run([linter, "--no-color", DOCKERFILE], capture_output=True, text=True, check=False)
    assert (result.returncode, result.stdout) == (0, "")


def test_all_that_is_copied_is_there() -> None:
    """Copied files exist in the repository, and a stage is copied only after its definition."""
    before: list[str] = []
    for stage in stages():
        for value in values(stage, "COPY"):
            *sources, _ = [word for word in value.split() if not word.startswith("--")]
            origin = re.search(r"--from=(\S+)", value)
            if origin:
                assert origin[1] in before
            else:
                assert [s for s in sources if not (ROOT / s).exists()] == []
        before += re.findall(r" AS (\S+)$", stage[0][1] if stage[0][0] == "FROM" else "")


def test_the_wheel_is_built_of_all_its_packages() -> None:
    """The stage that builds the wheel has every package's folder, and the files that pyproject.toml names."""
    copied = [Path(s) for v in values(named("wheel"), "COPY") for s in v.split()[:-1]]
    project = PROJECT["project"]
    needed = [
        *PROJECT["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"],
        *(
            each["path"]
            for each in PROJECT["tool"]["hatch"]["metadata"]["hooks"]["fancy-pypi-readme"]["fragments"]
        ),
        *project["license-files"],
        "pyproject.toml",
    ]
    for each in map(Path, needed):
        assert any(each == path or path in each.parents for path in copied), each


def test_the_native_front_is_built_before_the_wheel() -> None:
    """The stage that builds the wheel installs the compiler of tools/native_front.py, and runs this script before the build."""
    stage = named("wheel")
    arguments = dict(value.split("=", 1) for value in values(stages()[0], "ARG"))
    assert arguments["ZIG"] == native_front.ZIG_VERSION
    install, build = values(stage, "RUN")
    assert f"{native_front.ZIG}==${{ZIG}}" in install.split()
    assert re.search(r"tools/native_front\.py\s+&& uv build .*--wheel", build)
    assert "tools/native_front.py tools/" in values(stage, "COPY")


def test_what_is_installed_is_what_the_project_wants() -> None:
    """The locked versions have hashes, and fit the extras of a server with a GPU. These include the gateway's extra."""
    versions = locked("requirements.txt")
    for requirement in wanted("serve") + wanted("cuda13"):
        assert requirement.specifier.contains(versions[canonicalize_name(requirement.name)]), requirement
    assert versions["jax-cuda13-plugin"] == versions["jax"]


def test_the_stubs_python_gets_what_hooks_need_and_keeps_its_numpy() -> None:
    """The hooks' packages are locked without their dependencies, which would install another numpy."""
    versions = locked("requirements-hooks.txt")
    requirements = [Requirement(text) for text in PROJECT["project"]["optional-dependencies"]["hooks"]]
    assert versions.keys() == {canonicalize_name(requirement.name) for requirement in requirements}
    for requirement in requirements:
        assert requirement.specifier.contains(versions[canonicalize_name(requirement.name)]), requirement
    run, _ = values(named("server"), "RUN")
    assert "--no-deps --only-binary=:all: --require-hashes -r /requirements-hooks.txt" in run


def test_the_extra_of_the_gateways_image_exists() -> None:
    """The extra that the Dockerfile installs for the gateway exists in pyproject.toml."""
    extras = re.findall(r"\.whl\)\[(\w+)\]", DOCKERFILE.read_text())
    assert extras == ["gateway"]
    assert set(extras) <= set(PROJECT["project"]["optional-dependencies"])


def test_bases_are_pinned() -> None:
    """Every base image has a fixed version."""
    arguments = dict(value.split("=", 1) for value in values(stages()[0], "ARG"))
    assert arguments["TRITON"] == "nvcr.io/nvidia/tritonserver:26.11-py3"
    for stage in stages()[1:]:
        base = re.fullmatch(r"\$\{(\w+)\} AS \S+", stage[0][1])
        assert base, stage[0]
        assert re.search(r":\d+\.\d+", arguments[base[1]])


def test_both_images_run_as_a_user_and_say_how_they_are() -> None:
    """Both images run as uid 1000 without a shell. Their health check uses an exposed port."""
    for name in ("server", "gateway"):
        stage = named(name)
        assert values(stage, "USER") == ["1000:1000"]
        (check,) = values(stage, "HEALTHCHECK")
        command = json.loads(check[check.index("CMD") + 3 :])
        compile(command[-1], "HEALTHCHECK", "exec")
        port = re.search(r"127\.0\.0\.1:(\d+)/", command[-1])
        assert port
        assert port[1] in values(stage, "EXPOSE")[0].split()
        (start,) = values(stage, "CMD") + values(stage, "ENTRYPOINT")
        assert json.loads(start)[0] in PROJECT["project"]["scripts"]


def test_both_images_open_their_ports() -> None:
    """In both images, the ports are open for other machines, because clients, Prometheus and probes run in other containers."""
    for name, file in (("server", "rsrv.yaml"), ("gateway", "gateway.yaml")):
        settings = load_settings((ROOT / "docker" / file).read_text())
        opened = settings.metrics.listen if name == "server" else settings.gateway.admin
        assert opened == ("0.0.0.0:8004" if name == "server" else "0.0.0.0:8002")
        stage = named(name)
        assert any(copy.startswith(f"docker/{file} /etc/rsrv/") for copy in values(stage, "COPY"))
        (start,) = values(stage, "CMD") + values(stage, "ENTRYPOINT")
        assert json.loads(start)[-2:] == ["--config", "/etc/rsrv/rsrv.yaml"]
        if name == "server":
            assert settings.openai.keys_file == Path("/etc/rsrv/keys.yaml"), (
                "callers from other machines need keys"
            )
            assert command_line.parser().parse(json.loads(start)[1:]).host == "0.0.0.0"
        else:
            assert (settings.gateway.http, settings.gateway.grpc) == ("0.0.0.0:8000", "0.0.0.0:8001")


def test_the_build_fails_if_rsrv_does_not_work_with_the_release() -> None:
    """During the build, the check of the release runs after all installations, as the user of the container."""
    instructions = [name for name, _ in named("server")]
    assert values(named("server"), "RUN")[-1] == "rsrv check-triton"
    assert instructions[instructions.index("USER") + 1] == "RUN"


def test_the_last_stage_is_the_server() -> None:
    """The last stage is the server, because a build without a target builds the last stage."""
    assert stages()[-1] == named("server")
