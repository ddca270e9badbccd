// What oneDNN makes for a shape, kept for the next call. Images of all sizes come, so only the most
// recently used are kept: enough for the layers of several sizes; making one again costs less than
// a millisecond. Included inside WEFT_CPU_BEGIN/END, behind <algorithm>, <cstdint> and <map>.

#pragma once

template <class Key, class Value>
class Recent {
 public:
  // The value of `key`, made by make() if it is not there; valid until the next call.
  template <class Make>
  const Value& get(const Key& key, Make&& make) {
    auto it = kept_.find(key);
    if (it == kept_.end()) {
      Entry made{make(), 0};
      if (kept_.size() >= most) kept_.erase(oldest());
      it = kept_.emplace(key, std::move(made)).first;
    }
    it->second.used = ++clock_;
    return it->second.value;
  }

 private:
  static constexpr std::size_t most = 512;
  struct Entry {
    Value value;
    std::uint64_t used;
  };
  auto oldest() const {
    return std::min_element(kept_.begin(), kept_.end(), [](const auto& a, const auto& b) {
      return a.second.used < b.second.used;
    });
  }
  std::map<Key, Entry> kept_;
  std::uint64_t clock_ = 0;
};
