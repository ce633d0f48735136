// Calls a Python function under the thread-local state of torch of another thread, as autograd's threads for devices do.
#include <ATen/ThreadLocalState.h>
#include <Python.h>

extern "C" void* memopt_state_of_thread() { return new at::ThreadLocalState(); }

extern "C" void memopt_forget_state(void* state) { delete static_cast<at::ThreadLocalState*>(state); }

extern "C" PyObject* memopt_call_under(void* state, PyObject* function) {
  at::ThreadLocalStateGuard guard(*static_cast<at::ThreadLocalState*>(state));
  return PyObject_CallNoArgs(function);
}
