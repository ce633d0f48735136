// Storage versions by a number, in the order in which the numbers came: a class with those methods of a dictionary that are used. The
// numbers are ids (`Tape.versions`), or addresses of storages (`Recorder.of_storage`), most of which collide in a dictionary of
// Python, because their last bits are the same.
#pragma once
#include <c10/util/flat_hash_map.h>

#include <cstdint>
#include <utility>
#include <vector>

#include "version.h"

namespace memopt {

class Versions {
 public:
  using Entries = std::vector<std::pair<int64_t, pybind11::object>>;

  // The version; null if there is none. Borrowed.
  Version* at(int64_t number) const {
    const auto found = places_.find(number);
    return found == places_.end() ? nullptr : &value_of<Version>(entries_[found->second].second.ptr());
  }
  // The version that the storage of `t` is on.
  Version* at(const at::Tensor& t) const { return at(address_of(t)); }
  static int64_t address_of(const at::Tensor& t) { return reinterpret_cast<int64_t>(t.storage().unsafeGetStorageImpl()); }

  void put(int64_t number, const pybind11::object& version);
  // Returns whether there was one.
  bool remove(int64_t number);
  void clear();
  size_t size() const { return places_.size(); }
  // Those that were removed are null.
  const Entries& entries() const { return entries_; }

 private:
  ska::flat_hash_map<int64_t, size_t> places_;
  Entries entries_;
};

// Adds the class `Versions` to the module. Returns false with an exception if it cannot be made.
bool add_versions(PyObject* module);

}  // namespace memopt
