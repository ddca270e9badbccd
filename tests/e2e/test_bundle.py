"""The parts of the bundle that can be tried without making one: its scripts in a folder of stand-ins, and the stand-ins for
libraries. A whole bundle on a bare system is tools/test_bundle.sh."""

import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import unittest

REPOSITORY = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(REPOSITORY / "tools"))
import bundle_stand_ins  # noqa: E402


class Folder(unittest.TestCase):
    def setUp(self):
        self.dir = pathlib.Path(tempfile.mkdtemp(prefix="weft bundle "))  # with a blank

    def tearDown(self):
        shutil.rmtree(self.dir, ignore_errors=True)


class Scripts(Folder):
    """bin/weft with two programs that say which they are."""

    def setUp(self):
        super().setUp()
        for folder in "bin", "libexec", "mpi/lib":
            (self.dir / folder).mkdir(parents=True)
        for script in "weft", "mpirun", "orted":
            shutil.copy(REPOSITORY / "tools/bundle" / script, self.dir / "bin")
        shutil.copy(REPOSITORY / "tools/bundle/weft", self.dir / "bin/weft_kernels")
        shutil.copy(REPOSITORY / "tools/bundle/environment.sh", self.dir / "libexec")
        (self.dir / "libexec/glibc").write_text("2.17\n")
        (self.dir / "libexec/cuda-libraries").write_text("libweft_a.so.1\nlibweft_b.so.2\n")
        for side in "cpu", "cuda":
            program = self.dir / f"libexec/weft-{side}"
            program.write_text(f'#!/bin/sh\necho {side} "$@"\necho "path=$LD_LIBRARY_PATH"\necho "prefix=$OPAL_PREFIX"\n')
            program.chmod(0o755)

    def run_weft(self, expect=0, script="weft", **variables):
        environment = {"PATH": "/usr/bin:/bin", "HOME": str(self.dir / "home"), **variables}
        done = subprocess.run([self.dir / "bin" / script, "train", "a b"], env=environment, capture_output=True, text=True,
                              check=False)
        self.assertEqual(done.returncode, expect, done.stderr)
        return done

    def libraries(self, *folders_and_names):
        for folder, name in folders_and_names:
            (self.dir / folder).mkdir(parents=True, exist_ok=True)
            (self.dir / folder / name).touch()

    def test_words_arrive_whole_and_mpi_is_the_bundles(self):
        done = self.run_weft(WEFT_SIDE="cpu")
        self.assertIn("cpu train a b", done.stdout)
        self.assertIn(f"path={self.dir}/mpi/lib\n", done.stdout)
        self.assertIn(f"prefix={self.dir}/mpi\n", done.stdout)

    def test_through_a_link(self):
        link = self.dir / "elsewhere"
        link.symlink_to(self.dir / "bin/weft")
        done = subprocess.run([link], env={"PATH": "/usr/bin:/bin", "WEFT_SIDE": "cpu"}, capture_output=True, text=True,
                              check=True)
        self.assertIn(f"prefix={self.dir}/mpi\n", done.stdout)

    @unittest.skipIf(os.path.exists("/dev/nvidiactl") or os.path.exists("/dev/dxg"), "there is a driver")
    def test_no_driver_takes_the_cpu_silently(self):
        done = self.run_weft()
        self.assertIn("cpu train", done.stdout)
        self.assertEqual(done.stderr, "")

    def test_libraries_of_python_packages_are_found(self):
        packages = "env/lib/python3.11/site-packages/nvidia"
        self.libraries((f"{packages}/cu13/lib", "libweft_a.so.1"), (f"{packages}/nccl/lib", "libweft_b.so.2"))
        done = self.run_weft(WEFT_SIDE="cuda", VIRTUAL_ENV=str(self.dir / "env"))
        self.assertIn("cuda train a b", done.stdout)
        self.assertIn(f"path={self.dir}/mpi/lib:{self.dir}/{packages}/cu13/lib:{self.dir}/{packages}/nccl/lib\n", done.stdout)

    def test_libraries_on_demand_are_added_where_there_are_any(self):
        (self.dir / "libexec/cuda-libraries-on-demand").write_text("libweft_c.so.3\nlibweft_nowhere.so.4\n")
        self.libraries(("here", "libweft_a.so.1"), ("here", "libweft_b.so.2"), ("there", "libweft_c.so.3"))
        done = self.run_weft(WEFT_SIDE="cuda", LD_LIBRARY_PATH=f"{self.dir}/here", WEFT_CUDA_LIBS=f"{self.dir}/there")
        self.assertIn(f"path={self.dir}/mpi/lib:{self.dir}/here:{self.dir}/there\n", done.stdout)

    def test_libraries_that_the_loader_finds_need_nothing(self):
        self.libraries(("here", "libweft_a.so.1"), ("here", "libweft_b.so.2"))
        done = self.run_weft(WEFT_SIDE="cuda", LD_LIBRARY_PATH=f"{self.dir}/here")
        self.assertIn(f"path={self.dir}/mpi/lib:{self.dir}/here\n", done.stdout)

    def test_missing_libraries_are_named(self):
        self.libraries(("here", "libweft_a.so.1"))
        done = self.run_weft(expect=2, WEFT_SIDE="cuda", WEFT_CUDA_LIBS=f"{self.dir}/here")
        self.assertIn("ERROR: WEFT_SIDE=cuda, but these libraries are not found: libweft_b.so.2", done.stderr)
        self.assertIn("HINT:", done.stderr)

    def test_an_old_glibc_is_refused(self):
        (self.dir / "libexec/glibc").write_text("2.99\n")
        done = self.run_weft(expect=2)
        self.assertIn("needs glibc 2.99 or newer", done.stderr)
        self.assertIn("HINT:", done.stderr)

    def test_a_program_for_gpus_alone(self):
        program = self.dir / "libexec/weft_kernels-cuda"
        program.write_text('#!/bin/sh\necho kernels "$@"\n')
        program.chmod(0o755)
        self.libraries(("here", "libweft_a.so.1"), ("here", "libweft_b.so.2"))
        done = self.run_weft(script="weft_kernels", WEFT_SIDE="cuda", LD_LIBRARY_PATH=f"{self.dir}/here")
        self.assertEqual(done.stdout, "kernels train a b\n")
        done = self.run_weft(expect=2, script="weft_kernels", WEFT_SIDE="cpu")
        self.assertIn("ERROR: weft_kernels of this bundle is for GPUs", done.stderr)
        self.assertIn("HINT:", done.stderr)

    def test_the_sites_mpi(self):
        done = self.run_weft(WEFT_SIDE="cpu", WEFT_SITE_MPI="1", LD_LIBRARY_PATH="/site/lib")
        self.assertIn("path=/site/lib\n", done.stdout)
        self.assertIn("prefix=\n", done.stdout)


