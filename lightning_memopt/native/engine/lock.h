// The interpreter's lock, taken and released by Python's own functions, because pybind11's take twice as many instructions.
#pragma once
#include <torch/csrc/python_headers.h>

namespace memopt {

// While it exists, this thread has the lock.
class Locked {
 public:
  Locked() : before_(PyGILState_Ensure()) {}
  ~Locked() { PyGILState_Release(before_); }
  Locked(const Locked&) = delete;
  Locked& operator=(const Locked&) = delete;

 private:
  PyGILState_STATE before_;
};

// While it exists, this thread, which has the lock, releases it to others.
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
