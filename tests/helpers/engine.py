"""A container engine for the image's tests.

The machine's own engine is used where one answers, with the real base images. Where none does, one
is brought up here: Debian's packages, unpacked beside the repository and never installed, and base
images made by debootstrap, which stand for the pinned ones because no registry is to be reached.
"""

import os
import re
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from common.launch.process import end_with_parent
from tests.helpers.commands import ROOT, clean_env, wait_for
from tests.helpers.machine import need, need_root

FOLDER = ROOT / ".engine"  # kept between runs: programs, base images, build cache
DOCKERFILE = ROOT / "docker" / "Dockerfile"

CALLER = 12345
"""A user who may ask the engine, as root may, and who is nobody in the image."""

_PACKAGES = ("docker.io", "docker-cli", "docker-buildx", "docker-compose", "containerd")

# What the pinned base has and debootstrap's minbase has not.
_FULL_DOCKERFILE = """\
FROM {slim}
RUN apt-get update -qq && apt-get install -qq --no-install-recommends gcc g++ git make python3-dev
"""


class Engine:
    """An engine that answers.

    Args:
        containerd_store: keep images in containerd's store, which can export reproducible ones;
            always an engine of our own.
        architecture: of the images, as Debian and Docker call it; by default the machine's.
    """

    def __init__(self, containerd_store: bool = False, architecture: str = "") -> None:
        self.env = clean_env()
        self._architecture = architecture
        self._slim, self._full = (f"test-base:{base}{architecture}" for base in ("slim", "full"))
        self._daemon: subprocess.Popen[bytes] | None = None
        self.own = containerd_store or not _answers(self.env)
        if self.own:
            need_root()
            need("apt-get", "debootstrap", "runc", "iptables")
            self._folder = Path(tempfile.mkdtemp(prefix="engine-"))  # short: a socket lies in it
            try:
                self._bring_up(containerd_store)
                self._make_base()
            except BaseException:
                self.close()
                raise

    def _bring_up(self, containerd_store: bool) -> None:
        programs = FOLDER / "root"
        if not programs.exists():
            unpack(programs, *_PACKAGES)
        plugins = self._folder / "cli-plugins"
        shutil.copytree(programs / "usr" / "libexec" / "docker" / "cli-plugins", plugins)
        self.env |= {
            "DOCKER_CONFIG": str(self._folder),
            "DOCKER_HOST": f"unix://{self._folder}/socket",
            "PATH": f"{programs}/usr/sbin:{programs}/usr/bin:{self.env['PATH']}",
        }
        store = "containerd" if containerd_store else "overlay2"
        (self._folder / "daemon.json").write_text(
            '{"features": {"containerd-snapshotter": true}}' if containerd_store else "{}"
        )
        with (self._folder / "log").open("wb") as log:
            self._daemon = subprocess.Popen(
                [
                    "dockerd",
                    "--config-file",
                    str(self._folder / "daemon.json"),
                    "--data-root",
                    str(FOLDER / store),
                    "--exec-root",
                    str(self._folder / "exec"),
                    "--pidfile",
                    str(self._folder / "pid"),
                    "--host",
                    self.env["DOCKER_HOST"],
                ],
                env=self.env,
                stdout=log,
                stderr=log,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
                preexec_fn=end_with_parent,
            )
        wait_for(lambda: self._daemon_lives() and _answers(self.env), every_s=0.2)
        os.chown(self._folder / "socket", CALLER, CALLER)
        (self._folder / "socket").chmod(0o600)
        self._folder.chmod(0o755)

    def _daemon_lives(self) -> bool:
        alive = self._daemon is not None and self._daemon.poll() is None
        assert alive, (self._folder / "log").read_text()
        return True

    def _make_base(self) -> None:
        """An image that has what the slim base has: Python at its place, certificates, pip."""
        if self.run("image", "inspect", self._slim, check=False).returncode == 0:
            return
        base = FOLDER / "base"
        shutil.rmtree(base, ignore_errors=True)
        subprocess.run(
            [
                *(
                    "debootstrap --variant=minbase --include=ca-certificates,python3,python3-venv"
                ).split(),
                *([f"--arch={self._architecture}"] if self._architecture else []),
                "trixie",
                str(base),
                _mirror(),
            ],
            check=True,
            capture_output=True,
        )
        (base / "usr" / "local" / "bin" / "python").symlink_to("/usr/bin/python3")
        # Where outbound connections are signed anew, builds must know by whom.
        for certificate in Path("/usr/local/share/ca-certificates").glob("*.crt"):
            shutil.copy(certificate, base / "usr" / "local" / "share" / "ca-certificates")
        subprocess.run(["chroot", base, "update-ca-certificates"], check=True, capture_output=True)
        for left in ("var/lib/apt/lists", "var/cache/apt"):
            shutil.rmtree(base / left)
        with subprocess.Popen(["tar", "-C", base, "-c", "."], stdout=subprocess.PIPE) as tar:
            self.run("import", *self._platform(), "-", self._slim, stdin=tar.stdout)
        shutil.rmtree(base)

    def build_arguments(self, target: str = "runtime") -> list[str]:
        """What `docker build` needs so that the pinned bases are found here."""
        if not self.own:
            return self._platform()
        pinned = r"(?:FROM |--from=)(python:\S+@sha256:[0-9a-f]+)"
        slim, full = re.findall(pinned, DOCKERFILE.read_text())
        contexts = {slim: self._slim}
        if target == "development":
            dockerfile = _FULL_DOCKERFILE.format(slim=self._slim)
            build = ["build", *self._platform(), "--tag", self._full, "-"]
            self.run(*build, input=dockerfile, timeout_s=30_000)  # long under emulation
            contexts[full] = self._full
        own = [f"--build-context={name}=docker-image://{base}" for name, base in contexts.items()]
        return [*self._platform(), *own]

    def _platform(self) -> list[str]:
        return [f"--platform=linux/{self._architecture}"] if self._architecture else []

    def run(self, *words: str | Path, **options: Any) -> "subprocess.CompletedProcess[str]":
        """Run `docker WORDS` to its end, as `call` does."""
        return self.call("docker", *words, **options)

    def call(
        self,
        *command: str | Path,
        check: bool = True,
        input: str | None = None,
        timeout_s: float = 900,
        env: Mapping[str, str] | None = None,
        **more: object,
    ) -> "subprocess.CompletedProcess[str]":
        """Run a command whose docker is this engine's."""
        stdin = {} if "stdin" in more else {"input": input or ""}
        done: subprocess.CompletedProcess[str] = subprocess.run(  # type: ignore[call-overload]
            [str(word) for word in command],
            text=True,
            capture_output=True,
            timeout=timeout_s,
            cwd=ROOT,
            env={**self.env, **(env or {})},
            **stdin,
            **more,
        )
        said = f"{' '.join(done.args)}: {done.returncode}\n{done.stdout}\n{done.stderr}"
        assert not check or done.returncode == 0, said[-8000:]
        return done

    def close(self) -> None:
        """End the engine, if it is our own; its images stay for the next run."""
        if self._daemon is not None:
            self._daemon.send_signal(signal.SIGTERM)
            try:
                self._daemon.wait(30)
            except subprocess.TimeoutExpired:
                self._daemon.kill()
                self._daemon.wait()
            time.sleep(0.5)  # its containerd
        if self.own:
            shutil.rmtree(self._folder, ignore_errors=True)