class StandIns(Folder):
    """A library with versions and data, a program that needs it, and what takes the library's place."""

    def setUp(self):
        super().setUp()
        self.write("real.c", "int answer(void) { return 42; }\nint plain(void) { return 1; }\nint table[4] = {1, 2, 3, 4};\n"
                             "int not_wanted(void) { return 0; }\n")
        self.write("real.map", "REAL_1 { global: answer; };\nREAL_2 { global: table; } REAL_1;\n")
        self.write("main.c", '#include <stdio.h>\n#include <unistd.h>\nint answer(void);\nextern int table[4];\n'
                             'int main(int argc, char** argv) { printf("%d\\n", table[0]); fflush(stdout);'
                             ' return argc > 1 ? answer() : 0; }\n')
        self.cc("-shared", "-fPIC", "-Wl,-soname,libreal.so.1", "-Wl,--version-script,real.map", "-o", "libreal.so.1", "real.c")
        # As libraries are, which alone get stand-ins: data by address, not by copy; all symbols wanted at the start.
        self.cc("-fPIC", "-o", "main", "main.c", "./libreal.so.1", "-Wl,-z,now")
        self.assertEqual(self.run_main("x").returncode, 42)
        (self.dir / "stand").mkdir()
        wanted = bundle_stand_ins.wanted_symbols(self.dir / "main")
        self.count = bundle_stand_ins.make_stand_in("libreal.so.1", self.dir / "libreal.so.1", [wanted],
                                                    self.dir / "stand/libreal.so.1")

    def write(self, name, text):
        (self.dir / name).write_text(text)

    def cc(self, *words):
        subprocess.run(["gcc", *words], cwd=self.dir, check=True)

    def run_main(self, *words, folder="."):
        return subprocess.run([self.dir / "main", *words], capture_output=True, text=True, check=False,
                              env={"LD_LIBRARY_PATH": str(self.dir / folder)})

    def test_a_program_that_does_not_call_it_runs(self):
        self.assertEqual(self.count, 2)  # answer and table, no more
        done = self.run_main(folder="stand")
        self.assertEqual((done.returncode, done.stdout, done.stderr), (0, "0\n", ""))

    def test_a_call_says_what_is_missing(self):
        done = self.run_main("x", folder="stand")
        self.assertEqual(done.returncode, 3)
        self.assertIn("ERROR: this needs libreal.so.1, which the weft bundle leaves out (answer was called)", done.stderr)
        self.assertIn("HINT:", done.stderr)

    def test_it_needs_nothing_itself(self):
        dynamic = bundle_stand_ins.run("readelf", "-d", str(self.dir / "stand/libreal.so.1"))
        self.assertNotIn("NEEDED", dynamic)
        self.assertLess((self.dir / "stand/libreal.so.1").stat().st_size, 20000)


if __name__ == "__main__":
    unittest.main()
