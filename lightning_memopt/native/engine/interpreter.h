// Torch asks its table of Python functions to dispatch an op to a mode. While a planned forward runs, this table stands in its
// place: ops that match their templates are run in C++, everything else goes to torch's own table.
#pragma once

#include <Python.h>

namespace memopt {

// A planned forward begins, or ends; `forward` stands for it. They may be nested, and run in several threads. An interrupt may
// come before a beginning or after it: the end of a forward that has not begun, or has ended, does nothing.
void begin_forward(PyObject* forward);
void end_forward(PyObject* forward);
// How many are under way, in all threads.
size_t forwards_under_way();

}  // namespace memopt
