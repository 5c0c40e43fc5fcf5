"""Environments of pinned packages: a virtual environment, or a project of npm. They are kept, and made once."""

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

INSTALL_TIMEOUT = 1800.0  # seconds
REPORT = Path(__file__).parent


@dataclass(frozen=True)
class Environments:
    """The folder of all environments.

    `shared_packages` is a folder of packages that virtual environments see beside their own, such as the site-packages
    of an environment that has torch: its packages are not installed again.
    """

    folder: Path
    shared_packages: Path | None = None

    def command(self, client):
        """Return the command that runs the client's program, after the installation of its packages if they lack."""
        program = REPORT / client.program
        if not client.on_node:
            return [str(self.python(client.name, client.packages)), str(program)]
        project = self._made(client.name, client.packages, self._install_from_npm)
        for file in (program, REPORT / "report.mjs"):  # node looks for packages beside the program
            shutil.copy(file, project)
        return ["node", str(project / program.name)]

    def python(self, name, packages):
        """Return the interpreter of a virtual environment with these packages."""
        return self._made(name, packages, self._install_from_pypi) / "bin" / "python"

    def _made(self, name, packages, install):
        path, stamp = self.folder / name, self.folder / name / "installed"
        content = "\n".join(packages)
        if install == self._install_from_pypi:
            content += f"\n{sys.version}\n{self.shared_packages}"
        if not stamp.exists() or stamp.read_text() != content:
            print(f"{name}: installing {' '.join(packages)}", file=sys.stderr, flush=True)
            shutil.rmtree(path, ignore_errors=True)
            path.mkdir(parents=True)
            install(path, packages)
            stamp.write_text(content)
        return path

    def _install_from_pypi(self, path, packages):
        run([sys.executable, "-m", "venv", str(path)])
        if self.shared_packages is not None:
            (site,) = path.glob("lib/python*/site-packages")
            (site / "shared.pth").write_text(f"{self.shared_packages}\n")
        run([str(path / "bin" / "python"), "-m", "pip", "install", "--quiet", *packages])

    def _install_from_npm(self, path, packages):
        (path / "package.json").write_text('{"private": true, "type": "module"}')
        run(["npm", "install", "--no-audit", "--no-fund", "--save-exact", *packages], cwd=path)


def without_python_variables():
    """Return the process's environment without the variables that change Python's own paths."""
    return {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}


def run(command, cwd=None):
    """Run a command to its end. Raises RuntimeError with the end of its output if it fails."""
    done = subprocess.run(
        command, cwd=cwd, env=without_python_variables(), capture_output=True, text=True, timeout=INSTALL_TIMEOUT
    )
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command[:4])} failed: {(done.stderr or done.stdout).strip()[-400:]}")
