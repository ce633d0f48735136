#include "packing.h"

#include <torch/csrc/utils/pybind.h>

#include <utility>

#include "handle.h"
#include "hollow.h"
#include "making.h"
#include "objects.h"
#include "progress.h"
#include "storages.h"
#include "tensors.h"
#include "version.h"

namespace memopt {
namespace {

namespace py = pybind11;

constexpr int64_t kBefore = -1;  // `BEFORE` in graph: the plan does not have the save

// `save_of` in planned.py, for a version that does not stand in for another tensor.
int64_t save_of(const Packing& packing, py::handle engine, const Version& version, int64_t tensor, int64_t position) {
  py::object first;
  int64_t save = kBefore;
  for (const Saves::Save& each : packing.saves.at(position)) {
    if (each.tensor != tensor || (save != kBefore && each.save > save)) continue;
    py::int_ number(each.save);
    if (has(packing.labels.ptr(), number.ptr())) continue;
    first = std::move(number);
    save = each.save;
  }
  if (save != kBefore) {
    PySet_Add(packing.labels.ptr(), first.ptr());
    return save;
  }
  if (!packing.saves.has(Saves::kPacked, tensor)) return kBefore;
  return engine.attr("save_of")(py::handle(version.object())).cast<int64_t>();
}

}  // namespace

Saves::Saves(py::handle sets, py::handle packs) {
  uint8_t set = 1;
  for (const py::handle tensors : sets) {
    for (const py::handle each : tensors) {
      const auto tensor = each.cast<size_t>();
      if (tensor >= sets_.size()) sets_.resize(tensor + 1);
      sets_[tensor] |= set;
    }
    set <<= 1;
  }
  for (const auto& [key, saves] : py::reinterpret_borrow<py::dict>(packs)) {
    const auto [tensor, position] = key.cast<std::pair<int64_t, size_t>>();
    if (position >= packs_.size()) packs_.resize(position + 1);
    for (const py::handle save : saves) packs_[position].push_back({tensor, save.cast<int64_t>()});
  }
}

const std::vector<Saves::Save>& Saves::at(int64_t position) const {
  static const std::vector<Save> none;
  return static_cast<size_t>(position) < packs_.size() ? packs_[position] : none;
}

py::object pack(const Packing& packing, py::handle engine, const at::Tensor& t) {
  const py::object python = py::none();
  if (t.is_inference() || t.is_nested()) return python;
  const int64_t position = progress_of(packing.cursor.ptr()).position;
  const auto keep = [&] {
    return kept(t, py::reinterpret_steal<py::object>(PyTuple_Pack(2, packing.names.ptr(), py::int_(position).ptr())));
  };
  if (!is_ordinary(t) || is_hollow(t)) return keep();
  const auto owner = py::reinterpret_borrow<py::object>(reinterpret_cast<Storages*>(packing.of_storage.ptr())->at(t));
  if (!owner) return keep();
  Version& version = *version_in(owner.ptr());
  if (PyDict_GET_SIZE(packing.stand_ins.ptr()) > 0 || !version.is_current(t)) return python;
  if (version.tensor.is_none()) return version.is_external() ? keep() : python;
  const int64_t tensor = PyLong_AsLongLong(version.tensor.ptr());
  if (packing.saves.has(Saves::kParked, tensor)) return python;

  const int64_t save = save_of(packing, engine, version, tensor, position);
  const bool parked = version.is_parked();
  if (version.is_external() || version.is_stale() || !packing.saves.has(Saves::kTracked, tensor)) return keep();
  if (save == kBefore && !parked) return keep();
  if (!version.is_held() && !parked) {
    if (packing.saves.has(Saves::kPackedThenOverwritten, tensor)) {
      version.hold(t);  // a later version is held and read instead; this one is read if this step does not overwrite it
    } else if (!version.is_rebuildable() || !packing.saves.has(Saves::kDroppedAtPack, tensor)) {
      return keep();
    }
  }
  py::object made = new_handle(t, engine, save, version);
  PySet_Add(packing.packed.ptr(), py::int_(save).ptr());
  return made;
}

}  // namespace memopt
