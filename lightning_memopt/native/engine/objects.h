// What Python gives the native engine: values that it compares with, and functions that it calls.
#pragma once
#include <torch/csrc/python_headers.h>

#include <cstdint>

namespace memopt {

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

extern Constants constants;

// Takes all constants from a dictionary by name. Returns false with an exception if one is missing.
bool know(PyObject* objects);

}  // namespace memopt
