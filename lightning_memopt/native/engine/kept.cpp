#include "kept.h"

#include "objects.h"
#include "tensors.h"

namespace memopt {
namespace {

PyObject* get_tensor(PyObject* self, void*) { return wrapped(value_of<Kept>(self).t).release().ptr(); }

}  // namespace

bool Kept::is_unchanged() const { return counter == constants.unknown || t._version() == counter; }

bool add_kept(PyObject* module) {
  static PyMemberDef fields[] = {
      MEMOPT_FIELD(Kept, T_LONGLONG, counter, READONLY), MEMOPT_FIELD(Kept, T_OBJECT, about, READONLY), kLastField};
  static PyGetSetDef computed[] = {{"t", get_tensor, nullptr, nullptr, nullptr}, kLastComputed};
  return add_type<Kept>(module, "Kept", {{Py_tp_members, fields}, {Py_tp_getset, computed}});
}

pybind11::object keep(const at::Tensor& t, pybind11::object about) {
  const bool has_history = t.requires_grad() && !t.is_leaf() && is_plain(t);
  return make<Kept>(has_history ? alias_of(t) : t, t.is_inference() ? constants.unknown : int64_t{t._version()}, std::move(about));
}

}  // namespace memopt
