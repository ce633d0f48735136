// The interpreter's lock, as Python's own functions take and give it: pybind11's take twice as many instructions.
#pragma once
#include <torch/csrc/python_headers.h>

namespace memopt {

// While it lives, this thread has the lock.
class Locked {
 public:
  Locked() : before_(PyGILState_Ensure()) {}
  ~Locked() { PyGILState_Release(before_); }
  Locked(const Locked&) = delete;
  Locked& operator=(const Locked&) = delete;

 private:
  PyGILState_STATE before_;
};

// While it lives, this thread, which has the lock, lets others have it.
class Unlocked {
 public:
  Unlocked() : thread_(PyEval_SaveThread()) {}
  ~Unlocked() { PyEval_RestoreThread(thread_); }
  Unlocked(const Unlocked&) = delete;
  Unlocked& operator=(const Unlocked&) = delete;

 private:
  PyThreadState* thread_;
};

}  // namespace memopt