def _answers(env: Mapping[str, str]) -> bool:
    command: Sequence[str] = ("docker", "version", "--format", "{{.Server.Version}}")
    try:
        done = subprocess.run(command, capture_output=True, env=env, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return False
    return done.returncode == 0


def _mirror() -> str:
    """The Debian mirror that this machine is set up for."""
    said = subprocess.run(
        ["apt-get", "indextargets", "--format", "$(REPO_URI)", "Created-By: Packages"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    return next(uri for uri in said.split() if re.search(r"/debian/?$", uri))


def unpack(programs: Path, *packages: str) -> None:
    """Fetch packages of trixie with an apt state of its own, and unpack them into a folder."""
    shutil.rmtree(FOLDER / "apt", ignore_errors=True)
    apt = FOLDER / "apt"
    for name in ("lists/partial", "cache/archives/partial"):
        (apt / name).mkdir(parents=True)
    (apt / "status").touch()
    keys = "/usr/share/keyrings/debian-archive-keyring.gpg"
    (apt / "sources").write_text(f"deb [signed-by={keys}] {_mirror()} trixie main\n")
    options = [
        word
        for name, value in {
            "Dir::State": apt,
            "Dir::State::lists": apt / "lists",
            "Dir::State::status": apt / "status",
            "Dir::Cache": apt / "cache",
            "Dir::Etc::SourceList": apt / "sources",
            "Dir::Etc::SourceParts": "/dev/null",
            "APT::Sandbox::User": "root",
            "Acquire::Languages": "none",
        }.items()
        for word in ("--option", f"{name}={value}")
    ]
    for words in (["update"], ["download", *packages]):
        subprocess.run(
            ["apt-get", *options, "-qq", *words], check=True, capture_output=True, cwd=apt
        )
    unfinished = programs.with_suffix(".new")
    for package in apt.glob("*.deb"):
        subprocess.run(["dpkg-deb", "--extract", package, unfinished], check=True)
    unfinished.rename(programs)
    shutil.rmtree(apt)


IMAGE = "torch-recipes:test"
