"""Which MPI a build takes (docs/mpi.md): tools/mpi.cmake finds the launcher that belongs to the compiler and warns of one that does not,
and WEFT_MPI=mpich takes Debian's MPICH. No weft is built."""
import os
import pathlib
import re
import shutil
import subprocess
import tempfile
import unittest

ROOT = pathlib.Path(__file__).resolve().parents[2]
COMPILER = os.environ.get("WEFT_MPI_COMPILER") or shutil.which("mpicxx")
VERSIONS = {"Open MPI": "mpiexec (OpenRTE) 4.1.4", "MPICH": "HYDRA build details:"}  # first lines of `mpiexec --version`


class Folder(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.dir = pathlib.Path(folder.name)
        (self.dir / "bin").mkdir()
        self.path = f"{self.dir}/bin:{os.environ['PATH']}"

    def program(self, name, text):
        path = self.dir / "bin" / name
        path.write_text(f"#!/bin/sh\n{text}\n")
        path.chmod(0o755)


@unittest.skipUnless(COMPILER and shutil.which("cmake"), "needs cmake and an MPI")
class Configure(Folder):
    def configure(self, compiler):
        """What a project finds that takes MPI as weft does: (family, launcher, warnings)."""
        (self.dir / "CMakeLists.txt").write_text(
            "cmake_minimum_required(VERSION 3.22)\nproject(some LANGUAGES C CXX)\n"
            f'include({ROOT}/tools/mpi.cmake)\nmessage(STATUS "found ${{mpi_family}}: ${{MPIEXEC_EXECUTABLE}}")\n')
        done = subprocess.run(["cmake", "-S", self.dir, "-B", self.dir / "build", f"-DMPI_CXX_COMPILER={compiler}"],
                              env=dict(os.environ, PATH=self.path), capture_output=True, text=True)
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
        family, launcher = re.search("-- found (.*): (.*)", done.stdout).groups()
        return family, launcher, " ".join(done.stderr.split())

    def test_the_launcher_is_the_compiler_s_and_a_foreign_one_is_told(self):
        self.program("mpicxx.ours", f'exec "{COMPILER}" "$@"')
        self.program("mpiexec", "echo of whatever MPI")
        self.program("mpiexec.ours", f'echo "{VERSIONS["Open MPI"]}"')
        family, launcher, warned = self.configure("mpicxx.ours")
        self.assertEqual(launcher, f"{self.dir}/bin/mpiexec.ours")
        self.assertIn(family, VERSIONS)
        self.assertEqual("belongs to Open MPI" in warned, family != "Open MPI", warned)

        other, = set(VERSIONS) - {family}
        for name in "mpicxx.ours", "mpiexec.ours":
            (self.dir / "bin" / name).unlink()
        shutil.rmtree(self.dir / "build")
        self.program("mpicxx", f'exec "{COMPILER}" "$@"')
        self.program("mpiexec", f'echo "{VERSIONS[other]}"')
        found, launcher, warned = self.configure(self.dir / "bin/mpicxx")
        self.assertEqual((found, launcher), (family, f"{self.dir}/bin/mpiexec"))
        self.assertIn(f"built with {family}, but the launcher {self.dir}/bin/mpiexec belongs to {other}", warned)


class Packages(Folder):
    def installed(self, **environment):
        """The packages that tools/deps.sh installs where there are none."""
        self.program("id", "echo 0")
        self.program("dpkg-query", "exit 1")
        self.program("apt-get", f'echo "$@" >"{self.dir}/asked"')
        env = {name: value for name, value in os.environ.items() if name != "WEFT_MPI"}
        done = subprocess.run([ROOT / "tools/deps.sh", "--program"], env=dict(env, PATH=self.path, **environment),
                              capture_output=True, text=True)
        self.assertEqual(done.returncode, 0, done.stderr)
        return set((self.dir / "asked").read_text().split())

    def test_mpich_in_place_of_open_mpi(self):
        usual, other = self.installed(), self.installed(WEFT_MPI="mpich")
        self.assertEqual((usual - other, other - usual), ({"libopenmpi-dev", "openmpi-bin"}, {"libmpich-dev", "mpich"}))


if __name__ == "__main__":
    unittest.main()
