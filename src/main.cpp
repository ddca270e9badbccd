// weft: one binary, `mpirun -n N weft COMMAND DECK.toml [section.key=value ...]`.
#include <mpi.h>
#include <unistd.h>

#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <new>
#include <system_error>

#include "cli/command_line.h"
#include "core/error.h"
#include "core/faults/crash.h"
#include "core/file.h"
#include "core/host.h"
#include "core/log.h"
#include "core/progress/progress.h"
#include "core/stop_signals.h"
#include "tensor/device.h"

namespace {

// Says once what went wrong and ends every rank.
int end_with(weft::Error& e, int size) {
  // The launcher sends SIGTERM when another rank has reported the same and ended.
  if (weft::log::rank() != 0) weft::crash::end_on_stop_signal(e.code());
  weft::log::report(e);
  const int code = static_cast<int>(e.code());
  weft::crash::end_within(10, e.code());  // the status file may lie on what hangs
  weft::note_failure(e);
  alarm(0);
  if (size > 1) {
    std::fflush(nullptr);
    MPI_Abort(MPI_COMM_WORLD, code);
  }
  return code;
}

// As the launcher tells it, before MPI does.
int rank_of_launcher() {
  for (const char* name : {"OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID"})
    if (const char* rank = std::getenv(name)) return std::atoi(rank);
  return 0;
}

// A launcher of another MPI starts N programs that know nothing of each other.
void warn_if_alone(int size) {
  if (size > 1) return;
  for (const char* name : {"OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS"})
    if (const char* tasks = std::getenv(name); tasks != nullptr && std::atoi(tasks) > 1) {
      weft::log::warn(
          "{} tasks were started ({}), but MPI sees 1 rank: each does the whole job. Use the "
          "launcher of the MPI that `weft --version` names, or srun --mpi=pmix",
          tasks, name);
      return;
    }
}

}  // namespace

int main(int argc, char** argv) {
  if (const auto code = weft::run_as_child(argc, argv)) return *code;
  weft::limit_spinning(argv);
  // A request to stop that comes from now on is heeded once the command is known.
  weft::hold_stop_signals();
  // A limit on file sizes is an error of write(), not the death of the job.
  std::signal(SIGXFSZ, SIG_IGN);
  weft::crash::watch();
  try {
    weft::check_mpi();
  } catch (weft::Error& e) {
    // MPI_Init has not brought the ranks together yet: rank 0 may start, and report, much later.
    weft::log::set_rank(rank_of_launcher(), 1);
    if (weft::log::rank() != 0) {
      weft::crash::end_on_stop_signal(e.code());
      sleep(8);
    }
    return end_with(e, 1);
  }
  // Step 1: MPI. Background threads reduce gradients and save checkpoints, so they may all call it.
  // A rank started without mpirun spawns no others: Open MPI need not start its daemon first, which
  // takes a third of the time of a short command. Other MPIs do not read it.
  setenv("OMPI_MCA_ess_singleton_isolated", "1", 0);
  int provided = 0, rank = 0, size = 1;
  MPI_Init_thread(&argc, &argv, MPI_THREAD_MULTIPLE, &provided);
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  MPI_Comm_size(MPI_COMM_WORLD, &size);
  weft::log::set_rank(rank, size);

  int code = 0;
  try {
    // Step 2: the command line.
    const weft::Invocation invocation = weft::parse_command_line(argc, argv);
    if (invocation.heeds_stops)
      warn_if_alone(size);
    else
      weft::release_stop_signals();
    // Step 3: the job.
    code = invocation.run(MPI_COMM_WORLD);
  } catch (weft::Error& e) {
    code = end_with(e, size);
  } catch (const std::bad_alloc&) {
    weft::Error memory(weft::Exit::usage,
                       fmt::format("out of memory{}: {:.2f} GiB are resident and more was refused",
                                   weft::crash::place(), weft::gib(weft::resident_bytes())),
                       "fewer ranks a host, a smaller job (docs/errors.md), or a higher limit: "
                       "ulimit -v, the memory of the container or of the Slurm job");
    code = end_with(memory, size);
  } catch (const std::system_error& e) {
    weft::Error failed = weft::error_of(e, weft::Exit::data);
    code = end_with(failed, size);
  } catch (const std::exception& e) {
    weft::Error bug(weft::Exit::internal, e.what() + weft::crash::place(),
                    "this is a bug in weft, please report it with the log");
    code = end_with(bug, size);
  }
  // Step 4: the documented exit code.
  MPI_Finalize();
  return code;
}
