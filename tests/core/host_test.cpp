#include "core/host.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <fstream>

namespace weft {
namespace {

namespace fs = std::filesystem;

constexpr std::size_t mib = std::size_t{1} << 20;

// A tree that stands for /proc and /sys of a host with 64 MiB, 48 of them available.
class HostMemoryTest : public testing::Test {
 protected:
  HostMemoryTest() {
    put("proc/meminfo", "MemTotal: 65536 kB\nMemFree: 1 kB\nMemAvailable: 49152 kB\n");
  }
  ~HostMemoryTest() override { fs::remove_all(root_); }

  void put(const std::string& file, const std::string& text) {
    fs::create_directories((root_ / file).parent_path());
    std::ofstream(root_ / file) << text;
  }
  void expect(std::size_t total, std::size_t available) {
    const HostMemory m = host_memory(root_);
    EXPECT_EQ(m.total, total * mib);
    EXPECT_EQ(m.available, available * mib);
  }

  const fs::path root_ =
      fs::temp_directory_path() / ("weft_host_memory_test_" + std::to_string(::getpid()));
};

TEST_F(HostMemoryTest, WithoutControlGroupsItIsTheHosts) {
  expect(64, 48);
  put("proc/self/cgroup", "0::/user.slice\n");
  put("sys/fs/cgroup/user.slice/memory.max", "max\n");
  put("sys/fs/cgroup/user.slice/memory.current", "1048576\n");
  put("sys/fs/cgroup/user.slice/cpu.max", "max 100000\n");
  expect(64, 48);
  EXPECT_EQ(quota_cores(root_), 0);
}

// Slurm limits the job's group, not the step's below it; the root of a container's tree is mounted
// as the top.
TEST_F(HostMemoryTest, TheTightestGroupAboveCounts) {
  put("proc/self/cgroup", "0::/slurm/job_1/step_0\n");
  put("sys/fs/cgroup/slurm/job_1/step_0/memory.max", "max\n");
  put("sys/fs/cgroup/slurm/job_1/memory.max", "33554432\n");
  put("sys/fs/cgroup/slurm/job_1/memory.current", "12582912\n");
  put("sys/fs/cgroup/slurm/job_1/memory.stat", "anon 8388608\ninactive_file 4194304\n");
  put("sys/fs/cgroup/slurm/job_1/cpu.max", "400000 100000\n");
  put("sys/fs/cgroup/slurm/cpu.max", "250000 100000\n");
  expect(32, 32 - 8);
  EXPECT_EQ(quota_cores(root_), 2.5);
  put("sys/fs/cgroup/memory.max", "16777216\n");
  expect(16, 16);
}

TEST_F(HostMemoryTest, VersionOneHasATreeAController) {
  put("proc/self/cgroup", "9:cpu,cpuacct:/job\n4:memory:/job/step\n1:name=systemd:/\n0::/\n");
  put("sys/fs/cgroup/memory/memory.limit_in_bytes", "9223372036854771712\n");
  put("sys/fs/cgroup/memory/job/memory.limit_in_bytes", "41943040\n");
  put("sys/fs/cgroup/memory/job/memory.usage_in_bytes", "20971520\n");
  put("sys/fs/cgroup/memory/job/memory.stat", "inactive_file 0\ntotal_inactive_file 10485760\n");
  put("sys/fs/cgroup/cpu,cpuacct/job/cpu.cfs_quota_us", "150000\n");
  put("sys/fs/cgroup/cpu,cpuacct/job/cpu.cfs_period_us", "100000\n");
  put("sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us", "-1\n");
  expect(40, 30);
  EXPECT_EQ(quota_cores(root_), 1.5);
}

// A group that is over its limit for a moment leaves nothing, not a huge number.
TEST_F(HostMemoryTest, NothingIsLeftOfAFullGroup) {
  put("proc/self/cgroup", "0::/\n");
  put("sys/fs/cgroup/memory.max", "1048576\n");
  put("sys/fs/cgroup/memory.current", "2097152\n");
  expect(1, 0);
}

TEST(Host, OfThisOne) {
  EXPECT_FALSE(host_name().empty());
  const HostMemory m = host_memory();
  EXPECT_GT(m.total, std::size_t{0});
  EXPECT_LE(m.available, m.total);
  EXPECT_GT(resident_bytes(), std::size_t{0});
}

TEST(SizeText, GibibytesFromOneOn) {
  EXPECT_EQ(size_text(1.5 * (1ull << 30)), "1.50 GiB");
  EXPECT_EQ(size_text(20.25 * (1 << 20)), "20.25 MiB");
}

TEST(FileSystem, IsKnownByItsType) {
  for (const auto& [type, name] :
       {std::pair{0x0BD00BD0u, "Lustre"}, {0x6969u, "NFS"}, {0xFF534D42u, "CIFS"}}) {
    EXPECT_EQ(file_system_of_type(type).name, name);
    EXPECT_TRUE(file_system_of_type(type).network) << name;
  }
  EXPECT_EQ(file_system_of_type(0xEF53).name, "ext4");
  EXPECT_FALSE(file_system_of_type(0xEF53).network);
  EXPECT_EQ(file_system_of_type(0x1234).name, "type 0x1234");
  EXPECT_FALSE(file_system_of_type(0x1234).network);
}

}  // namespace
}  // namespace weft
