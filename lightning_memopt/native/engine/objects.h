// The engine's objects are Python objects (record/tape.py, runtime/engine). So they have one owner, and both engines work on
// them. Here their fields are read and written directly at their slots, which takes a few nanoseconds.
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
struct VersionSlots {
  PyObject* type;
  Slot id, nbytes, device, weak, origin, call, index, counter, counter_in_op, next, parameter, exposed, read, why, holding;
};
struct HoldingSlots {
  PyObject* type;
  Slot value, expected, stream, parked, reachable, handles, claim, tensor;
};
struct KeptSlots {
  PyObject* type;
  Slot about, t, counter;
};
struct HandleSlots {
  PyObject* type;
  Slot save, version, guard, counter, times, engine;
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
  int64_t unknown, unshared;              // counters
};

extern ViewSlots view_slots;
extern CallSlots call_slots;
extern VersionSlots version_slots;
extern HoldingSlots holding_slots;
extern KeptSlots kept_slots;
extern HandleSlots handle_slots;
extern MatcherSlots matcher_slots;
extern GuardSlots guard_slots;
extern Constants constants;

// Whether a set or a dictionary has this key.
bool has(PyObject* container, PyObject* key);

// Finds all slots. `objects`: a dictionary with the classes and constants by name. Returns false with an exception if one is
// missing, or has no such slot.
bool know(PyObject* objects);

}  // namespace memopt
