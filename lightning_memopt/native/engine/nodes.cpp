#include "nodes.h"

#include <ATen/record_function.h>
#include <torch/csrc/Exceptions.h>

#include <cstdint>
#include <memory>
#include <vector>

namespace memopt {
namespace {

constexpr int64_t kNoNode = INT64_MIN;  // not -1, which is the number of a node that adds to a leaf
thread_local std::vector<int64_t> running;  // sequence numbers of the nodes that run, the outermost first
thread_local int64_t ended = kNoNode;         // number of the node that ended last

std::unique_ptr<at::ObserverContext> begins(const at::RecordFunction& node) {
  running.push_back(node.seqNr());
  return nullptr;
}

void ends(const at::RecordFunction&, at::ObserverContext*) {
  if (running.empty()) return;  // it had begun before the watch
  ended = running.back();
  running.pop_back();
}

}  // namespace

PyObject* watch_nodes(PyObject*, PyObject*) {
  HANDLE_TH_ERRORS
  running.clear();
  ended = kNoNode;
  const auto handle =
      at::addThreadLocalCallback(at::RecordFunctionCallback(&begins, &ends).scopes({at::RecordScope::BACKWARD_FUNCTION}));
  return PyLong_FromUnsignedLongLong(handle);
  END_HANDLE_TH_ERRORS
}

PyObject* unwatch_nodes(PyObject*, PyObject* number) {
  HANDLE_TH_ERRORS
  at::removeCallback(PyLong_AsUnsignedLongLong(number));
  Py_RETURN_NONE;
  END_HANDLE_TH_ERRORS
}

PyObject* node_is(PyObject*, PyObject* number) {
  const auto node = static_cast<int64_t>(PyLong_AsUnsignedLongLong(number));
  if (node == -1 && PyErr_Occurred()) return nullptr;
  if (!running.empty() && running.back() == node) return PyLong_FromLong(1);
  if (ended == node) return PyLong_FromLong(0);
  Py_RETURN_NONE;
}

}  // namespace memopt
