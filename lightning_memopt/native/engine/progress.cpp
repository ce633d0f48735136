#include "progress.h"

#include <structmember.h>

#include <cstddef>

namespace memopt {

bool add_progress(PyObject* module) {
  static PyMemberDef fields[] = {
      {"position", T_LONGLONG, offsetof(Progress, position), 0, nullptr},
      {"furthest", T_LONGLONG, offsetof(Progress, furthest), 0, nullptr},
      {"point", T_LONGLONG, offsetof(Progress, point), 0, nullptr},
      {"fence", T_LONGLONG, offsetof(Progress, fence), 0, nullptr},
      {"turn", T_LONGLONG, offsetof(Progress, turn), 0, nullptr},
      {"lost", T_BOOL, offsetof(Progress, lost), 0, nullptr},
      {"asked", T_BOOL, offsetof(Progress, asked), 0, nullptr},
      {"on_plan", T_BOOL, offsetof(Progress, on_plan), 0, nullptr},
      {"out_of_order", T_BOOL, offsetof(Progress, out_of_order), 0, nullptr},
      {nullptr, 0, 0, 0, nullptr},
  };
  static PyType_Slot slots[] = {{Py_tp_members, fields}, {0, nullptr}};
  static PyType_Spec spec{
      "lightning_memopt.native.engine.Progress", sizeof(Progress), 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE, slots};
  PyObject* const type = PyType_FromSpec(&spec);
  return type != nullptr && PyModule_AddObject(module, "Progress", type) == 0;
}

}  // namespace memopt
