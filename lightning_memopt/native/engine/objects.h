// What Python gives the native engine: constants, and classes of which it reads or makes objects (record/tape.py, runtime/engine).
// Their fields are read and written directly at their slots, which takes a few nanoseconds.
#pragma once
#include <torch/csrc/python_headers.h>

#include <cstdint>

namespace memopt {

// A field of a Python class that has `__slots__`.
class Slot {
 public:
  // Returns whether the class has it; if not, with an exception.
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
  PyObject* type;
  Slot op, prepared, reads, grad, rng, made, mutates, repeats;
};
struct KeptSlots {
  PyObject* type;
  Slot about, t, counter;
};
struct MatcherSlots {
  PyObject* type;
  Slot native, templates, capturing;
};
struct GuardSlots {
  PyObject* type;
  Slot stand_ins, until;
};
// Values that have a meaning in the Python engine.
struct Constants {
  PyObject *recorded, *empty, *external;  // of `Origin`
  PyObject *no_claim, *possible_claim, *pinned_claim;  // of `Claim`
  PyObject *overwritten, *outside;  // reasons why a version has no call
  PyObject* deferred;     // exceptions that are to be raised at the next request (record/interrupts.py)
  PyObject* numeric_flags;  // the function (record/settings.py)
  PyObject* changes;        // `CHANGES`, of the settings (record/settings.py)
  PyObject* start_changed;  // the class `StartChangedError`
  PyObject* destructor;     // `Handle.__del__`
  int64_t unknown, unshared;              // counters
};

extern ViewSlots view_slots;
extern CallSlots call_slots;
extern KeptSlots kept_slots;
extern MatcherSlots matcher_slots;
extern GuardSlots guard_slots;
extern Constants constants;

// Whether a set or a dictionary has this key.
bool has(PyObject* container, PyObject* key);

// Finds all slots. `objects`: a dictionary with the classes and constants by name. Returns false with an exception if one is
// missing, or has no such slot.
bool know(PyObject* objects);

}  // namespace memopt
