"""What ran: ops, storages and their versions, as they happen."""

from lightning_memopt.record.exposure import watching
from lightning_memopt.record.recorder import Observer, Owner, Recorder, detached, is_plain
from lightning_memopt.record.rules import Rule, register_op, rule_of
from lightning_memopt.record.tape import UNKNOWN, Call, Slot, Tape, View, numeric_flags, set_numeric_flags, storage_id

__all__ = [
    "UNKNOWN",
    "Call",
    "Observer",
    "Owner",
    "Recorder",
    "Rule",
    "Slot",
    "Tape",
    "View",
    "detached",
    "is_plain",
    "numeric_flags",
    "register_op",
    "rule_of",
    "set_numeric_flags",
    "storage_id",
    "watching",
]
