"""Runs the steps of Dockerfile.cpu in a new Debian, without a container runtime; asks its server.

``sudo python3 packaging/container.py [--root DIR] [--show DIR ...]`` needs debootstrap. The Debian
is removed at the end, unless ``--root`` says where it is kept. An instruction means what it does in
a build; one that is not known here is an error. The server has a network of its own, the loopback.
Where packages come through a proxy, ``--show /usr/local/share/ca-certificates`` lets it be trusted.
"""

import argparse
import json
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
DOCKERFILE = HERE / "Dockerfile.cpu"
# Variables that say where this machine gets packages from.
PASSED = ("PIP_", "SSL_CERT", "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY")


def instructions() -> list[tuple[str, str]]:
    """(instruction, its text) of the Dockerfile, continued lines joined."""
    lines = DOCKERFILE.read_text().splitlines()
    text = "\n".join(line for line in lines if line and not line.startswith("#"))
    found = (line.partition(" ") for line in text.replace("\\\n", " ").splitlines())
    return [(name, rest.strip()) for name, _, rest in found]


class Root:
    """A Debian in a folder, in which the steps of a build are run.

    Args:
        shown: folders of this machine that are there, too, read-only.
    """

    def __init__(self, path: Path, shown: list[str]) -> None:
        self.path = path
        self.shown = shown
        self.user, self.folder = "0", "/"
        self.environment = {
            name: value for name, value in os.environ.items() if name.upper().startswith(PASSED)
        }

    def step(self, name: str, text: str) -> None:
        """Do what an instruction says."""
        match name:
            case "FROM":
                self.make(text.removeprefix("debian:").removesuffix("-slim"))
            case "ARG":
                variable, _, default = text.partition("=")
                self.environment[variable] = os.environ.get(variable, default)
            case "USER":
                self.user = text
            case "WORKDIR":
                self.folder = text
            case "COPY":
                self.copy()
            case "RUN":
                call(*self.command("sh", "-c", text))
            case "CMD":
                alone = ("unshare", "--net", "sh", "-c", 'ip link set lo up && exec "$@"', "sh")
                ask = (sys.executable, HERE / "ask.py")
                call(*alone, *ask, *self.command(*json.loads(text)))
            case "EXPOSE":
                pass
            case _:
                sys.exit(f"{DOCKERFILE}: {name} is not known here; add it to Root.step.")

    def make(self, suite: str) -> None:
        """A new Debian with what debian:SUITE-slim has."""
        call("debootstrap", "--variant=minbase", suite, self.path)
        for folder in ("/proc", "/dev", "/sys", *self.shown):
            target = f"{self.path}{folder}"
            Path(target).mkdir(parents=True, exist_ok=True)
            call("mount", "--rbind", "--make-rslave", folder, target)
        for folder in self.shown:  # no package that is installed inside changes this machine
            call("mount", "--options", "remount,bind,ro", f"{self.path}{folder}")
        shutil.copy("/etc/resolv.conf", self.path / "etc/resolv.conf")

    def command(self, *words: str) -> list[str]:
        """The command line that runs these words inside, as the user, in the folder."""
        users = (line.split(":") for line in (self.path / "etc/passwd").read_text().splitlines())
        home = next(entry[5] for entry in users if entry[2] == self.user)
        settings = self.environment | {"HOME": home, "PATH": "/usr/sbin:/usr/bin:/sbin:/bin"}
        inside = ["sh", "-c", 'cd "$0" && exec "$@"', self.folder, *words]
        variables = [f"{name}={value}" for name, value in settings.items()]
        owner = f"--userspec={self.user}:{self.user}"
        return ["chroot", owner, str(self.path), "/usr/bin/env", "-i", *variables, *inside]

    def copy(self) -> None:
        """The files of the repository, as a clone has them, into the folder."""
        target = f"{self.path}{self.folder}"
        pack = f"git ls-files -z | tar --create --null --files-from=- | tar --extract -C {target}"
        call("sh", "-c", f"cd {HERE.parent} && {pack}")
        call("chown", "--recursive", "--no-dereference", self.user, target)

    def unmount(self) -> None:
        """Take away what was mounted, so that the folder can be removed."""
        for point in reversed(self.mounted()):
            call("umount", "--lazy", point)

    def mounted(self) -> list[str]:
        """Where something of this machine is mounted."""
        points = (line.split()[1] for line in Path("/proc/mounts").read_text().splitlines())
        return [point for point in points if point.startswith(f"{self.path}/")]


def call(*words: object) -> None:
    """Run a command; ends this program if it fails."""
    command = [str(word) for word in words]
    status = subprocess.run(command, check=False).returncode
    if status:
        sys.exit(f"status {status} of: {shlex.join(command)}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--root", type=Path, help="of the new Debian, which is then kept")
    parser.add_argument("--show", nargs="*", default=[], help="folders to read from it")
    given = parser.parse_args()
    path = given.root or Path(tempfile.mkdtemp(prefix="debian-"))
    root = Root(path.absolute(), given.show)
    start = time.monotonic()
    try:
        for name, text in instructions():
            print(f"==> {name} {text} (at {time.monotonic() - start:.0f} s)", flush=True)
            root.step(name, text)
    finally:
        root.unmount()
        if given.root is None and not root.mounted():
            shutil.rmtree(path)
    print(f"==> all steps passed after {time.monotonic() - start:.0f} s")


if __name__ == "__main__":
    main()
