// What autograd gets instead of a tensor that it saves in a planned forward (`pack` in runtime/engine/base.py and planned.py).
#pragma once
#include <ATen/core/Tensor.h>
#include <pybind11/pybind11.h>

namespace memopt {

// The data for packing in one forward. It has no reference to the engine.
struct Packing {
  pybind11::dict of_storage;
  pybind11::object cursor, names, tracked, parked, packed_then_overwritten, dropped_at_pack, packs, packs_here;
  pybind11::object labels, stand_ins, packed;
};

// A `Kept` or a `Handle`. None if the tensor must be packed in Python; then nothing has been done. Not for use in functorch's
// transforms.
pybind11::object pack(const Packing& packing, pybind11::handle engine, const at::Tensor& t);

}  // namespace memopt
