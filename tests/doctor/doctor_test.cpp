// The doctor's verdict on facts that this machine cannot show: GPUs, many hosts, slow ranks. What
// it can show is in tests/e2e/test_doctor.py.
#include <gmock/gmock.h>

#include "core/json.h"
#include "doctor/doctor.h"

namespace weft {
namespace {

using testing::HasSubstr;
using Level = Finding::Level;

GpuFacts gpu(int host, int index) {
  GpuFacts g;
  g.uuid = fmt::format("GPU-{}-{}", host, index);
  g.name = "NVIDIA H200";
  g.bus = fmt::format("0000:{:02x}:00.0", index + 1);
  g.numa_node = index / 2;
  g.pcie_width = g.pcie_width_most = 16;
  g.ecc_uncorrected = 0;
  return g;
}

// `hosts` hosts of two NUMA nodes and four GPUs, a rank on each GPU, 8 cores each, everything as it
// should be.
std::vector<RankFacts> healthy(int hosts) {
  std::vector<RankFacts> ranks;
  for (int h = 0; h < hosts; ++h) {
    std::vector<GpuFacts> gpus;
    for (int i = 0; i < 4; ++i) {
      gpus.push_back(gpu(h, i));
      gpus.back().processes = {{1000 + 10 * h + i, "weft", 2.5}};
    }
    for (int i = 0; i < 4; ++i) {
      RankFacts r;
      r.rank = 4 * h + i;
      r.host_rank = i;
      r.host_ranks = 4;
      r.pid = 1000 + 10 * h + i;
      r.host = fmt::format("node{}", h);
      r.cpu = "Xeon";
      r.instructions = "AVX-512";
      for (int c = 0; c < 8; ++c) r.cores.push_back(8 * i + c);
      r.numa = {i / 2};
      r.host_cores = 32;
      r.host_numa_nodes = 2;
      r.threads = 8;
      r.memory_gib = r.available_gib = 256;
      r.shared_memory_gib = 128;
      r.huge_pages = "madvise";
      r.limits = {{"locked memory", -1}, {"stack", -1}, {"open files", 65536}};
      r.versions = {{"weft", "0.1.0 (commit a)"}, {"NCCL", "2.28.3"}, {"CUDA driver", "13.0"}};
      r.environment = {{"NCCL_DEBUG", "WARN"}, {"CUDA_VISIBLE_DEVICES", std::to_string(i)}};
      r.device = "NVIDIA H200, 139.8 GiB";
      r.gpu = gpus[i].uuid;
      r.host_gpus = gpus;
      r.measured = {{"device copy GB/s", 4000}, {"host to device GB/s", 55}};
      r.wrong = {{"product bf16", 0}, {"device memory", 0}};
      r.operations = {{"attention bf16", 0}, {"layer norm", 0}};
      ranks.push_back(r);
    }
  }
  return ranks;
}

// Findings that are not OK.
std::vector<Finding> troubles(const std::vector<RankFacts>& ranks) {
  std::vector<Finding> out;
  for (const Finding& f : judge(ranks))
    if (f.level != Level::ok) out.push_back(f);
  return out;
}

// The one trouble there is; with what to do.
Finding trouble(const std::vector<RankFacts>& ranks) {
  const auto found = troubles(ranks);
  std::string all;
  for (const Finding& f : found) all += f.what + "\n";
  EXPECT_EQ(found.size(), 1u) << all;
  if (found.empty()) return {};
  EXPECT_GT(found[0].todo.size(), 10u);
  return found[0];
}

TEST(Doctor, FindsNothingWhereNothingIsWrong) {
  EXPECT_EQ(troubles(healthy(1)).size(), 0u);
  EXPECT_EQ(troubles(healthy(3)).size(), 0u);
  EXPECT_EQ(verdict(judge(healthy(3))), Exit::done);
}

TEST(Doctor, NamesTheRankWhoseLibraryDiffers) {
  auto ranks = healthy(2);
  ranks[5].versions["NCCL"] = "2.21.5";
  const Finding f = trouble(ranks);
  EXPECT_EQ(f.what, "NCCL differs: 2.28.3 on ranks 0-4,6-7; 2.21.5 on rank 5");
  EXPECT_EQ(f.level, Level::fail);
  EXPECT_EQ(verdict(judge(ranks)), Exit::usage);
}

TEST(Doctor, TellsVariablesThatMatterFromThoseOfTheLauncher) {
  auto ranks = healthy(2);
  // What Open MPI itself sets on nodes other than the first.
  for (int r = 4; r < 8; ++r) {
    auto& e = ranks[r].environment;
    e["OMPI_MCA_plm"] = "rsh";
    e["OMPI_MCA_orte_ess_vpid"] = std::to_string(r);
    e["SLURM_LOCALID"] = std::to_string(r % 4);
    e["LD_LIBRARY_PATH"] = "/opt/a:/opt/b:/opt/a:";
    ranks[r - 4].environment["LD_LIBRARY_PATH"] = "/opt/a:/opt/b";
  }
  EXPECT_EQ(troubles(ranks).size(), 0u);
  ranks[7].environment["LD_LIBRARY_PATH"] = "/opt/b";
  EXPECT_EQ(trouble(ranks).level, Level::warn);
  ranks[7].environment["LD_LIBRARY_PATH"] = "/opt/a:/opt/b";
  ranks[7].environment["OMPI_MCA_btl"] = "tcp,self";
  EXPECT_EQ(trouble(ranks).level, Level::fail);
  ranks[7].environment.erase("OMPI_MCA_btl");
  ranks[7].environment["NCCL_DEBUG"] = "INFO";
  EXPECT_THAT(trouble(ranks).what, HasSubstr("NCCL_DEBUG differs"));
}

TEST(Doctor, OnlyWarnsOfAnotherDriver) {
  auto ranks = healthy(2);
  for (int r = 4; r < 8; ++r) ranks[r].versions["CUDA driver"] = "12.8";
  EXPECT_EQ(trouble(ranks).level, Level::warn);
  EXPECT_EQ(verdict(judge(ranks)), Exit::done);
}

TEST(Doctor, FailsForTwoRanksOnOneGpuUnlessAskedFor) {
  auto ranks = healthy(1);
  ranks[1].gpu = ranks[0].gpu;
  ranks[1].numa = {0};
  for (RankFacts& r : ranks) {
    r.host_gpus[0].processes.push_back(ranks[1].host_gpus[1].processes[0]);
    r.host_gpus[1].processes.clear();
  }
  const Finding f = trouble(ranks);
  EXPECT_THAT(f.what, HasSubstr("GPU GPU-0-0 on node0 serves ranks 0-1"));
  EXPECT_EQ(f.level, Level::fail);
  ranks[0].shares_gpu = ranks[1].shares_gpu = true;
  EXPECT_EQ(trouble(ranks).level, Level::warn);
}

TEST(Doctor, FailsForOurContextOnAForeignGpu) {
  auto ranks = healthy(1);
  for (RankFacts& r : ranks) r.host_gpus[0].processes.push_back({ranks[2].pid, "weft", 0.5});
  const Finding f = trouble(ranks);
  EXPECT_EQ(f.level, Level::fail);
  EXPECT_EQ(f.what, "rank 2 holds a context on GPU GPU-0-0 on node0, which is not its own");
}

TEST(Doctor, ReportsOthersOnOurGpus) {
  auto ranks = healthy(1);
  for (RankFacts& r : ranks) r.host_gpus[3].processes.push_back({77, "python3", 30});
  const Finding f = trouble(ranks);
  EXPECT_EQ(f.level, Level::warn);
  EXPECT_THAT(f.what, HasSubstr("GPU-0-3 on node0 is also used by python3 (process 77, 30.0 GiB)"));
}

TEST(Doctor, KnowsThatAContainerHidesProcessNumbers) {
  auto ranks = healthy(1);
  for (RankFacts& r : ranks)
    for (GpuFacts& g : r.host_gpus) g.processes[0].pid += 500000;  // the host's numbers of our own
  EXPECT_EQ(troubles(ranks).size(), 0u);
  for (RankFacts& r : ranks) r.host_gpus[1].processes.push_back({500900, "", 8});
  EXPECT_THAT(trouble(ranks).todo, HasSubstr("may be weft's own"));
}

TEST(Doctor, TakesWrongResultsAndMemoryErrorsForHardware) {
  auto ranks = healthy(2);
  ranks[6].wrong["product bf16"] = 3;
  EXPECT_THAT(trouble(ranks).what,
              HasSubstr("product bf16: not the known answer on rank 6 on node1"));
  EXPECT_EQ(verdict(judge(ranks)), Exit::hardware);
  ranks = healthy(1);
  for (RankFacts& r : ranks) r.host_gpus[2].ecc_uncorrected = 2;
  EXPECT_THAT(trouble(ranks).what, HasSubstr("2 uncorrected memory errors"));
  EXPECT_EQ(verdict(judge(ranks)), Exit::hardware);
}

TEST(Doctor, NamesEveryOperationThatIsWrongInOneFinding) {
  auto ranks = healthy(2);
  ranks[6].operations["layer norm"] = 3;
  ranks[7].operations["attention bf16"] = 1;
  const Finding f = trouble(ranks);
  EXPECT_EQ(f.level, Level::fail);
  EXPECT_EQ(f.what,
            "operations compute wrong results: layer norm on rank 6 on node1 GPU-1-2 (3 values), "
            "attention bf16 on rank 7 on node1 GPU-1-3 (1 value)");
  EXPECT_EQ(verdict(judge(ranks)), Exit::hardware);
}

TEST(Doctor, ComparesThisProcessorsProductWithAPlainLoop) {
  RankFacts facts;
  check_operations(facts);
  EXPECT_EQ(facts.operations, (std::map<std::string, std::int64_t>{{"matrix product bf16", 0},
                                                                   {"matrix product f32", 0}}));
}

TEST(Doctor, AFaultOfTheDeviceIsHardwareOneOfUsageIsNot) {
  auto ranks = healthy(1);
  ranks[1].faults.push_back({static_cast<int>(Exit::hardware), "device copies", "CUDA: bad", "x"});
  EXPECT_EQ(verdict(judge(ranks)), Exit::hardware);
  ranks[1].faults[0].code = static_cast<int>(Exit::usage);
  EXPECT_EQ(verdict(judge(ranks)), Exit::usage);
}

TEST(Doctor, NamesTheRankThatIsSlow) {
  auto ranks = healthy(2);
  ranks[3].measured["host to device GB/s"] = 43;  // 22 % below 55
  EXPECT_THAT(trouble(ranks).what,
              HasSubstr("host to device GB/s: slower than the median of 55: rank 3"));
  ranks[3].measured["host to device GB/s"] = 45;  // 18 %
  EXPECT_EQ(troubles(ranks).size(), 0u);
}

TEST(Doctor, FindsRanksOnTheSameCores) {
  auto ranks = healthy(1);
  ranks[1].cores = ranks[0].cores;
  const Finding f = trouble(ranks);
  EXPECT_EQ(f.level, Level::fail);
  EXPECT_EQ(f.what, "ranks 0-1 on node0 are bound to the same cores 0-7");
}

TEST(Doctor, WarnsOfMoreThreadsThanCores) {
  auto ranks = healthy(1);
  for (RankFacts& r : ranks) {
    r.cores.clear();
    for (int c = 0; c < 32; ++c) r.cores.push_back(c);
    r.threads = 16;
    r.host_numa_nodes = 1;
    r.numa = {0};
  }
  EXPECT_EQ(trouble(ranks).what, "ranks 0-3 on node0 compute with 64 threads on 32 cores");
}

TEST(Doctor, WarnsOfACpuFarFromItsGpu) {
  auto ranks = healthy(1);
  ranks[0].numa = {1};
  EXPECT_EQ(trouble(ranks).what, "rank 0 runs on NUMA node 1, its GPU is at node 0");
}

TEST(Doctor, FailsWhenSrunStartedTasksThatDoNotKnowEachOther) {
  auto ranks = healthy(1);
  ranks.resize(1);
  ranks[0].environment["SLURM_STEP_NUM_TASKS"] = "4";
  EXPECT_EQ(trouble(ranks).what, "srun started 4 tasks, but each is alone: MPI sees 1 rank");
  // mpirun -n 1 inside a job script is one rank by wish, Open MPI's and MPICH's.
  for (const char* size : {"OMPI_COMM_WORLD_SIZE", "PMI_SIZE"}) {
    ranks[0].environment[size] = "1";
    EXPECT_EQ(troubles(ranks).size(), 0u);
    ranks[0].environment[size] = "2";
    EXPECT_EQ(trouble(ranks).what,
              "the launcher started 2 tasks, but each is alone: MPI sees 1 rank");
    ranks[0].environment.erase(size);
  }
}

TEST(Doctor, TakesSlurmsNumbersForRanksOnlyWhereSrunStartedThem) {
  auto ranks = healthy(2);
  for (int r = 0; r < 8; ++r) {
    ranks[r].environment["SLURM_PROCID"] = std::to_string(r / 4);  // of the daemons of mpiexec
    ranks[r].environment["PMI_RANK"] = std::to_string(r);
    ranks[r].environment["PMI_SIZE"] = "8";
  }
  EXPECT_EQ(troubles(ranks).size(), 0u);
  for (RankFacts& r : ranks) r.environment.erase("PMI_SIZE");
  EXPECT_EQ(trouble(ranks).what, "MPI numbers ranks 1-7 unlike Slurm");
}

TEST(Doctor, FactsTravelUnchanged) {
  const RankFacts before = healthy(1)[2];
  const RankFacts after = parse_json(dump_json(nlohmann::json(before))).get<RankFacts>();
  EXPECT_EQ(nlohmann::json(before), nlohmann::json(after));
  EXPECT_EQ(after.host_gpus[3].processes[0].pid, before.host_gpus[3].processes[0].pid);
}

TEST(Doctor, WritesRanksShortly) {
  EXPECT_EQ(ranks_text({3}), "rank 3");
  EXPECT_EQ(ranks_text({0, 1, 2, 8, 10, 11}), "ranks 0-2,8,10-11");
}

}  // namespace
}  // namespace weft
