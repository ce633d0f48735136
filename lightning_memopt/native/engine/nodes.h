// Know which node of a backward runs in this thread. Python can ask torch for the current node, but that stays the same while
// autograd adds the results of the node to those of other nodes.
#pragma once
#include <Python.h>

namespace memopt {

// watch_nodes(): begins to note the nodes of this thread's backwards. Returns a number for `unwatch_nodes`.
PyObject* watch_nodes(PyObject*, PyObject*);

// unwatch_nodes(number)
PyObject* unwatch_nodes(PyObject*, PyObject* number);

// node_is(number): 1 while the node with this sequence number runs, 0 right after it, None where neither is known.
PyObject* node_is(PyObject*, PyObject* number);

}  // namespace memopt
