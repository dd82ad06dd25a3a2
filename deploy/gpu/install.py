"""Prepares a machine with a GPU and no network: wheels are downloaded elsewhere, the torch that it has is used.

``python deploy/gpu/install.py wheels`` runs where there is a network, ``... venv .venv-gpu`` on the GPU's machine, by
the python that has torch. Only the standard library is needed; `README.md` beside this file says more.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import re
import subprocess
import sys
import tempfile
import tomllib
import zipfile
from collections.abc import Collection, Iterable, Sequence
from email.parser import Parser
from pathlib import Path

ROOT = Path(__file__).parents[2]
# What runs the suite, of the packages for development.
SUITE = ("pytest", "pytest-asyncio", "pytest-timeout")
BUILD = "setuptools>=77"
PLATFORMS = ("manylinux_2_28", "manylinux_2_27", "manylinux_2_17", "manylinux2014", "manylinux_2_5", "manylinux1")
MIN_TORCH = (2, 10)


def name_of(requirement: str) -> str:
    """The normalised name of a requirement, a constraint or a wheel's file.

    Example: ``Tensor_Board.X>=2.6; python_version > "3"`` gives ``tensor-board-x``.
    """
    return re.sub(r"[-_.]+", "-", re.split(r"[^A-Za-z0-9._-]", requirement.strip(), maxsplit=1)[0]).lower()


def requirements() -> list[str]:
    """What a GPU run needs beside torch."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    suite = [wanted for wanted in extras["dev"] if name_of(wanted) in SUITE]
    return [wanted for wanted in project["dependencies"] + extras["train"] if name_of(wanted) != "torch"] + suite


def constraints(without: Collection[str]) -> str:
    """The tested versions, but for those of some packages."""
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    return "\n".join(line for line in lines if not line.startswith("#") and name_of(line) not in without) + "\n"


def reachable(roots: Iterable[str], needs: dict[str, Collection[str]], skip: Collection[str]) -> set[str]:
    """Names that are needed, directly or not, by others than those that are skipped."""
    found: set[str] = set()
    waiting = [name for name in roots if name not in skip]
    while waiting:
        name = waiting.pop()
        if name not in found and name in needs:
            found.add(name)
            waiting += [other for other in needs[name] if other not in skip]
    return found


def wheel_name(wheel: Path) -> str:
    """Normalised name of the package in a wheel."""
    return name_of(wheel.name.partition("-")[0])


def wheel_needs(wheel: Path) -> list[str]:
    """Names of what a wheel asks for, without its extras."""
    with zipfile.ZipFile(wheel) as archive:
        entry = next(name for name in archive.namelist() if re.fullmatch(r"[^/]+\.dist-info/METADATA", name))
        asked = Parser().parsestr(archive.read(entry).decode()).get_all("Requires-Dist") or []
    return [name_of(wanted) for wanted in asked if "extra ==" not in wanted]


def download(target: Path, python: str, arch: str, skip: Collection[str]) -> None:
    """Fill a folder with the wheels that a machine needs beside torch, and say how large they are."""
    target.mkdir(exist_ok=True)
    for old in target.glob("*.whl"):
        old.unlink()
    platforms = [word for platform in PLATFORMS for word in ("--platform", f"{platform}_{arch}")]
    with tempfile.TemporaryDirectory() as folder:
        pins = Path(folder, "constraints.txt")
        pins.write_text(constraints({"torch"}))
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check"]
        command += ["--only-binary=:all:", "--implementation", "cp", "--python-version", python, *platforms]
        subprocess.run([*command, "-c", str(pins), "-d", str(target), BUILD, *requirements()], check=True)
    roots = [name_of(wanted) for wanted in (BUILD, *requirements())]
    wheels = {wheel_name(wheel): wheel for wheel in target.glob("*.whl")}
    kept = reachable(roots, {name: wheel_needs(wheel) for name, wheel in wheels.items()}, skip)
    for name in wheels.keys() - kept:
        wheels[name].unlink()
    sizes = sorted(((wheels[name].stat().st_size, name) for name in kept), reverse=True)
    largest = ", ".join(f"{name} {size / 2**20:.1f}" for size, name in sizes[:6])
    total = sum(size for size, _ in sizes)
    sys.stdout.write(f"{target}: {len(sizes)} wheels, {total / 2**20:.1f} MiB (largest: {largest})\n")


