// A set of small numbers, from -1 on: tensors or saves of a plan. It has those methods of a Python set that are used.
#pragma once
#include <cstdint>
#include <vector>

#include "type.h"

namespace memopt {

class Numbers {
 public:
  bool has(int64_t number) const { return static_cast<size_t>(number + 1) < members_.size() && members_[number + 1]; }
  // No member is as large as this.
  int64_t end() const { return static_cast<int64_t>(members_.size()) - 1; }
  void add(int64_t number);
  void discard(int64_t number);
  size_t size() const { return size_; }

 private:
  std::vector<bool> members_;  // of the number plus one
  size_t size_ = 0;
};

// Adds the class `Numbers` to the module. Returns false with an exception if it cannot be made.
bool add_numbers(PyObject* module);

}  // namespace memopt
