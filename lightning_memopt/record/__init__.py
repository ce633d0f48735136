"""What ran: ops, storages and their versions, as they happen."""

from lightning_memopt.record.calls import (
    around_calls,
    compiled_modules,
    drop_seams,
    eager_modules,
    instead_of_calls,
    keep_seams,
    unwatched_call,
)
from lightning_memopt.record.exposure import unwatched, watching, watching_sizes
from lightning_memopt.record.levels import around_dual_levels, in_dual_level, in_transform
from lightning_memopt.record.protocols import Observer, OpRecord, Owner
from lightning_memopt.record.recorder import Recorder
from lightning_memopt.record.rules import Rule, is_norm, register_op, rule_of, rule_of_call, rules_generation, written_by
from lightning_memopt.record.settings import numeric_flags, set_numeric_flags
from lightning_memopt.record.tape import UNKNOWN, Call, Slot, Tape, View, storage_id
from lightning_memopt.record.tensors import detached, fills, is_plain, tensors_in
from lightning_memopt.record.uncompiled import uncompiled, uncompiled_itself

__all__ = [
    "UNKNOWN",
    "Call",
    "Observer",
    "OpRecord",
    "Owner",
    "Recorder",
    "Rule",
    "Slot",
    "Tape",
    "View",
    "around_calls",
    "around_dual_levels",
    "compiled_modules",
    "detached",
    "drop_seams",
    "eager_modules",
    "fills",
    "in_dual_level",
    "in_transform",
    "instead_of_calls",
    "is_norm",
    "is_plain",
    "keep_seams",
    "numeric_flags",
    "register_op",
    "rule_of",
    "rule_of_call",
    "rules_generation",
    "set_numeric_flags",
    "storage_id",
    "tensors_in",
    "uncompiled",
    "uncompiled_itself",
    "unwatched",
    "unwatched_call",
    "watching",
    "watching_sizes",
    "written_by",
]
