#include "progress.h"

namespace memopt {

bool add_progress(PyObject* module) {
#define FIELD(type, name) MEMOPT_FIELD(Progress, type, name, 0)
  static PyMemberDef fields[] = {
      FIELD(T_LONGLONG, position), FIELD(T_LONGLONG, furthest), FIELD(T_LONGLONG, point), FIELD(T_LONGLONG, fence), FIELD(T_LONGLONG, turn),
      FIELD(T_BOOL, lost), FIELD(T_BOOL, asked), FIELD(T_BOOL, on_plan), FIELD(T_BOOL, out_of_order), kLastField,
  };
#undef FIELD
  return add_type<Progress>(module, "Progress", {{Py_tp_members, fields}}, Py_TPFLAGS_BASETYPE);
}

}  // namespace memopt
