"""Training and all other job scripts but those of list jobs under a real Slurm on this host (cluster.py). `make test-slurm`
runs this; by hand, as root:
    WEFT_BIN=build/weft python3 -B tests/slurm/test_jobscripts.py -v

What was shown (job ids, exit codes, restarts) is printed as each test ends.
"""

import json
import os
import re
import time
import unittest

from cluster import GRACE
from scripts import DECK, MPIEXEC, SUBMITTED, WEFT, ScriptTest, open_mpi
from tiny_models import TINY_GENERATE_DECK


class JobScripts(ScriptTest):
    def test_smoke_on_two_nodes(self):
        job = self.sbatch("smoke", deck=None, options=("--cpus-per-task=1",))
        facts = self.finish(job)
        self.assertEqual(facts["NodeList"], "n[1-2]")
        self.assertIn("verdict: fit", self.output())
        run = f"runs/smoke-{job}"
        self.assertEqual(self.steps(run), 20)
        self.show(f"job {job} on {facts['NodeList']}: {facts['JobState']}, exit {facts['ExitCode']}, 20 steps")

    def test_scaling_is_an_array(self):
        job = self.sbatch("scaling", "train.micro_batches=1", "--steps", "2", "--rounds", "1", "--warmup", "2",
                          options=("--array=0-1", "--nodes=2", "--ntasks-per-node=1", "--cpus-per-task=1"))
        tasks = [f"{job}_{i}" for i in (0, 1)]
        for task, kind in zip(tasks, ("weak_mixed", "weak_uniform")):
            self.finish(task)
            result = json.loads((self.site / f"runs/weft-scaling-{job}" / f"{kind}_2.json").read_text())
            self.assertTrue(result)
            self.assertTrue((self.site / f"runs/weft-scaling-{job}" / f"{kind}_2.html").exists())
        self.show(f"array {job}: tasks 0 and 1 COMPLETED, exit 0:0, one JSON and one plot each")

    def test_preempted_and_requeued_until_done(self):
        shape = ("--nodes=2", "--ntasks-per-node=1", "--cpus-per-task=1")
        deck = self.site / "deck.toml"
        # It does not end before it has been disturbed, however fast it is.
        deck.write_text(DECK.replace("steps = 200", "steps = 1000000"))
        job = self.sbatch("restart_chain", options=(*shape, "--job-name=chain"))
        self.wait_for_steps(job, "runs/deck", 40)
        # 1. An urgent job wants both nodes: Slurm itself preempts the chain.
        urgent = self.cluster.run("sbatch", "--parsable", "-p", "urgent", "--nodes=2", "--exclusive", "--time=1",
                             "--output=urgent.out", "--wrap=sleep 1", cwd=self.site).strip()
        self.jobs.append(urgent)
        began = time.monotonic()
        self.until("preemption", lambda: self.cluster.job(urgent).get("JobState") in ("RUNNING", "COMPLETED"), GRACE)
        preempted = time.monotonic() - began
        first = self.steps("runs/deck")
        # 2. It goes on by itself. Then the signal that --signal sends before the end of a job.
        self.wait_for_steps(job, "runs/deck", first + 30)
        self.assertEqual(self.cluster.job(job)["Restarts"], "1")
        # The next start reads the deck again. Should the steps be done by then, it finds them so.
        (self.site / "next.toml").write_text(DECK.replace("steps = 200", f"steps = {first + 130}"))
        os.replace(self.site / "next.toml", deck)
        self.cluster.run("scancel", "--batch", "--signal=USR1", job)
        # 3. And to the end.
        facts = self.finish(job)
        self.assertEqual(facts["Restarts"], "2", self.output())
        self.assertEqual(facts["Requeue"], "1")
        self.assertEqual(self.output().count("weft train ended with 75"), 2, self.output())
        self.assertEqual(self.output().count("stopped on request after step"), 2, self.output())
        records = self.cluster.accounting(job)
        codes = [(r["JobState"], r["ExitCode"]) for r in records]
        self.assertEqual(codes[-1], ("COMPLETED", "0:0"))
        # 4. As many steps in one go.
        steps = self.steps("runs/deck")
        self.assertGreaterEqual(steps, first + 130)
        straight = self.sbatch("restart_chain", f"train.steps={steps}", "run.dir=runs/straight", options=(*shape, "--job-name=straight"))
        self.assertEqual(self.finish(straight)["Restarts"], "0")
        self.assertEqual(self.results("runs/deck"), self.results("runs/straight"))
        state = self.results("runs/deck")[3]
        self.show(f"job {job} preempted after {first} steps by job {urgent} (its nodes were free in {preempted:.1f} s), "
                  f"then stopped by SIGUSR1: Restarts={facts['Restarts']}, {facts['JobState']}, exit {facts['ExitCode']}; "
                  f"{steps} losses and state hash {state} bit-equal to job {straight}, which nobody disturbed\n"
                  f"  Slurm's records of job {job}: " + ", ".join(
                      f"{s} {c} {r['StartTime'][11:]}-{r['EndTime'][11:]}" for (s, c), r in zip(codes, records)))

    def test_time_left_is_honoured_without_a_signal(self):
        job = self.sbatch("restart_chain", "train.steps=1000000", "run.stop_margin=290",
                          options=("--nodes=1", "--ntasks-per-node=2", "--cpus-per-task=1", "--time=5", "--no-requeue",
                                   "--signal=CONT@1"))
        # The next of a chain waits for it. It is to do no more steps, and so it ends at once.
        following = self.sbatch("restart_chain", "train.steps=1",
                                options=("--nodes=1", "--ntasks-per-node=2", "--cpus-per-task=1", "--no-requeue",
                                         "--dependency=singleton"))
        began = time.monotonic()
        facts = self.finish(job, "FAILED", "75:0", seconds=280)
        left = self.steps("runs/deck")
        self.assertIn("asked to stop by the end of the Slurm job", self.output())
        self.assertIn("Slurm does not requeue this job", self.output())
        self.assertEqual(facts["Restarts"], "0")
        stopped_after = time.monotonic() - began
        self.finish(following)
        self.assertEqual(self.steps("runs/deck"), left)
        self.show(f"job {job} with --time=5 and a margin of 290 s stopped and saved {stopped_after:.0f} s after "
                  f"it was submitted, exit {facts['ExitCode']}; not requeued (--no-requeue), and says so; "
                  f"job {following} waited for it (singleton), found its steps done and ended with 0")

    def test_trigger_files(self):
        job = self.sbatch("train_1node", "train.steps=1000000", "train.checkpoint_every=0",
                          options=("--ntasks-per-node=2", "--cpus-per-task=1"))
        run = f"runs/deck-{job}"
        self.wait_for_steps(job, run, 5)
        self.assertFalse((self.site / run / "latest").exists())
        (self.site / run / "save").touch()
        self.until("the save", lambda: (self.site / run / "latest").exists())
        self.assertFalse((self.site / run / "save").exists())
        (self.site / run / "stop").touch()
        facts = self.finish(job, "FAILED", "75:0")
        self.assertEqual(facts["Restarts"], "0")
        self.assertIn(f"asked to save by {run}/save", self.output())
        self.assertIn(f"asked to stop by {run}/stop", self.output())
        self.assertIn("not queued again", self.output())
        self.assertTrue((self.site / run / "stopped").exists())
        # And a clip from what was saved.
        clip = self.sbatch("generate", f"run.dir={run}", "sampler.steps=2", "generate.num_frames=3",
                           "generate.image_size=[24,16]", options=("--ntasks-per-node=1", "--cpus-per-task=1"))
        self.finish(clip)
        self.assertTrue((self.site / run / "generated" / "sample_0000.mp4").exists())
        self.show(f"job {job}: RUN/save saved at once, RUN/stop ended it with exit {facts['ExitCode']} and no requeue; "
                  f"job {clip} made a clip from it")

    def test_a_wrong_deck_ends_the_job(self):
        job = self.sbatch("train_1node", "train.stepps=3", options=("--ntasks-per-node=2", "--cpus-per-task=1"))
        facts = self.finish(job, "FAILED", "2:0")
        self.assertEqual(facts["Restarts"], "0")
        self.assertIn("did you mean train.steps", self.output())
        self.show(f"job {job} with a key that is none: exit {facts['ExitCode']}, not requeued")

    def test_gpus_that_cannot_be_used_end_the_job(self):
        job = self.sbatch("train_1node", options=("--ntasks-per-node=2", "--cpus-per-task=1"), device="cuda")
        self.finish(job, "FAILED", "2:0")
        self.assertIn('device.kind = "cuda": ', self.output())

    def test_one_element_of_an_array_is_queued_again(self):
        """The last one, whose SLURM_JOB_ID is the array's, with a program in weft's place: the others stay as they are. The job
        that an element submits has the array's variables in its environment, and is another all the same."""
        program = self.site / "program"
        program.write_text("""#!/bin/sh
for word in "$@"; do case $word in run.dir=*) run=${word#run.dir=} ;; esac; done
trap 'ln -sfn "step_$(wc -l <"$run/starts")" "$run/latest"; exit 75' USR1
mkdir -p "$run"; echo "$SLURM_JOB_ID $SLURM_JOB_END_TIME" >>"$run/starts"
while [ ! -e go ]; do sleep 0.1; done
""")
        program.chmod(0o755)
        shape = ("--ntasks-per-node=1", "--cpus-per-task=1", "--gpus-per-node=2", "--time=10")
        array = self.sbatch("train_1node", "run.dir=run of %a", options=("--array=1-4", *shape), WEFT="./program")

        def starts(name):
            path = self.site / name / "starts"
            return [line.split() for line in path.read_text().splitlines()] if path.exists() else []
        runs = [f"run of {k}" for k in range(1, 5)]
        self.until("four elements", lambda: all(len(starts(run)) == 1 for run in runs))
        ids = [starts(run)[0][0] for run in runs]
        self.assertEqual((len(set(ids)), ids[3]), (4, array))
        after = self.cluster.run("sbatch", "--parsable", "-p", "urgent", f"--dependency=afterok:{array}", "--output=after.txt",
                                 '--wrap=date; cat "run of 4/starts"', cwd=self.site).strip()
        self.jobs.append(after)
        self.cluster.run("scancel", "--signal=USR1", f"{array}_4")
        self.until("the second start", lambda: len(starts(runs[3])) == 2)
        inner = self.sbatch("train_1node", "run.dir=inner", options=shape, WEFT="./program",
                            SLURM_ARRAY_JOB_ID=array, SLURM_ARRAY_TASK_ID="1")
        self.until("the inner job", lambda: len(starts("inner")) == 1)
        self.cluster.run("scancel", "--signal=USR1", inner)
        self.until("its second start", lambda: len(starts("inner")) == 2)
        self.assertEqual(self.cluster.job(after)["JobState"], "PENDING")
        (self.site / "go").touch()
        facts = [self.finish(f"{array}_{k}") for k in range(1, 5)]
        self.assertEqual([f["Restarts"] for f in facts], ["0", "0", "0", "1"], self.output())
        self.assertEqual(self.finish(inner)["Restarts"], "1")
        self.finish(after)
        self.assertEqual((self.site / "after.txt").read_text().count("\n"), 3)
        self.assertEqual([len(starts(run)) for run in runs], [1, 1, 1, 2])
        for run in (*runs, "inner"):
            for _, end in starts(run):
                self.assertLess(abs(int(end) - time.time() - 600), 300)  # one number: ten minutes after the start
        self.assertEqual([len(self.cluster.accounting(job)) for job in ids], [1, 1, 1, 2])
        self.show(f"array {array}: element 4, whose SLURM_JOB_ID is {array} too, stopped by SIGUSR1 and queued again; the others "
                  f"started once and ended once, and then job {after} (afterok); job {inner}, with the variables of element 1, queued itself again")

    def test_ingest_on_two_nodes(self):
        (self.site / "deck.toml").write_text("[ingest]\nheight = 32\nwidth = 32\nframes = [5]\n")
        sources = [f"lavfi:testsrc2=size=64x64:rate=10:duration={n}" for n in (2, 3, 4)]
        footage = f"ingest.inputs={json.dumps(sources)}"
        job = self.sbatch("ingest", footage, "ingest.output=clips.h5",
                          options=("--nodes=2", "--ntasks-per-node=1", "--cpus-per-task=1"))
        self.finish(job)
        self.assertIn("weft ingest ended with 0", self.output())
        self.cluster.run(WEFT, "ingest", "deck.toml", footage, "ingest.output=alone.h5", cwd=self.site)
        self.assertEqual((self.site / "clips.h5").read_bytes(), (self.site / "alone.h5").read_bytes())
        self.show(f"job {job} made the store on two nodes that one process makes")

    def test_gpus_asked_for_in_each_way(self):
        """On nodes whose GPUs are empty files, with a program in weft's place that notes what it is given."""
        program = self.site / "a program"
        program.write_text("""#!/bin/sh
echo "$@" >"said_$SLURM_JOB_ID"
""")
        program.chmod(0o755)
        shape = ("--ntasks-per-node=2", "--cpus-per-task=1")
        jobs = {}

        def submit(*options):
            return self.sbatch("train_1node", options=(*shape, *options), device=None, WEFT="./a program")
        for way in ("--gres=gpu:2", "--gpus-per-node=2", "--gpus-per-node=0 --gpus=2", "--gpus-per-node=0 --gpus-per-task=1"):
            jobs[way] = submit(*way.split())
        none = submit("--gpus-per-node=0")
        for way, job in jobs.items():
            self.finish(job)
            self.assertIn(" device.kind=cuda", (self.site / f"said_{job}").read_text(), way)
        self.finish(none)
        self.assertNotIn("device.kind", (self.site / f"said_{none}").read_text())
        self.show(f"jobs {', '.join(jobs.values())}: {', '.join(jobs)} all set device.kind=cuda; job {none} without GPUs does not")

    def test_nothing_of_the_environment_is_exported(self):
        """SBATCH_EXPORT=NONE, a custom of some sites: WEFT is build/weft then, or what jobscripts/weft.env says."""
        (self.site / "build" / "weft").unlink()
        (self.site / "build" / "weft").write_text('#!/bin/sh\necho "$@" >>said\n')
        (self.site / "build" / "weft").chmod(0o755)
        shape = ("--ntasks-per-node=1", "--cpus-per-task=1", "--gpus-per-node=0")
        job = self.sbatch("train_1node", "run.dir=named", device=None, options=shape, SBATCH_EXPORT="NONE", WEFT="/bin/false")
        self.finish(job)
        self.assertEqual((self.site / "said").read_text(), "train deck.toml run.dir=named run.dir=named\n")
        self.show(f"job {job} under SBATCH_EXPORT=NONE, whose deck and run folder are arguments")

    @unittest.skipUnless(open_mpi(), "MPICH's mpiexec sometimes ends with 0 in place of 75 after a signal (docs/mpi.md)")
    def test_mpirun_instead_of_srun(self):
        """The one line of the site's file that a site without PMIx changes."""
        (self.site / "site.env").write_text(f'WEFT_LAUNCH="{MPIEXEC} --map-by slot:PE=${{SLURM_CPUS_PER_TASK:-1}}"\n'
                                            'WEFT_SCRATCH=scratch\nWEFT_STAGE=\'$DISK\'\n')
        (self.site / "disk").mkdir()
        footage = 'ingest.inputs=["lavfi:testsrc2=size=64x64:rate=10:duration=12"]'
        self.cluster.run(WEFT, "ingest", "deck.toml", footage, "ingest.output=clips.h5", "ingest.frames=[3]", "ingest.height=24",
                         "ingest.width=16", cwd=self.site)
        job = self.sbatch("train_1node", "train.steps=1000000", "data.path=clips.h5",
                          options=("--ntasks-per-node=2", "--cpus-per-task=1", "--no-requeue"), WEFT_ENV="site.env", DISK="disk",
                          OMPI_ALLOW_RUN_AS_ROOT="1", OMPI_ALLOW_RUN_AS_ROOT_CONFIRM="1",
                          OMPI_MCA_rmaps_base_oversubscribe="1", OMPI_MCA_hwloc_base_binding_policy="none")
        run = f"scratch/runs/deck-{job}"
        self.wait_for_steps(job, run, 5)
        self.cluster.run("scancel", "--batch", "--signal=USR1", job)
        facts = self.finish(job, "FAILED", "75:0")
        self.assertIn(f"space for '{run}': ", self.output())
        self.assertIn("of 1 node: copied on 1, there already on 0", self.output())
        self.assertEqual(len(list(self.site.glob("disk/weft-stores-*/*.h5"))), 1)
        self.show(f"job {job} under {MPIEXEC}, one node: its store copied to a disk of the node; SIGUSR1 to the script reached the ranks, "
                  f"exit {facts['ExitCode']}")

    def pipeline(self, *words, **variables):
        """What jobscripts/pipeline.sh submits: {step: job}, and what it says."""
        said = self.cluster.run("jobscripts/pipeline.sh", "--ntasks-per-node=1", "--cpus-per-task=1", "device.kind=cpu", *words, cwd=self.site,
                                environment=SUBMITTED | variables)
        jobs = dict(re.findall(r"(?m)^(\w+): job (\d+)$", said))
        self.jobs += jobs.values()
        self.assertIn("cancel all: scancel " + " ".join(jobs.values()), said)
        return jobs

    def test_from_footage_to_clips(self):
        """The whole pipeline with tiny models."""
        vae = TINY_GENERATE_DECK[TINY_GENERATE_DECK.index("[vae]"):TINY_GENERATE_DECK.index("[t5]")].replace('weights = "random:2"', "")
        train = "[train]\nsteps = 2\nbatch_size = 1\nmicro_batches = 2\n"
        run = '[run]\nseed = 7\nthreads = 1\n'
        (self.site / "vae.toml").write_text(f'{run}[model]\nname = "vae"\n{vae}{train}')
        deck = TINY_GENERATE_DECK.replace('weights = "random:1"', "").replace('weights = "random:2"', "")
        (self.site / "tiny.toml").write_text(deck + train + "[ingest]\nheight = 32\nwidth = 48\nframes = [17]\n"
                                             'inputs = ["lavfi:testsrc2=size=96x64:rate=10:duration=7"]\n')
        jobs = self.pipeline("tiny.toml", "vae:vae.toml", "encode:encode.text=false", "generate:generate.prompts=[]",
                             "generate:generate.num_samples=2")
        self.assertEqual(list(jobs), ["ingest", "vae", "encode", "train", "generate"])
        self.finish(jobs["generate"])
        facts = [self.finish(job) for job in jobs.values()]
        for one, next_one in zip(facts, facts[1:]):
            self.assertLessEqual(one["EndTime"], next_one["StartTime"])
        work = self.site / "runs/tiny"
        self.assertEqual([self.steps("runs/tiny/vae"), self.steps("runs/tiny/train")], [2, 2])
        self.assertEqual(len(list((work / "generated").glob("*.mp4"))), 2)
        self.show(f"jobs {', '.join(jobs.values())}: ingest, VAE, encode, training and generate, one after the other, two clips")

    def test_a_pipeline_that_fails_and_goes_on(self):
        program = self.site / "program"
        program.write_text('#!/bin/sh\necho "$1" >>done\n[ "$1" != encode ] || [ ! -e bad ] || exit 3\n')
        program.chmod(0o755)
        (self.site / "bad").touch()
        jobs = self.pipeline("deck.toml", "vae:deck.toml", WEFT="./program")
        self.finish(jobs["encode"], "FAILED", "3:0")
        for step in "train", "generate":
            self.assertEqual(self.finish(jobs[step], "CANCELLED")["Reason"], "DependencyNeverSatisfied")
        (self.site / "bad").unlink()
        rest = self.pipeline("deck.toml", "vae:deck.toml", "--from=encode", WEFT="./program")
        self.assertEqual(list(rest), ["encode", "train", "generate"])
        self.finish(rest["generate"])
        self.assertEqual((self.site / "done").read_text().split(), ["ingest", "train", "encode", "encode", "train", "generate"])
        self.show(f"job {jobs['encode']} failed with exit 3, and Slurm cancelled jobs {jobs['train']} and {jobs['generate']}; "
                  f"--from=encode submitted {', '.join(rest.values())}, which ended with 0")

    def test_no_requeue_for_ever(self):
        """With programs in weft's place that always ask to be started again."""
        stuck = self.site / "stuck"
        stuck.write_text("#!/bin/sh\nexit 75\n")
        # One step further each time; under srun with one task, it alone writes.
        crawling = self.site / "crawling"
        crawling.write_text("""#!/bin/sh
for word in "$@"; do case $word in run.dir=*) run=${word#run.dir=} ;; esac; done
mkdir -p "$run"; old=$(readlink "$run/latest"); old=${old#step_}
ln -sfn "step_$((${old:-0} + 1))" "$run/latest"
exit 75
""")
        # Stopped at its first start while its stores were copied, and later without a reason.
        staging = self.site / "staging"
        staging.write_text("""#!/bin/sh
for word in "$@"; do case $word in run.dir=*) run=${word#run.dir=} ;; esac; done
[ "$SLURM_RESTART_COUNT" = 1 ] || touch "$run/stopped_while_staging"
exit 75
""")
        losing = self.site / "losing"
        # Its second start makes a clip, whose line nobody is left to gather.
        losing.write_text("#!/bin/sh\n[ $SLURM_RESTART_COUNT != 1 ] || echo a clip >> 'an out/generated.rank0.jsonl'\nkill -9 $$\n")
        (self.site / "an out").mkdir()
        for program in (stuck, crawling, staging, losing):
            program.chmod(0o755)
        shape = ("--ntasks-per-node=1", "--cpus-per-task=1")
        one = self.sbatch("train_1node", options=shape, WEFT="./stuck")
        other = self.sbatch("train_1node", options=shape, WEFT="./crawling", MAX_RESTARTS="1")
        third = self.sbatch("generate", 'generate.output="an out"', options=shape, WEFT="./losing")
        self.assertEqual(self.finish(third, "FAILED", "137:0")["Restarts"], "2")
        self.assertIn("a rank was killed again, and nothing more was begun or made: not queued again", self.output())
        fourth = self.sbatch("train_1node", options=shape, WEFT="./staging")
        self.assertEqual(self.finish(fourth, "FAILED", "75:0")["Restarts"], "1")
        self.assertIn("no step further", self.output())
        self.assertEqual(self.finish(one, "FAILED", "75:0")["Restarts"], "0")
        self.assertIn("no step further", self.output())
        self.assertEqual(self.finish(other, "FAILED", "75:0")["Restarts"], "1")
        self.assertIn("started again 1 times already", self.output())
        self.assertEqual(os.readlink(self.site / f"runs/deck-{other}" / "latest"), "step_2")
        self.show(f"jobs that always end with 75: {one} makes no progress and is not requeued, {other} was requeued as "
                  f"often as MAX_RESTARTS allows; {third} loses its ranks, with a clip made, and then without: exit 137")

    def test_the_large_job_is_accepted(self):
        said = self.cluster.run("sbatch", "--test-only", "--partition=large", "jobscripts/train_16nodes.sbatch", cwd=self.site)
        self.assertIn("on nodes n[1-16]", said)
        self.show("train_16nodes.sbatch (not run): " + said.strip().removeprefix("sbatch: "))


if __name__ == "__main__":
    unittest.main()
