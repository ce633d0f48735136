// What autograd gets instead of a tensor that it saves in a planned forward (`pack` in runtime/engine/base.py and planned.py).
#pragma once
#include <ATen/core/Tensor.h>
#include <pybind11/pybind11.h>

#include <cstdint>
#include <vector>

#include "numbers.h"
#include "progress.h"
#include "versions.h"

namespace memopt {

// What a plan does when autograd saves a tensor (`Program`). Tensors are tensors of the plan.
class Saves {
 public:
  enum Set : uint8_t { kTracked = 1, kParked = 2, kPackedThenOverwritten = 4, kDroppedAtPack = 8, kPacked = 16 };
  struct Save {
    int64_t tensor, save;
  };

  // `sets`: the tensors of each set, in the order of `Set`. `packs`: {(tensor, position): saves}.
  Saves(pybind11::handle sets, pybind11::handle packs);
  bool has(Set set, int64_t tensor) const { return static_cast<size_t>(tensor) < sets_.size() && (sets_[tensor] & set) != 0; }
  // The saves at a position.
  const std::vector<Save>& at(int64_t position) const;

 private:
  std::vector<uint8_t> sets_;
  std::vector<std::vector<Save>> packs_;
};

// The data for packing in one forward. It has no reference to the engine.
struct Packing {
  pybind11::object owners;  // of what is referred to
  const Versions& of_storage;
  const Saves& saves;
  Numbers &labels, &packed;
  const Progress& cursor;
  pybind11::object names;
  pybind11::dict stand_ins;  // of the guard (`Guard`)
};

// A `Kept` or a `Handle`. None if the tensor must be packed in Python; then nothing has been done. Not for use in functorch's
// transforms.
pybind11::object pack(const Packing& packing, pybind11::handle engine, const at::Tensor& t);

}  // namespace memopt
