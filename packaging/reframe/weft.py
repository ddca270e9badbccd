"""ReFrame tests of an installed weft: its own checks (`weft selftest`) and a training, on two ranks, by the lines that they print.

    reframe -C SETTINGS -c weft.py -r --performance-report           weft on the PATH
    reframe ... -S modules=weft/VERSION                              as a module
    reframe ... -S program=/opt/weft/bin/weft -S num_tasks=8         another program, more ranks

No footage, weights or source tree are needed. Performance figures have no reference: give your system's by -S reference=... or
compare runs (reframe --performance-compare).
"""

import reframe as rfm
import reframe.utility.sanity as sn


class Weft(rfm.RunOnlyRegressionTest):
    program = variable(str, value='weft')
    valid_systems = ['*']
    valid_prog_environs = ['*']
    num_tasks = 2
    num_cpus_per_task = 1
    time_limit = '10m'
    tags = {'weft'}

    @run_before('run')
    def one_thread_a_core(self):
        self.executable = self.program
        self.env_vars['OMP_NUM_THREADS'] = self.num_cpus_per_task


@rfm.simple_test
class WeftSelftest(Weft):
    descr = 'every system of weft, small, on every rank'
    executable_opts = ['selftest', '2>&1']

    @sanity_function
    def passed(self):
        return sn.assert_found(rf'^selftest: passed \d+ checks on {self.num_tasks} ranks in ', self.stdout)

    @performance_function('s')
    def duration(self):
        return sn.extractsingle(r'^selftest: passed .* in ([\d.]+) s', self.stdout, 1, float)


@rfm.simple_test
class WeftTraining(Weft):
    descr = 'twenty steps of the smoke deck'
    steps = 20

    @run_before('run')
    def write_the_deck(self):
        self.prerun_cmds = [f'{self.program} init smoke smoke.toml']
        self.executable_opts = ['train', 'smoke.toml', f'train.steps={self.steps}', 'train.log_every=1', '2>&1']

    @sanity_function
    def trained(self):
        losses = sn.extractall(r'^step +\d+/\d+  loss ([\d.]+) ', self.stdout, 1, float)
        return sn.all([
            sn.assert_found(r'^speed +[\d.]+ clips/s, ', self.stdout),
            # Launched by another MPI, the tasks would be jobs of one rank each.
            sn.assert_found(rf'^ranks +{self.num_tasks} \(', self.stdout),
            sn.assert_lt(sn.avg(losses[-5:]), sn.avg(losses[:5]), 'the loss did not fall: {0}, before {1}'),
        ])

    @performance_function('s')
    def seconds_a_step(self):
        return sn.extractsingle(r' steps, median ([\d.]+) s', self.stdout, 1, float)