def find_torch() -> tuple[str, Path]:
    """Version and place of this python's torch; exits with a sentence if there is none that will do."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        sys.exit(
            f"{sys.executable} has no torch: install the build for this machine's GPU first, "
            "or name the python that has it: make test-gpu PYTHON=/path/to/python3"
        )
    version = importlib.metadata.version("torch")
    if tuple(int(part) for part in version.split(".")[:2]) < MIN_TORCH:
        sys.exit(f"torch {version} of {sys.executable} is too old: agentrl needs {'.'.join(map(str, MIN_TORCH))}")
    return version, Path(spec.origin)


def make_venv(folder: Path, wheels: Path) -> None:
    """Make an environment that sees this python's packages, torch among them, and install agentrl with what is missing.

    A package that the machine has in a version that will do is used as it is. Nothing of torch is ever installed.
    """
    version, origin = find_torch()
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", "--system-site-packages", str(folder)], check=True)
    python = folder / "bin" / "python"
    (site,) = folder.glob("lib/python*/site-packages")
    # Where this python itself belongs to an environment, the new one sees the packages of neither by itself.
    seen = [entry for entry in sys.path if entry.endswith(("site-packages", "dist-packages"))]
    (site / "machine.pth").write_text("".join(f"import site; site.addsitedir({entry!r})\n" for entry in seen))
    if subprocess.run([python, "-c", "import pip"], capture_output=True, check=False).returncode:
        subprocess.run([python, "-m", "ensurepip"], check=True, stdout=subprocess.DEVNULL)
    with tempfile.TemporaryDirectory() as temporary:
        pins = Path(temporary, "constraints.txt")
        install = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "-c", pins]
        if any(wheels.glob("*.whl")):
            install += ["--no-index", "--find-links", wheels]
            pins.write_text(f"torch=={version}\n")
        else:
            here = {name_of(found.metadata["Name"]) for found in importlib.metadata.distributions()}
            pins.write_text(constraints(here | {"torch"}) + f"torch=={version}\n")
        _run([*install, BUILD])
        _run([*install, "--no-build-isolation", "-e", str(ROOT), *requirements()])
    told = subprocess.run(
        [python, "-c", "import torch; print(torch.__file__)"], capture_output=True, text=True, check=True
    )
    if not Path(told.stdout.strip()).samefile(origin):
        sys.exit(f"{folder} took another torch, {told.stdout.strip()}, than {origin}; remove {folder}")
    sys.stdout.write(f"{folder}: agentrl with torch {version} of {origin.parent}\n")


def _run(command: Sequence[str | Path]) -> None:
    if subprocess.run(command, check=False).returncode:
        sys.exit(
            "what is missing is named above: leave it out of SKIP in `make gpu-wheels`, or make the wheels for this "
            f"python, GPU_PYTHON={sys.version_info.major}.{sys.version_info.minor}"
        )


def main() -> None:
    """Entry of the script."""
    parser = argparse.ArgumentParser(description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    wheels = commands.add_parser("wheels", help="download what a machine with torch lacks")
    wheels.add_argument("--python", default="3.12", help="version of that machine's python")
    wheels.add_argument("--arch", default="x86_64", help="its architecture")
    wheels.add_argument("--skip", nargs="*", default=[], help="packages that it has, which are left out with their own")
    venv = commands.add_parser("venv", help="make an environment on that machine")
    venv.add_argument("folder", type=Path)
    for command in (wheels, venv):
        command.add_argument("--wheels", type=Path, default=ROOT / "wheels", help="folder of the wheels")
    given = parser.parse_args()
    if given.command == "wheels":
        download(given.wheels, given.python, given.arch, {name_of(name) for name in given.skip})
    else:
        make_venv(given.folder, given.wheels)


if __name__ == "__main__":
    main()
