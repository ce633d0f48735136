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

struct Hook {
  PyObject_HEAD
  PyObject* engine;  // a weak reference; null while no forward uses the hook
};

PyTypeObject* pack_type = nullptr;
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
py::object referent(PyObject* reference) {
  if (reference == nullptr) return py::none();
#if PY_VERSION_HEX >= 0x030D0000
  PyObject* object = nullptr;
  if (PyWeakref_GetRef(reference, &object) < 0) throw py::error_already_set();
  return object == nullptr ? py::none() : py::reinterpret_steal<py::object>(object);
#else
  return py::reinterpret_borrow<py::object>(PyWeakref_GetObject(reference));
#endif
}

PyObject* free_hook(PyObject* self, PyObject*) {
  PyObject* const engine = std::exchange(reinterpret_cast<Hook*>(self)->engine, nullptr);
  if (engine != nullptr) idle.push_back(self);
  Py_XDECREF(engine);
  Py_RETURN_NONE;
}

PyObject* call_hook(PyObject* self, PyObject* args, PyObject*) {
  HANDLE_TH_ERRORS
  if (PyTuple_GET_SIZE(args) != 1) return PyErr_Format(PyExc_TypeError, "a pack hook takes 1 argument, got %zd", PyTuple_GET_SIZE(args));
  PyObject* const t = PyTuple_GET_ITEM(args, 0);
  const py::object engine = referent(reinterpret_cast<Hook*>(self)->engine);
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
  END_HANDLE_TH_ERRORS
}

}  // namespace

bool add_hooks(PyObject* module) {
  static PyMethodDef methods[] = {{"free", free_hook, METH_NOARGS, nullptr}, {nullptr, nullptr, 0, nullptr}};
  static PyType_Slot slots[] = {
      {Py_tp_call, reinterpret_cast<void*>(call_hook)},
      {Py_tp_methods, methods},
      {0, nullptr},
  };
  static PyType_Spec spec{
      "lightning_memopt.native.engine.Pack", sizeof(Hook), 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION, slots};
  PyObject* const type = PyType_FromSpec(&spec);
  if (type == nullptr || PyModule_AddObject(module, "Pack", type) != 0) return false;
  pack_type = reinterpret_cast<PyTypeObject*>(type);
  unpack_function = PyObject_GetAttrString(module, "unpack");
  if (unpack_function == nullptr) return false;
  make_immortal(unpack_function);
  return true;
}

bool is_in_transform() { return !at::functorch::getDynamicLayerStack().empty(); }

bool is_hook(PyObject* object) { return object == unpack_function || Py_TYPE(object) == pack_type; }

PyObject* pack_hook(PyObject*, PyObject* engine) {
  PyObject* hook;
  if (idle.empty()) {
    hook = pack_type->tp_alloc(pack_type, 0);
    if (hook == nullptr) return nullptr;
  } else {
    hook = Py_NewRef(idle.back());
    idle.pop_back();
  }
  make_immortal(hook);
  make_immortal(unpack_function);
  reinterpret_cast<Hook*>(hook)->engine = Py_NewRef(engine);
  return hook;
}

// Torch does not call hooks while it traces. This is how they are switched off. A backward has the state of the thread that
// began it, and restores it after each node, so hooks are on in a backward. They are on in nested forwards, too, which both see
// an op of the inner one.
void rest_hooks() {
  if (planned.size() != 1) return;
  const auto& state = at::SavedTensorDefaultHooks::get_tls_state();
  if (state.is_tracing || state.stack.empty() || !is_hook(state.stack.top().first.ptr(getPyInterpreter()))) return;
  if (torch::autograd::get_current_graph_task_id() != -1) return;
  have_rested = true;
  at::SavedTensorDefaultHooks::set_tracing(true);
}

bool hooks_rest() { return have_rested && at::SavedTensorDefaultHooks::get_tls_state().is_tracing; }

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
