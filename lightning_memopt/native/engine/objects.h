// The engine's objects are Python's (record/tape.py, runtime/engine/holding.py): they have one owner, and both engines work on
// them. Here their fields are read and written where their slots lie, which takes a few nanoseconds.
#pragma once
#include <torch/csrc/python_headers.h>

namespace memopt {

// A field of a Python class that has `__slots__`.
class Slot {
 public:
  // Returns whether the class has it.
  bool find(PyObject* type, const char* name);
  // Borrowed; null if it was never set.
  PyObject* get(PyObject* object) const { return *at(object); }
  // Takes the reference to `value`.
  void set(PyObject* object, PyObject* value) const {
    PyObject* const before = *at(object);
    *at(object) = value;
    Py_XDECREF(before);
  }

 private:
  PyObject** at(PyObject* object) const { return reinterpret_cast<PyObject**>(reinterpret_cast<char*>(object) + offset_); }
  Py_ssize_t offset_ = 0;
};

struct ViewSlots {
  PyObject* type;
  Slot version, size, stride, offset, dtype, conj, neg;
};
struct CallSlots {
  Slot prepared, reads, grad, rng, made, mutates;
};
struct VersionSlots {
  Slot holding;
};
struct HoldingSlots {
  Slot value, expected, stream;
};

extern ViewSlots view_slots;
extern CallSlots call_slots;
extern VersionSlots version_slots;
extern HoldingSlots holding_slots;

}  // namespace memopt
