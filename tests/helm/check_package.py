"""`make chart-package` and `make chart-push` up to the push. Named `check_...`, as its neighbours that need helm."""

import os
import subprocess
from pathlib import Path

import pytest
import yaml

from tests.helm.tools import CHART, EXAMPLES, KUBERNETES, ROOT, run, tool

VERSION = yaml.safe_load((CHART / "Chart.yaml").read_text())["version"]
KEY = "Release <release@tidemark.example>"


def script(name: str, *words: object, **environment: str) -> "subprocess.CompletedProcess[str]":
    command = [str(ROOT / "helm/tools" / name), *map(str, words)]
    return subprocess.run(
        command, env=os.environ | environment, cwd=ROOT, capture_output=True, text=True, check=False, timeout=120
    )


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("package")
    done = script("package-chart", directory)
    assert done.returncode == 0, done.stderr
    return directory / f"tidemark-{VERSION}.tgz"


@pytest.mark.parametrize("example", EXAMPLES)
def test_the_package_renders_as_the_folder_does(package: Path, example: str) -> None:
    """Files that .helmignore leaves out are not needed."""
    options = ["-f", str(CHART / f"examples/{example}.yaml"), "--kube-version", KUBERNETES[-1]]
    options += ["--set", "monitoring.prometheusRule.enabled=true,monitoring.dashboard.enabled=true"]
    texts = [run(tool("helm"), "template", "t", chart, *options) for chart in (package, CHART)]
    documents = [[one for one in yaml.safe_load_all(text) if one and one["kind"] != "Secret"] for text in texts]
    assert documents[0] == documents[1]


def test_the_package_is_signed_on_demand(tmp_path: Path) -> None:
    """By the steps of docs/how-to/release.md: `helm verify` accepts the signature."""
    home = {"GNUPGHOME": str(tmp_path)}
    gpg = ["gpg", "--homedir", str(tmp_path), "--batch", "--quiet", "--passphrase", "", "--pinentry-mode", "loopback"]
    try:
        run(*gpg, "--quick-generate-key", KEY, "rsa2048", "sign", "never")
        (tmp_path / "secring.gpg").write_bytes(_bytes(*gpg, "--export-secret-keys"))
        (tmp_path / "pubring.gpg").write_bytes(_bytes(*gpg, "--export"))
        keyring = str(tmp_path / "secring.gpg")
        done = script("package-chart", tmp_path, CHART_KEY=KEY, CHART_KEYRING=keyring, **home)
        assert done.returncode == 0, done.stderr
        run(tool("helm"), "verify", tmp_path / f"tidemark-{VERSION}.tgz", "--keyring", tmp_path / "pubring.gpg")
    finally:
        subprocess.run(["gpgconf", "--homedir", str(tmp_path), "--kill", "gpg-agent"], check=False)


def test_a_key_without_a_keyring_is_refused(tmp_path: Path) -> None:
    """helm would look for a keyring in the user's home."""
    done = script("package-chart", tmp_path, CHART_KEY=KEY)
    assert (done.returncode, list(tmp_path.iterdir())) == (2, [])
    assert "CHART_KEYRING names no readable file" in done.stderr


def test_the_push_names_package_and_registry(package: Path, tmp_path: Path) -> None:
    """With a helm that only prints its words."""
    (tmp_path / "tools/bin").mkdir(parents=True)
    helm = tmp_path / "tools/bin/helm"
    helm.write_text('#!/bin/sh\necho "$@"\n')
    helm.chmod(0o755)
    done = script("push-chart", package.parent, "oci://registry.example/charts", TIDEMARK_HOME=str(tmp_path))
    assert done.stdout == f"push {package} oci://registry.example/charts\n"


@pytest.mark.parametrize("registry", ["", "registry.example/charts", "oci://"])
def test_a_registry_that_is_none_is_refused(package: Path, registry: str) -> None:
    """The message has an example."""
    done = script("push-chart", package.parent, registry)
    assert done.returncode == 2
    assert "such as oci://registry.example/charts" in done.stderr


def test_a_push_without_a_package_is_refused(tmp_path: Path) -> None:
    """The message names the target to make."""
    done = script("push-chart", tmp_path, "oci://registry.example/charts")
    assert done.returncode == 2
    assert "run make chart-package" in done.stderr


def _bytes(*command: str) -> bytes:
    return subprocess.run(command, capture_output=True, check=True).stdout
