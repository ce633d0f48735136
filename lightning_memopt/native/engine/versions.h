// Storage versions by a number, in the order in which the numbers came: a class with those methods of a dictionary that are used. The
// numbers are ids (`Tape.versions`), or addresses of storages (`Recorder.of_storage`), most of which collide in a dictionary of
// Python, because their last bits are the same.
#pragma once
#include <c10/util/flat_hash_map.h>

#include <cstddef>
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
    const size_t place = place_of(number);
    return place == kNowhere ? nullptr : &value_of<Version>(entries_[place].second.ptr());
  }
  // The version that the storage of `t` is on.
  Version* at(const at::Tensor& t) const { return at(address_of(t)); }
  static int64_t address_of(const at::Tensor& t) { return reinterpret_cast<int64_t>(t.storage().unsafeGetStorageImpl()); }

  void put(int64_t number, const pybind11::object& version);
  // Returns whether there was one.
  bool remove(int64_t number);
  void clear();
  size_t size() const { return size_; }
  // Those that were removed are null.
  const Entries& entries() const { return entries_; }

 private:
  static constexpr size_t kNowhere = SIZE_MAX;
  static constexpr int64_t kNear = int64_t{1} << 20;  // ids are smaller than this in most graphs, addresses are not

  static bool is_near(int64_t number) { return number >= 0 && number < kNear; }
  // Among the entries; `kNowhere` if there is none.
  size_t place_of(int64_t number) const {
    if (is_near(number)) return static_cast<size_t>(number) < near_.size() ? near_[number] : kNowhere;
    const auto found = far_.find(number);
    return found == far_.end() ? kNowhere : found->second;
  }

  Entries entries_;
  std::vector<size_t> near_;
  ska::flat_hash_map<int64_t, size_t> far_;
  size_t size_ = 0;
};

// Adds the class `Versions` to the module. Returns false with an exception if it cannot be made.
bool add_versions(PyObject* module);

}  // namespace memopt
