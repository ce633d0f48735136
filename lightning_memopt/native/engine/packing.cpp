#include "packing.h"

#include <torch/csrc/utils/pybind.h>

#include <utility>

#include "handle.h"
#include "hollow.h"
#include "kept.h"
#include "tensors.h"

namespace memopt {
namespace {

namespace py = pybind11;

constexpr int64_t kBefore = -1;  // `BEFORE` in graph: the plan does not have the save

// `save_of` in planned.py, for a version that does not stand in for another tensor.
int64_t save_of(const Packing& packing, py::handle engine, const Version& version, int64_t tensor, int64_t position) {
  int64_t save = kBefore;
  for (const Saves::Save& each : packing.saves.at(position)) {
    const bool is_earlier = save == kBefore || each.save <= save;
    if (each.tensor == tensor && is_earlier && !packing.labels.has(each.save)) save = each.save;
  }
  if (save != kBefore) {
    packing.labels.add(save);
    return save;
  }
  if (!packing.saves.has(Saves::kPacked, tensor)) return kBefore;
  return engine.attr("save_of")(py::handle(object_of(version))).cast<int64_t>();
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
  const int64_t position = packing.cursor.position;
  const auto keep_it = [&] { return keep(t, py::make_tuple(packing.names, position)); };
  if (!is_ordinary(t) || is_hollow(t)) return keep_it();
  Version* const known = packing.of_storage.at(t);
  if (known == nullptr) return keep_it();
  Version& version = *known;
  const auto owner = py::reinterpret_borrow<py::object>(object_of(version));
  if (!packing.stand_ins.empty() || !version.is_current(t)) return python;
  const int64_t tensor = version.tensor;
  if (tensor == kNone) return version.is_external() ? keep_it() : python;
  if (packing.saves.has(Saves::kParked, tensor)) return python;

  const int64_t save = save_of(packing, engine, version, tensor, position);
  const bool parked = version.is_parked();
  if (version.is_external() || version.is_stale() || !packing.saves.has(Saves::kTracked, tensor)) return keep_it();
  if (save == kBefore && !parked) return keep_it();
  if (!version.is_held() && !parked) {
    if (packing.saves.has(Saves::kPackedThenOverwritten, tensor)) {
      version.hold(t);  // a later version is held and read instead; this one is read if this step does not overwrite it
    } else if (!version.is_rebuildable() || !packing.saves.has(Saves::kDroppedAtPack, tensor)) {
      return keep_it();
    }
  }
  py::object made = new_handle(t, engine, save, version);
  packing.packed.add(save);
  return made;
}

}  // namespace memopt
