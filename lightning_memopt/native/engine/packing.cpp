#include "packing.h"

#include <torch/csrc/utils/pybind.h>

#include "making.h"
#include "objects.h"
#include "progress.h"
#include "tensors.h"
#include "values.h"

namespace memopt {
namespace {

namespace py = pybind11;

constexpr int64_t kBefore = -1;  // `BEFORE` in graph: the plan does not have the save

// `save_of` in planned.py, for a version that does not stand in for another tensor.
int64_t save_of(const Packing& packing, py::handle engine, PyObject* version, PyObject* tensor, PyObject* position) {
  const auto here = py::reinterpret_steal<py::object>(PyTuple_Pack(2, tensor, position));
  PyObject* const saves = PyDict_GetItemWithError(packing.packs_here.ptr(), here.ptr());
  int64_t first = kBefore;
  for (Py_ssize_t i = 0; saves != nullptr && i < PyList_GET_SIZE(saves); ++i) {
    PyObject* const save = PyList_GET_ITEM(saves, i);
    const int64_t number = PyLong_AsLongLong(save);
    if ((first == kBefore || number < first) && !has(packing.labels.ptr(), save)) first = number;
  }
  if (first != kBefore) {
    PySet_Add(packing.labels.ptr(), py::int_(first).ptr());
    return first;
  }
  if (!has(packing.packs.ptr(), tensor)) return kBefore;
  return engine.attr("save_of")(py::handle(version)).cast<int64_t>();
}

}  // namespace

py::object pack(const Packing& packing, py::handle engine, const at::Tensor& t) {
  const py::object python = py::none();
  if (t.is_inference() || t.is_nested()) return python;
  const py::int_ position(progress_of(packing.cursor.ptr()).position);
  const auto keep = [&] {
    return kept(t, py::reinterpret_steal<py::object>(PyTuple_Pack(2, packing.names.ptr(), position.ptr())));
  };
  if (!is_ordinary(t)) return keep();
  const auto address = py::reinterpret_steal<py::object>(PyLong_FromVoidPtr(t.storage().unsafeGetStorageImpl()));
  const auto version = py::reinterpret_borrow<py::object>(PyDict_GetItemWithError(packing.of_storage.ptr(), address.ptr()));
  if (!version) return keep();
  PyObject* const v = version.ptr();
  PyObject* const holding = version_slots.holding.get(v);
  PyObject* const tensor = holding_slots.tensor.get(holding);
  const bool external = version_slots.origin.get(v) == constants.external;
  if (PyDict_GET_SIZE(packing.stand_ins.ptr()) > 0 || !is_current(v, t)) return python;
  if (tensor == Py_None) return external ? keep() : python;
  if (has(packing.parked.ptr(), tensor)) return python;

  const int64_t save = save_of(packing, engine, v, tensor, position.ptr());
  const bool parked = is_parked(holding);
  if (external || version_slots.next.get(v) != Py_None || !has(packing.tracked.ptr(), tensor)) return keep();
  if (save == kBefore && !parked) return keep();
  if (holding_slots.value.get(holding) == Py_None && !parked) {
    if (has(packing.packed_then_overwritten.ptr(), tensor)) {
      hold(holding, t);  // a later version is held and read instead; this one is read if this step does not overwrite it
    } else if (!is_rebuildable(v) || !has(packing.dropped_at_pack.ptr(), tensor)) {
      return keep();
    }
  }
  py::object made = handle(t, engine, save, v);
  PySet_Add(packing.packed.ptr(), py::int_(save).ptr());
  return made;
}

}  // namespace memopt
