#include "hooks.h"

#include <ATen/SavedTensorHooks.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/PyInterpreter.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/python_variable.h>

#include <unordered_set>
#include <utility>
#include <vector>

#include "backward.h"
#include "handle.h"
#include "kept.h"
#include "packing.h"
#include "tensors.h"

// From ATen/functorch/DynamicLayer.h, which includes headers that torch does not ship.
namespace at::functorch {
struct DynamicLayer;
TORCH_API const std::vector<DynamicLayer>& getDynamicLayerStack();
}  // namespace at::functorch

namespace memopt {
namespace {

namespace py = pybind11;

struct Pack {
  vectorcallfunc call;
  py::object engine;  // a weak reference; null while no forward uses the hook
};

PyObject* unpack_function = nullptr;
thread_local std::unordered_set<PyObject*> planned;  // forwards of this thread that are running
thread_local bool have_rested = false;               // whether hooks were off in one of them
std::vector<PyObject*>& idle = *new std::vector<PyObject*>;  // pack hooks that no forward uses; under the interpreter's lock

// Sets a reference count so high that torch, whose references are not counted within a forward, never makes it zero.
// A node that outlives the forward drops a reference that was not counted. So the count falls, and is set again.
void make_immortal(PyObject* object) {
  constexpr Py_ssize_t kMany = Py_ssize_t{1} << 29;
  if (Py_REFCNT(object) < kMany / 2) Py_SET_REFCNT(object, kMany);
}

// The object of a weak reference; none if it was freed, or there is no reference.
py::object referent(const py::object& reference) {
  if (!reference) return py::none();
#if PY_VERSION_HEX >= 0x030D0000
  PyObject* object = nullptr;
  if (PyWeakref_GetRef(reference.ptr(), &object) < 0) throw py::error_already_set();
  return object == nullptr ? py::none() : py::reinterpret_steal<py::object>(object);
#else
  return py::reinterpret_borrow<py::object>(PyWeakref_GetObject(reference.ptr()));
#endif
}

PyObject* free_hook(PyObject* self, PyObject*) {
  const py::object engine = std::exchange(value_of<Pack>(self).engine, py::object());
  if (engine) idle.push_back(self);
  Py_RETURN_NONE;
}

PyObject* called_hook(PyObject* self, PyObject* const* args, size_t n) {
  if (PyVectorcall_NARGS(n) != 1) return PyErr_Format(PyExc_TypeError, "a pack hook takes 1 argument, got %zd", PyVectorcall_NARGS(n));
  PyObject* const t = args[0];
  const py::object engine = referent(value_of<Pack>(self).engine);
  if (engine.is_none()) return PyErr_Format(PyExc_AssertionError, "the forward, which holds the engine, is over");
  static PyObject* const name = PyUnicode_InternFromString("packing");
  const auto packing = py::reinterpret_steal<py::object>(PyObject_GetAttr(engine.ptr(), name));
  if (!packing) return nullptr;
  if (!packing.is_none() && THPVariable_Check(t) && !is_in_transform()) {
    const auto* known = static_cast<Packing*>(PyCapsule_GetPointer(packing.ptr(), nullptr));
    if (known == nullptr) return nullptr;
    py::object packed = pack(*known, engine, THPVariable_Unpack(t));
    if (!packed.is_none()) return packed.release().ptr();
  }
  return engine.attr("pack")(py::handle(t)).release().ptr();
}

// Without torch's macros for errors, which also look for warnings, and take as long as a tenth of all this.
PyObject* call_hook(PyObject* self, PyObject* const* args, size_t n, PyObject*) {
  try {
    return called_hook(self, args, n);
  } catch (py::error_already_set& error) {
    error.restore();
  } catch (python_error& error) {
    error.restore();
  } catch (const std::exception& error) {
    PyErr_SetString(PyExc_RuntimeError, error.what());
  }
  return nullptr;
}

}  // namespace

bool add_hooks(PyObject* module) {
  static PyMethodDef methods[] = {{"free", free_hook, METH_NOARGS, nullptr}, kLastMethod};
  static PyMemberDef fields[] = {
      {"__vectorcalloffset__", T_PYSSIZET, offsetof(Object<Pack>, value.call), READONLY, nullptr}, kLastField};
  const bool added = add_type<Pack>(
      module, "Pack",
      {{Py_tp_call, reinterpret_cast<void*>(PyVectorcall_Call)}, {Py_tp_members, fields}, {Py_tp_methods, methods}},
      Py_TPFLAGS_HAVE_VECTORCALL);
  if (!added) return false;
  unpack_function = PyObject_GetAttrString(module, "unpack");
  if (unpack_function == nullptr) return false;
  make_immortal(unpack_function);
  return true;
}

bool is_in_transform() { return !at::functorch::getDynamicLayerStack().empty(); }

bool is_hook(PyObject* object) { return object == unpack_function || Py_TYPE(object) == type_of<Pack>; }

PyObject* pack_hook(PyObject*, PyObject* engine) {
  HANDLE_TH_ERRORS
  py::object hook;
  if (idle.empty()) {
    hook = make<Pack>(call_hook, py::object());
  } else {
    hook = py::reinterpret_borrow<py::object>(idle.back());
    idle.pop_back();
  }
  make_immortal(hook.ptr());
  make_immortal(unpack_function);
  value_of<Pack>(hook.ptr()).engine = py::reinterpret_borrow<py::object>(engine);
  return hook.release().ptr();
  END_HANDLE_TH_ERRORS
}

bool hooks_rest() { return have_rested && at::SavedTensorDefaultHooks::get_tls_state().is_tracing; }

// Torch does not call hooks while it traces. This is how they are switched off. A backward has the state of the thread that
// began it, and restores it after each node, so hooks are on in a backward. They are on in nested forwards, too, which both see
// an op of the inner one.
void rest_hooks() {
  if (hooks_rest() || planned.size() != 1) return;
  const auto& state = at::SavedTensorDefaultHooks::get_tls_state();
  if (state.is_tracing || state.stack.empty() || !is_hook(state.stack.top().first.ptr(getPyInterpreter()))) return;
  if (torch::autograd::get_current_graph_task_id() != -1) return;
  have_rested = true;
  at::SavedTensorDefaultHooks::set_tracing(true);
}

void wake_hooks() {
  if (have_rested) at::SavedTensorDefaultHooks::set_tracing(false);
}

void begin_resting(PyObject* forward) {
  wake_hooks();
  planned.insert(forward);
}

void end_resting(PyObject* forward) {
  wake_hooks();
  planned.erase(forward);
  if (planned.empty()) have_rested = false;
}

PyObject* wake(PyObject*, PyObject*) {
  wake_hooks();
  Py_RETURN_NONE;
}

PyObject* unpack(PyObject*, PyObject* packed) {
  HANDLE_TH_ERRORS
  const py::handle object(packed);
  const Kept* const kept = value_in<Kept>(packed);
  if (kept != nullptr && kept->is_unchanged()) return wrapped(kept->t).release().ptr();
  const Handle* const handle = value_in<Handle>(packed);
  if (handle == nullptr) return object.attr("get")().release().ptr();
  const py::object engine = handle->engine;
  py::object value = unpacked(engine, object);
  return (value.is_none() ? engine.attr("unpacked")(object) : value).release().ptr();
  END_HANDLE_TH_ERRORS
}

}  // namespace memopt
