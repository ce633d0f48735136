// The saved-tensor hooks of a planned forward, as C callables: autograd calls them for every tensor that it saves.
#pragma once
#include <torch/csrc/python_headers.h>

namespace memopt {

// Adds the class `Pack` to the module. Returns false with an exception if it cannot be made. After the module's functions.
bool add_hooks(PyObject* module);

// pack_hook(weak reference to an engine): a `Pack`, which does not keep the engine (session/recording.py). `free` says that the
// forward is over: another forward may use the hook. Hooks are never destroyed.
PyObject* pack_hook(PyObject*, PyObject* engine);

// Whether this is one of these hooks. References to them need not be counted: torch looks up the hooks for each tensor that it
// saves, and would take the interpreter's lock eight times for it.
bool is_hook(PyObject* object);

// While no tensor is to be saved that the plan handles, the hooks may rest: torch saves tensors itself, as in eager mode, which
// takes a fifth of the time. They rest for this thread only, and only if the innermost hooks are ours.
void rest_hooks();
bool hooks_rest();
// The innermost hooks are called for each tensor that is saved.
void wake_hooks();
// Around a planned forward of this thread, as `begin_forward` (interpreter.h).
void begin_resting(PyObject* forward);
void end_resting(PyObject* forward);
// wake(): for Python, where it enters or leaves hooks.
PyObject* wake(PyObject*, PyObject*);

// Whether a transform of `torch.func` is under way (record/levels.py).
bool is_in_transform();

// unpack(packed): the unpack hook (`Engine.unpack`).
PyObject* unpack(PyObject*, PyObject* packed);

}  // namespace memopt
