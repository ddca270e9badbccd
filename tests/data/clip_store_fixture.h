// A clip store of its own for each test, and what damages it.
#pragma once

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <filesystem>
#include <memory>
#include <string>
#include <vector>

#include "core/error.h"
#include "data/clip_store.h"
#include "data/hdf5.h"
#include "data/synthetic.h"
#include "tests/folder.h"

namespace weft {

class ClipStoreTest : public FolderTest {
 protected:
  void SetUp() override {
    FolderTest::SetUp();
    path_ = path("clips.h5");
  }

  // Copies every clip of a synthetic source into a store.
  void write(const std::string& spec) {
    source_ = make_synthetic_source(spec);
    ClipStoreWriter writer(path_);
    for (std::size_t b = 0; b < source_->buckets().size(); ++b) {
      const Bucket& bucket = source_->buckets()[b];
      const int id = writer.add_bucket(bucket);
      std::vector<std::byte> clip(bucket.clip_bytes());
      for (std::int64_t i = 0; i < bucket.clips; ++i) {
        source_->read(static_cast<int>(b), i, clip);
        writer.append(id, clip, source_->info(static_cast<int>(b), i));
      }
    }
    writer.commit();
  }

  // Opens with read access and runs `change` on the file, as HDF5 sees it.
  template <class F>
  void edit(F change) {
    const h5::Handle file(H5Fopen(path_.c_str(), H5F_ACC_RDWR, H5P_DEFAULT), H5Fclose);
    ASSERT_TRUE(file.valid());
    change(static_cast<hid_t>(file));
  }

  void expect_refused(const std::string& what) {
    try {
      open_clip_store(path_, true);
      FAIL() << "the store was accepted; expected: " << what;
    } catch (const Error& e) {
      EXPECT_EQ(e.code(), Exit::data);
      EXPECT_THAT(e.what(), testing::HasSubstr(what));
      EXPECT_THAT(e.what(), testing::HasSubstr(path_));
      EXPECT_FALSE(e.hint().empty());
    }
  }

  std::string run(const std::string& command) {
    std::string out;
    FILE* p = popen((command + " 2>&1").c_str(), "r");
    char line[512];
    while (fgets(line, sizeof line, p) != nullptr) out += line;
    const int status = pclose(p);
    EXPECT_EQ(WEXITSTATUS(status), 0) << command << "\n" << out;
    return out;
  }

  std::string path_;
  std::unique_ptr<ClipSource> source_;
};

// A dataset of `dims` in /clips/<bucket>/<name>, chunked by `chunk`, in place of the one there.
inline void replace_dataset(hid_t file, const std::string& name, hid_t type,
                            std::vector<hsize_t> dims, std::vector<hsize_t> chunk) {
  H5Ldelete(file, name.c_str(), H5P_DEFAULT);
  const h5::Handle space(H5Screate_simple(static_cast<int>(dims.size()), dims.data(), nullptr),
                         H5Sclose);
  const h5::Handle how(H5Pcreate(H5P_DATASET_CREATE), H5Pclose);
  if (!chunk.empty()) H5Pset_chunk(how, static_cast<int>(chunk.size()), chunk.data());
  const h5::Handle d(H5Dcreate2(file, name.c_str(), type, space, H5P_DEFAULT, how, H5P_DEFAULT),
                     H5Dclose);
  ASSERT_TRUE(d.valid());
}

}  // namespace weft
