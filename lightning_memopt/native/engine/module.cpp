// The parts of the engine that are native, as a Python module (__init__.py builds and loads it).
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pybind.h>

#include "backward.h"
#include "call.h"
#include "handle.h"
#include "hollow.h"
#include "hooks.h"
#include "interpreter.h"
#include "kept.h"
#include "matching.h"
#include "nodes.h"
#include "numbers.h"
#include "objects.h"
#include "packing.h"
#include "prepared.h"
#include "progress.h"
#include "recording.h"
#include "rerun.h"
#include "storages.h"
#include "versions.h"
#include "view.h"

namespace memopt {
namespace {

template <typename T>
PyObject* capsule(std::unique_ptr<T> owned) {
  if (owned == nullptr) Py_RETURN_NONE;
  const auto forget = [](PyObject* self) { delete static_cast<T*>(PyCapsule_GetPointer(self, nullptr)); };
  return PyCapsule_New(owned.release(), nullptr, forget);
}

// know(objects, in_order, current_stream): sets constants and functions (objects.h, version.h).
PyObject* know_objects(PyObject*, PyObject* args) {
  PyObject* objects;
  if (!PyArg_ParseTuple(args, "O!OO", &PyDict_Type, &objects, &in_order, &current_stream)) return nullptr;
  Py_INCREF(in_order);
  Py_INCREF(current_stream);
  if (!know(objects)) return nullptr;
  Py_RETURN_NONE;
}

// prepare(name, overload, args, kwargs): an object for the slot `prepared` of a call; None if it must run in Python.
PyObject* prepare_call(PyObject*, PyObject* args) {
  HANDLE_TH_ERRORS
  const char *name, *overload;
  PyObject *given, *named;
  if (!PyArg_ParseTuple(args, "ssOO!", &name, &overload, &given, &PyDict_Type, &named)) return nullptr;
  return capsule(std::unique_ptr<Prepared>(prepare(name, overload, given, named)));
  END_HANDLE_TH_ERRORS
}

// run(call, versions, survives): runs a prepared call again. Returns whether it did. If not, nothing has been done.
PyObject* run_call(PyObject*, PyObject* const* args, Py_ssize_t n) {
  HANDLE_TH_ERRORS
  if (n != 3) return PyErr_Format(PyExc_TypeError, "run takes 3 arguments, got %zd", n);
  const pybind11::handle survives = args[2];
  const auto stays = [&](const Version& version) { return survives(pybind11::handle(object_of(version))).cast<bool>(); };
  return PyBool_FromLong(rerun(expect<Call>(args[0]), expect<Versions>(args[1]), stays));
  END_HANDLE_TH_ERRORS
}

// template(*, func, args, kwargs, grad, call, random, made, mutates, empty, why, writes, unshared): for `learn`; None if the op must be
// recorded in every step.
PyObject* make_template(PyObject*, PyObject*, PyObject* fields) {
  HANDLE_TH_ERRORS
  return capsule(template_of(pybind11::reinterpret_borrow<pybind11::dict>(fields)));
  END_HANDLE_TH_ERRORS
}

Numbers numbers_of(pybind11::handle sequence) {
  Numbers numbers;
  for (const pybind11::handle number : sequence) numbers.add(number.cast<int64_t>());
  return numbers;
}

// templates(n, held, unsaved, sized_by_data): room for the templates of `n` ops. The others: see `Templates::Sets`.
PyObject* make_templates(PyObject*, PyObject* args) {
  HANDLE_TH_ERRORS
  Py_ssize_t ops;
  PyObject *held, *unsaved, *sized_by_data;
  if (!PyArg_ParseTuple(args, "nOOO", &ops, &held, &unsaved, &sized_by_data)) return nullptr;
  const Templates::Sets sets{numbers_of(held), numbers_of(unsaved), numbers_of(sized_by_data)};
  return capsule(std::make_unique<Templates>(ops, sets));
  END_HANDLE_TH_ERRORS
}

// learn(templates, position, entry): `entry` is a template, the overload of an op on which nothing depends, or None.
PyObject* learn(PyObject*, PyObject* args) {
  HANDLE_TH_ERRORS
  PyObject *templates, *entry;
  Py_ssize_t position;
  if (!PyArg_ParseTuple(args, "OnO", &templates, &position, &entry)) return nullptr;
  auto* const all = static_cast<Templates*>(PyCapsule_GetPointer(templates, nullptr));
  if (all == nullptr) return nullptr;
  all->learn(position, entry);
  Py_RETURN_NONE;
  END_HANDLE_TH_ERRORS
}

// A cursor, whose class derives from `Progress`.
Progress& progress_of(pybind11::handle cursor) {
  if (PyType_IsSubtype(Py_TYPE(cursor.ptr()), type_of<Progress>) == 0) throw pybind11::type_error("expected a Progress");
  return value_of<Progress>(cursor.ptr());
}

// A tuple of so many arguments, which owns what a new object refers to.
pybind11::tuple arguments(PyObject* args, size_t n) {
  auto all = pybind11::reinterpret_borrow<pybind11::tuple>(args);
  if (all.size() != n) throw pybind11::type_error("takes " + std::to_string(n) + " arguments, got " + std::to_string(all.size()));
  return all;
}

// forward(of_storage, versions, beneath, unread, cursor, active, familiar, saving): an object for the field `native` of a matcher.
PyObject* make_forward(PyObject*, PyObject* args) {
  HANDLE_TH_ERRORS
  const auto all = arguments(args, 8);
  auto &of_storage = expect<Versions>(all[0].ptr()), &versions = expect<Versions>(all[1].ptr());
  auto& active = expect<Numbers>(all[5].ptr());
  return capsule(
      std::unique_ptr<Forward>(new Forward{all, of_storage, versions, active, progress_of(all[4]), all[2], all[3], all[6], all[7]}));
  END_HANDLE_TH_ERRORS
}

// saves(sets, packs): what a plan does with saves (`Saves`).
PyObject* make_saves(PyObject*, PyObject* args) {
  HANDLE_TH_ERRORS
  PyObject *sets, *packs;
  if (!PyArg_ParseTuple(args, "OO!", &sets, &PyDict_Type, &packs)) return nullptr;
  return capsule(std::make_unique<Saves>(sets, packs));
  END_HANDLE_TH_ERRORS
}

// packing(of_storage, saves, cursor, names, labels, stand_ins, packed): for `pack`.
PyObject* make_packing(PyObject*, PyObject* args) {
  HANDLE_TH_ERRORS
  const auto all = arguments(args, 7);
  const auto* saves = static_cast<Saves*>(PyCapsule_GetPointer(all[1].ptr(), nullptr));
  if (saves == nullptr) return nullptr;
  auto &labels = expect<Numbers>(all[4].ptr()), &packed = expect<Numbers>(all[6].ptr());
  return capsule(std::unique_ptr<Packing>(
      new Packing{all, expect<Versions>(all[0].ptr()), *saves, labels, packed, progress_of(all[2]), all[3], all[5]}));
  END_HANDLE_TH_ERRORS
}

// actions(events, segments, last_fetch): the plan's actions in backward (`actions_of`).
PyObject* make_actions(PyObject*, PyObject* args) {
  HANDLE_TH_ERRORS
  PyObject *events, *segments, *last_fetch;
  if (!PyArg_ParseTuple(args, "OOO!", &events, &segments, &PyDict_Type, &last_fetch)) return nullptr;
  return capsule(actions_of(events, segments, last_fetch));
  END_HANDLE_TH_ERRORS
}

// backward(actions, versions, active, cursor, stand_ins, until, due, ran): the backward of one forward.
PyObject* make_backward(PyObject*, PyObject* args) {
  HANDLE_TH_ERRORS
  const auto all = arguments(args, 8);
  const auto* actions = static_cast<Actions*>(PyCapsule_GetPointer(all[0].ptr(), nullptr));
  if (actions == nullptr) return nullptr;
  auto& versions = expect<Versions>(all[1].ptr());
  auto& active = expect<Numbers>(all[2].ptr());
  return capsule(std::unique_ptr<Backward>(
      new Backward{all, *actions, versions, active, progress_of(all[3]), all[4], all[5], all[6], all[7], {}}));
  END_HANDLE_TH_ERRORS
}

const Backward* backward_in(PyObject* const* args, Py_ssize_t n) {
  if (n != 3) throw pybind11::type_error("takes 3 arguments: a backward, an engine, and a handle or the number of a segment");
  const auto* backward = static_cast<Backward*>(PyCapsule_GetPointer(args[0], nullptr));
  if (backward == nullptr) throw pybind11::error_already_set();
  return backward;
}

// request(backward, engine, handle): the tensor; None if Python must return it.
PyObject* request_tensor(PyObject*, PyObject* const* args, Py_ssize_t n) {
  HANDLE_TH_ERRORS
  return request(*backward_in(args, n), args[1], args[2]).release().ptr();
  END_HANDLE_TH_ERRORS
}

// released(backward, engine, handle): false if Python must be told.
PyObject* release_handle(PyObject*, PyObject* const* args, Py_ssize_t n) {
  HANDLE_TH_ERRORS
  return PyBool_FromLong(released(*backward_in(args, n), args[1], args[2]));
  END_HANDLE_TH_ERRORS
}

// perform(backward, engine, segment): runs a segment.
PyObject* perform_segment(PyObject*, PyObject* const* args, Py_ssize_t n) {
  HANDLE_TH_ERRORS
  const Backward* const backward = backward_in(args, n);
  perform(*backward, args[1], PyLong_AsSize_t(args[2]));
  Py_RETURN_NONE;
  END_HANDLE_TH_ERRORS
}

// in_python([(name, overload)]): the ops of torch of which a kernel is Python code.
PyObject* know_python_kernels(PyObject*, PyObject* names) {
  HANDLE_TH_ERRORS
  set_in_python(pybind11::handle(names).cast<std::vector<std::pair<std::string, std::string>>>());
  Py_RETURN_NONE;
  END_HANDLE_TH_ERRORS
}

// begin(forward), end(forward): `forward` is any object that lives until the end.
PyObject* begin(PyObject*, PyObject* forward) {
  begin_forward(forward);
  begin_resting(forward);
  Py_RETURN_NONE;
}

PyObject* end(PyObject*, PyObject* forward) {
  end_resting(forward);
  end_forward(forward);
  Py_RETURN_NONE;
}

// under_way(): number of planned forwards that are running, in all threads.
PyObject* under_way(PyObject*, PyObject*) { return PyLong_FromSize_t(forwards_under_way()); }

// counts(): number of ops of planned forwards that ran natively, and in Python, so far.
PyObject* counts(PyObject*, PyObject*) { return Py_BuildValue("LL", native_ops.load(), python_ops.load()); }

PyCFunction fast(PyObject* (*function)(PyObject*, PyObject* const*, Py_ssize_t)) {
  return reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(function));
}

PyMethodDef methods[] = {
    {"know", know_objects, METH_VARARGS, nullptr},
    {"prepare", prepare_call, METH_VARARGS, nullptr},
    {"run", fast(run_call), METH_FASTCALL, nullptr},
    {"template", reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(make_template)), METH_VARARGS | METH_KEYWORDS, nullptr},
    {"templates", make_templates, METH_VARARGS, nullptr},
    {"learn", learn, METH_VARARGS, nullptr},
    {"forward", make_forward, METH_VARARGS, nullptr},
    {"saves", make_saves, METH_VARARGS, nullptr},
    {"packing", make_packing, METH_VARARGS, nullptr},
    {"pack_hook", pack_hook, METH_O, nullptr},
    {"unpack", unpack, METH_O, nullptr},
    {"wake", wake, METH_NOARGS, nullptr},
    {"actions", make_actions, METH_VARARGS, nullptr},
    {"backward", make_backward, METH_VARARGS, nullptr},
    {"request", fast(request_tensor), METH_FASTCALL, nullptr},
    {"released", fast(release_handle), METH_FASTCALL, nullptr},
    {"perform", fast(perform_segment), METH_FASTCALL, nullptr},
    {"in_python", know_python_kernels, METH_O, nullptr},
    {"begin", begin, METH_O, nullptr},
    {"end", end, METH_O, nullptr},
    {"under_way", under_way, METH_NOARGS, nullptr},
    {"counts", counts, METH_NOARGS, nullptr},
    {"captured", fast(captured), METH_FASTCALL, nullptr},
    {"version", fast(make_version), METH_FASTCALL, nullptr},
    {"fresh", fast(fresh), METH_FASTCALL, nullptr},
    {"row", fast(row), METH_FASTCALL, nullptr},
    {"handle", fast(make_handle), METH_FASTCALL, nullptr},
    {"alias", alias, METH_O, nullptr},
    {"can_be_hollow", can_be_hollow, METH_NOARGS, nullptr},
    {"hollow", fast(hollow), METH_FASTCALL, nullptr},
    {"recipe", recipe, METH_O, nullptr},
    {"set_recipe", fast(set_recipe), METH_FASTCALL, nullptr},
    {"hollow_view", fast(hollow_view), METH_FASTCALL, nullptr},
    {"fill", fast(fill), METH_FASTCALL, nullptr},
    {"exchange", fast(exchange), METH_FASTCALL, nullptr},
    {"lent", fast(lent), METH_FASTCALL, nullptr},
    {"untrack", untrack, METH_O, nullptr},
    {"lonely", fast(lonely), METH_FASTCALL, nullptr},
    {"ungraded_nbytes", ungraded_nbytes, METH_O, nullptr},
    {"watch_nodes", watch_nodes, METH_NOARGS, nullptr},
    {"unwatch_nodes", unwatch_nodes, METH_O, nullptr},
    {"node_is", node_is, METH_O, nullptr},
    {nullptr, nullptr, 0, nullptr},
};

PyModuleDef module{PyModuleDef_HEAD_INIT, "engine", nullptr, -1, methods, nullptr, nullptr, nullptr, nullptr};

}  // namespace
}  // namespace memopt

PyMODINIT_FUNC PyInit_engine() {
  PyObject* const made = PyModule_Create(&memopt::module);
  using namespace memopt;
  if (made != nullptr && add_hooks(made) && add_version(made) && add_versions(made) && add_numbers(made) && add_view(made) && add_call(made) &&
      add_kept(made) && add_handle(made) && add_progress(made) && add_matching(made))
    return made;
  Py_XDECREF(made);
  return nullptr;
}
