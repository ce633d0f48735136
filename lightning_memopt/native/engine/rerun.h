// Runs a recorded call again (`run` in runtime/engine/rebuild.py).
#pragma once
#include <functional>

#include "call.h"
#include "versions.h"

namespace memopt {

// Runs a call on the values of the versions that it reads, and sets the values of the versions that it makes. Call it below
// autograd. `survives`: whether the bytes of a version that the call overwrites are still needed; if so, it overwrites a copy.
// Returns false if the call must run in Python; then nothing has been done.
bool rerun(const Call& call, const Versions& versions, const std::function<bool(const Version&)>& survives);

}  // namespace memopt
