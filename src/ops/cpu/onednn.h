// oneDNN 2.6 and 3 behind one call, and a cache of the primitives made for a shape. Included inside
// WEFT_CPU_BEGIN/END, after <dnnl.hpp>, <algorithm>, <cstdint> and <map>.

#pragma once

inline dnnl::engine& engine() {
  static dnnl::engine e(dnnl::engine::kind::cpu, 0);
  return e;
}

// The descriptor of primitive `Op` for these memories and parameters. oneDNN 2 describes the
// operation first and then asks for a primitive; oneDNN 3 does both in one call.
template <class Op, class... Args>
typename Op::primitive_desc describe(const dnnl::primitive_attr& attributes, const Args&... args) {
#if DNNL_VERSION_MAJOR >= 3
  return {engine(), args..., attributes};
#else
  return {typename Op::desc(args...), attributes, engine()};
#endif
}

// The same for a backward primitive, which asks which forward it belongs to.
template <class Op, class Forward, class... Args>
typename Op::primitive_desc describe_backward(const dnnl::primitive_attr& attributes,
                                              const Forward& forward, const Args&... args) {
#if DNNL_VERSION_MAJOR >= 3
  return {engine(), args..., forward, attributes};
#else
  return {typename Op::desc(args...), attributes, engine(), forward};
#endif
}

// Images of all sizes come, so only the most recently used primitives are kept: enough for the
// layers of several sizes; making one again costs less than a millisecond.
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
