#include "objects.h"

namespace memopt {

Constants constants;

namespace {

// An object by its name. It exists as long as the process.
bool take(PyObject* objects, const char* name, PyObject** to) {
  *to = PyDict_GetItemString(objects, name);
  if (*to == nullptr) PyErr_Format(PyExc_TypeError, "%s is missing", name);
  Py_XINCREF(*to);
  return *to != nullptr;
}

}  // namespace

bool know(PyObject* objects) {
  PyObject *unknown = nullptr, *unshared = nullptr;
  const bool complete =
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
