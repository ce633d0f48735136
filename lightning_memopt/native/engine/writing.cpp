#include "writing.h"

#include "objects.h"
#include "tensors.h"

namespace memopt {
namespace {

namespace py = pybind11;

// The version that `t` is on; null if it is parked or from outside, or if there is none.
Version* version_at(const Forward& forward, const at::Tensor& t) {
  Version* const version = forward.of_storage.at(t);
  return version == nullptr || version->is_external() || version->is_parked() ? nullptr : version;
}

// Notes that the counter of a version must be read from `t` later, because autograd moves it after the op.
void note_unread(const Forward& forward, const py::object& version, const at::Tensor& t) {
  const auto reference = py::reinterpret_steal<py::object>(PyWeakref_NewRef(wrapped(t).ptr(), nullptr));
  const auto entry = py::reinterpret_steal<py::object>(PyTuple_Pack(2, version.ptr(), reference.ptr()));
  if (!entry || PyList_Append(forward.unread.ptr(), entry.ptr()) < 0) throw py::error_already_set();
}

// Autograd may read the new bytes through saves of the old ones, if the counter of the tensor that it saved does not move
// (`Holdings.overwritten`, `PlannedHoldings.overwritten`).
void claim(Version& before, Version& after, const at::Tensor& t, bool reachable) {
  const bool has_handles = before.handles > 0, is_pinned = before.has_claim(constants.pinned_claim);
  if (has_handles || !before.has_claim(constants.no_claim)) after.set_claim(constants.possible_claim);
  if (reachable || !(has_handles || is_pinned)) return;
  after.hold(t);
  after.set_claim(constants.pinned_claim);
  if (before.read) return;
  before.drop();
  if (is_pinned) before.set_claim(constants.possible_claim);
}

}  // namespace

bool overwrites(const Forward& forward, const at::Tensor& t) {
  Version* const version = PyDict_GET_SIZE(forward.beneath.ptr()) > 0 ? nullptr : version_at(forward, t);
  if (version == nullptr) return false;
  if (!version->is_rebuildable()) return !version->is_held() || !version->read;  // else its bytes are copied
  if (version->is_held() && !can_make_from_memory(forward.versions, *version)) return false;
  version->drop();
  return true;
}

py::object overwritten(
    const Forward& forward, const at::Tensor& t, const py::object& call, bool startable, int64_t tensor) {
  Version* const old = version_at(forward, t);
  if (old == nullptr) return {};
  const auto owner = py::reinterpret_borrow<py::object>(object_of(*old));  // the new version replaces it
  const bool runs_again = !call.is_none(), reachable = runs_again && startable;
  const py::object why = runs_again ? py::str() : py::reinterpret_borrow<py::object>(constants.overwritten);
  const py::object made = new_version(t, {tensor, tensor, 0, call, constants.recorded, why, reachable});
  Version& version = value_of<Version>(made.ptr());
  version.counter = old->counter == constants.unshared ? constants.unshared : constants.unknown;
  version.counter_in_op = t._version();
  if (!runs_again) {
    version.exposed = old->exposed;
    version.parameter = old->parameter;
  }
  old->next = tensor;
  claim(*old, version, t, reachable);
  add(forward, t, made);
  note_unread(forward, made, t);
  return made;
}

}  // namespace memopt
