// The saved-tensor hooks of a planned forward, as C callables: autograd calls them for every tensor that it saves.
#pragma once
#include <torch/csrc/python_headers.h>

namespace memopt {

// Adds the class `Pack` to the module. Returns false with an exception if it cannot be made. After the module's functions.
bool add_hooks(PyObject* module);

// pack_hook(weak reference to an engine): a `Pack`, which does not keep the engine alive (session/recording.py). `free` is
// called when the forward is over: then another forward may use the hook. Hooks are never destroyed.
PyObject* pack_hook(PyObject*, PyObject* engine);

// Whether this is one of these hooks. References to them need not be counted: torch looks up the hooks for each tensor that it
// saves, and would otherwise take the interpreter's lock eight times.
bool is_hook(PyObject* object);

// While the forward saves no tensor that the plan handles, the hooks may be off: then torch saves tensors itself, as in eager
// mode, in a fifth of the time. They are off only in this thread, and only if the innermost hooks are ours.
void rest_hooks();
bool hooks_rest();
// Switches the innermost hooks on.
void wake_hooks();
// Called around a planned forward of this thread, like `begin_forward` (interpreter.h).
void begin_resting(PyObject* forward);
void end_resting(PyObject* forward);
// wake(): switches hooks on. Python calls it when it enters or leaves hooks.
PyObject* wake(PyObject*, PyObject*);

// Whether a transform of `torch.func` runs (record/levels.py).
bool is_in_transform();

// unpack(packed): the unpack hook (`Engine.unpack`).
PyObject* unpack(PyObject*, PyObject* packed);

}  // namespace memopt
