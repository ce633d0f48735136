// What autograd gets in place of a tensor that it saves in a planned forward (`pack` in runtime/engine/base.py and planned.py).
#pragma once
#include <ATen/core/Tensor.h>
#include <pybind11/pybind11.h>

namespace memopt {

// What the packing of one forward works on; no reference to its engine.
struct Packing {
  pybind11::dict of_storage;
  pybind11::object cursor, names, tracked, parked, packed_then_overwritten, dropped_at_pack, packs, packs_here, labels, stand_ins, packed;
};

// A `Kept` or a `Handle`; None if the tensor must be packed in Python, and nothing has been done. Not for transforms of functorch.
pybind11::object pack(const Packing& packing, pybind11::handle engine, const at::Tensor& t);

}  // namespace memopt
