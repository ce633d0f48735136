"""Recording a forward: its ops, storages and storage versions, as they come.

NOTE [Rules of rebuilding]. Dropped bytes are rebuilt by running recorded ops a second time. These rules make the bits the
same; comments cite them by number. `record` keeps R1 to R4, R9 and R10, `runtime` the others. Their tests are those of the
hazards A to E and M.

R1.  An op runs again only if it is known to give the same bits from the same inputs: its tags and schema say so, or
     the table in rules.py, to which users add (`register_op`), and `device.determinism`. A random op runs again from the
     generator state recorded with it.
R2.  An op that writes in place makes a new version of its storage. A rebuild makes the versions in their order, in new memory.
R3.  An op with a side effect that its schema does not show (the running statistics of batch norm) runs again in a form
     without it.
R4.  Bytes are never dropped unless the recorder saw how they were made. It does not see bytes from before the forward, bytes
     that a compiled region, an extension or another thread makes, or changes of memory whose address was taken. The result of
     `empty` has no content until an op overwrites all of it.
R5.  The tensors from which a rebuild starts are held, counted by the planner, and checked before they are read, because hooks
     switch autograd's own check off. If one was changed, autograd's error is raised. Before a recorded op changes one, it is
     copied.
R6.  Rebuilds run below Autograd and Autocast, without dispatch modes and hooks, under the grad mode and the numeric settings
     of the forward, in the order of the ops and without recursion.
R7.  A tensor that the user still holds, unchanged, is used instead of a rebuild. Rebuilt bytes that backward has overwritten
     are rebuilt once more. There are no reference cycles: memory is freed as soon as nobody refers to the autograd graph.
R8.  Rebuilds are checked. In the first observed step, each is compared with the tensor that was kept, and an op that gave
     other bits never runs again. In the first planned step, and after evictions, checksums are compared, and a difference is
     an error.
R9.  Code that the user compiled stays compiled. The user's checkpointing, saved-tensor hooks and modes are left alone, and
     bytes that they make fall under R4.
R10. Collectives never run again, and parameters are never copied.
R11. Each forward has one lock, because autograd may ask on any thread and on any stream. A stream that reads bytes waits for
     the stream that made them.
"""

from lightning_memopt.record.backwards import before_backwards
from lightning_memopt.record.calls import (
    around_calls,
    around_innermost,
    beneath_calls,
    compiled_modules,
    eager_modules,
    instead_of_calls,
)
from lightning_memopt.record.compiled_code import around_compiled, telling, told_of_compiled
from lightning_memopt.record.exposure import unwatched, watching, watching_sizes
from lightning_memopt.record.levels import around_dual_levels, in_dual_level, in_transform
from lightning_memopt.record.modes import Outside
from lightning_memopt.record.optimizers import double_of, is_registered, parameters_of, register_optimizer, updates_any
from lightning_memopt.record.protocols import Observer, OpRecord, Owner
from lightning_memopt.record.recorder import Recorder
from lightning_memopt.record.rules import (
    Rule,
    is_norm,
    is_unshared,
    register_op,
    rule_of,
    rule_of_call,
    rules_in_force,
    written_by,
)
from lightning_memopt.record.seams import Listening, Seams, drop_seams, keep_seams, listening_to
from lightning_memopt.record.settings import numeric_flags, set_numeric_flags
from lightning_memopt.record.tape import OUTSIDE, OVERWRITTEN, UNKNOWN, UNSHARED, Call, Origin, StorageVersion, Tape, View
from lightning_memopt.record.tensors import OWN_COUNT, detached, fills, is_dense, is_plain, tensors_in
from lightning_memopt.record.uncompiled import uncompiled, uncompiled_itself
from lightning_memopt.record.undoing import undo
from lightning_memopt.torch_private import storage_id

__all__ = [
    "OUTSIDE",
    "OVERWRITTEN",
    "OWN_COUNT",
    "UNKNOWN",
    "UNSHARED",
    "Call",
    "Observer",
    "OpRecord",
    "Listening",
    "Origin",
    "Outside",
    "Owner",
    "Recorder",
    "Rule",
    "Seams",
    "StorageVersion",
    "Tape",
    "View",
    "around_calls",
    "around_innermost",
    "before_backwards",
    "beneath_calls",
    "around_compiled",
    "around_dual_levels",
    "compiled_modules",
    "detached",
    "double_of",
    "drop_seams",
    "eager_modules",
    "fills",
    "is_dense",
    "in_dual_level",
    "in_transform",
    "instead_of_calls",
    "is_norm",
    "is_plain",
    "is_registered",
    "is_unshared",
    "keep_seams",
    "listening_to",
    "numeric_flags",
    "parameters_of",
    "register_op",
    "register_optimizer",
    "rule_of",
    "rule_of_call",
    "rules_in_force",
    "set_numeric_flags",
    "storage_id",
    "tensors_in",
    "telling",
    "told_of_compiled",
    "uncompiled",
    "uncompiled_itself",
    "undo",
    "unwatched",
    "updates_any",
    "watching",
    "watching_sizes",
    "written_by",
]
