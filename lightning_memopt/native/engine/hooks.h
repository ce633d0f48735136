// The saved-tensor hooks of a planned forward, as C callables: autograd calls them for every tensor that it saves.
#pragma once
#include <torch/csrc/python_headers.h>

namespace memopt {

// The class `Pack`: `Pack(weak reference to an engine)` is a pack hook. It does not keep the engine (session/recording.py). Null,
// with an exception, if it cannot be made.
PyObject* pack_class();

// Python's function of this name (record/levels.py).
extern PyObject* in_transform;

// unpack(packed): the unpack hook (`Engine.unpack`).
PyObject* unpack(PyObject*, PyObject* packed);

}  // namespace memopt
