// Copies of stores on a disk of the node (data.stage). A training reads every clip once an epoch:
// from there instead of over the network.
//
//   FOLDER/weft-stores-UID/             of this user alone
//   FOLDER/weft-stores-UID/lock         held while a job copies; another one of the node waits
//   FOLDER/weft-stores-UID/ID-BYTES-HASH.h5   a copy: the store's content_id() and bytes, and
//                           XXH3-128 of what was read (over the hashes of its blocks of 16 MiB)
//
//   FOLDER/weft-stores-UID/ID-BYTES-tmp@HOST@PID   one that is being made
//
// A copy has its name once it is complete and was read back. A later job takes it, wherever the
// store lies by then, if its size is right: clips have hashes of their own, which are compared when
// they are read. Nothing here removes copies.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "config/deck_table.h"

namespace weft {

// The key data.stage.
struct StageDeck {
  std::string stage;
};
DeckTable stage_table();

// What was staged on this node.
struct Staged {
  std::map<std::string, std::string> copies;  // path of a store, path of its copy
  std::string folder;                         // that they are in
  std::uint64_t bytes = 0;                    // of all
  std::uint64_t bytes_copied = 0;             // of those that were not there yet
};

// Bytes of each read and write of a copy; fewer in tests.
extern std::uint64_t staging_block;

// Whether data.path may name it and it is a file to copy: not made in memory, no list of pictures.
bool is_store_path(const std::string& path);

// By one rank of each node: makes a copy of each of these stores in `stage`, a folder of the node
// that exists; at its beginning $NAME stands for a variable of the environment. Waits while another
// job of this user copies there. Exit::usage for a variable that is not set; Exit::data where a
// store or the folder cannot be used, or where there is too little space, which is asked before
// anything is copied; Exit::hardware where a copy does not read back as written;
// Exit::stopped once `stop` is true, which is asked before each block and while waiting, from
// several threads. A WARN where the folder is on a file system of a network.
Staged stage_stores(
    const std::vector<std::string>& paths, const std::string& stage,
    const std::function<bool()>& stop = [] { return false; });

// The copies that nodes have made of one store must be the same file. Exit::hardware, naming the
// hosts, where they are not: `copies` has (host, path of the copy) of each node.
void check_same_copies(const std::string& store,
                       const std::vector<std::pair<std::string, std::string>>& copies);

}  // namespace weft
