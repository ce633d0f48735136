// Torch uses a table of Python functions to dispatch an op to a mode. While a planned forward runs, it is replaced by this
// table, which runs ops that match their templates in C++, and passes everything else to torch's own table.
#pragma once

#include <Python.h>

namespace memopt {

// A planned forward begins or ends; `forward` identifies it. Forwards may be nested, and run in several threads. The end of a
// forward that has not begun, or has ended, does nothing, because an interrupt may come before or after its beginning.
void begin_forward(PyObject* forward);
void end_forward(PyObject* forward);
// Number of forwards that are running, in all threads.
size_t forwards_under_way();

}  // namespace memopt
