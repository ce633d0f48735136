#include "objects.h"

#include <pybind11/pybind11.h>
#include <structmember.h>

#include <initializer_list>

namespace memopt {

ViewSlots view_slots;
CallSlots call_slots;
KeptSlots kept_slots;
MatcherSlots matcher_slots;
GuardSlots guard_slots;
Constants constants;

bool Slot::find(PyObject* type, const char* name) {
  PyObject* const descriptor = PyObject_GetAttrString(type, name);
  if (descriptor == nullptr) return false;
  const PyMemberDef* const member =
      Py_TYPE(descriptor) == &PyMemberDescr_Type ? reinterpret_cast<PyMemberDescrObject*>(descriptor)->d_member : nullptr;
  const bool is_slot = member != nullptr && member->type == T_OBJECT_EX;
  if (is_slot) offset_ = member->offset;
  Py_DECREF(descriptor);  // its class keeps it alive
  if (!is_slot) PyErr_Format(PyExc_TypeError, "%R has no slot %s", type, name);
  return is_slot;
}

namespace {

struct Field {
  const char* name;
  Slot* slot;
};

// An object by its name. It exists as long as the process.
bool take(PyObject* objects, const char* name, PyObject** to) {
  *to = PyDict_GetItemString(objects, name);
  if (*to == nullptr) PyErr_Format(PyExc_TypeError, "%s is missing", name);
  Py_XINCREF(*to);
  return *to != nullptr;
}

bool find(PyObject* objects, const char* name, PyObject** type, std::initializer_list<Field> fields) {
  if (!take(objects, name, type)) return false;
  for (const Field& field : fields)
    if (!field.slot->find(*type, field.name)) return false;
  return true;
}

}  // namespace

bool has(PyObject* container, PyObject* key) {
  const int answer = PySequence_Contains(container, key);
  if (answer < 0) throw pybind11::error_already_set();
  return answer == 1;
}

#define FIELD(slots, name) {#name, &slots.name}

bool know(PyObject* objects) {
  auto& w = view_slots;
  auto& c = call_slots;
  auto& k = kept_slots;
  auto& m = matcher_slots;
  auto& g = guard_slots;
  PyObject *unknown = nullptr, *unshared = nullptr;
  const bool complete =
      find(objects, "View", &w.type,
           {FIELD(w, version), FIELD(w, size), FIELD(w, stride), FIELD(w, offset), FIELD(w, dtype), FIELD(w, conj), FIELD(w, neg)}) &&
      find(objects, "Call", &c.type,
           {FIELD(c, op), FIELD(c, prepared), FIELD(c, reads), FIELD(c, grad), FIELD(c, rng), FIELD(c, made), FIELD(c, mutates),
            FIELD(c, repeats)}) &&
      find(objects, "Kept", &k.type, {FIELD(k, about), FIELD(k, t), FIELD(k, counter)}) &&
      find(objects, "Matcher", &m.type, {FIELD(m, native), FIELD(m, templates), FIELD(m, capturing)}) &&
      find(objects, "Guard", &g.type, {FIELD(g, stand_ins), FIELD(g, until)}) &&
      take(objects, "RECORDED", &constants.recorded) && take(objects, "EMPTY", &constants.empty) &&
      take(objects, "EXTERNAL", &constants.external) && take(objects, "NO_CLAIM", &constants.no_claim) &&
      take(objects, "POSSIBLE_CLAIM", &constants.possible_claim) && take(objects, "PINNED_CLAIM", &constants.pinned_claim) &&
      take(objects, "OVERWRITTEN", &constants.overwritten) && take(objects, "OUTSIDE", &constants.outside) && take(objects, "UNKNOWN", &unknown) &&
      take(objects, "UNSHARED", &unshared) && take(objects, "DEFERRED", &constants.deferred) &&
      take(objects, "numeric_flags", &constants.numeric_flags) && take(objects, "CHANGES", &constants.changes) &&
      take(objects, "StartChangedError", &constants.start_changed) && take(objects, "__del__", &constants.destructor);
  if (complete) {
    constants.unknown = PyLong_AsLongLong(unknown);
    constants.unshared = PyLong_AsLongLong(unshared);
  }
  return complete && !PyErr_Occurred();
}

}  // namespace memopt
