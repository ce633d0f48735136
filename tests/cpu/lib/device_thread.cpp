// A thread that runs backwards, as autograd's thread of a device does: one for the process, which Python's `threading` did not
// start. It begins with the number of threads that was set for kernels, and takes torch's thread-local state from each caller.
// The caller waits without the GIL, where no signal reaches it.
#include <Python.h>

#include <ATen/Parallel.h>
#include <ATen/ThreadLocalState.h>
#include <unistd.h>

#include <condition_variable>
#include <mutex>
#include <thread>

namespace {

struct Call {
  PyObject *function, *args, *kwargs;
  at::ThreadLocalState state;
  PyObject *result = nullptr, *type = nullptr, *error = nullptr, *traceback = nullptr;
  bool done = false;
};

struct Device {
  std::mutex busy;  // of callers: one backward runs, the next ones wait for it
  std::mutex mutex;
  std::condition_variable changed;
  Call* call = nullptr;

  void work() {
    at::init_num_threads();
    PyGILState_Ensure();
    PyThreadState* const python = PyEval_SaveThread();  // as of autograd's threads: it lives on, with its `threading.local`
    for (;;) {
      std::unique_lock lock(mutex);
      changed.wait(lock, [&] { return call != nullptr && !call->done; });
      Call& now = *call;
      lock.unlock();
      PyEval_RestoreThread(python);
      {
        at::ThreadLocalStateGuard guard(now.state);
        now.result = PyObject_Call(now.function, now.args, now.kwargs);
        if (now.result == nullptr) PyErr_Fetch(&now.type, &now.error, &now.traceback);
      }
      PyEval_SaveThread();
      lock.lock();
      now.done = true;
      changed.notify_all();
    }
  }

  void run(Call& given) {
    std::lock_guard one(busy);
    std::unique_lock lock(mutex);
    call = &given;
    changed.notify_all();
    changed.wait(lock, [&] { return given.done; });
    call = nullptr;
  }
};

Device* device = nullptr;  // never deleted: its thread is not stopped
pid_t owner = 0;

}  // namespace

/// What `function` returns or raises there.
extern "C" PyObject* memopt_call_in_device_thread(PyObject* function, PyObject* args, PyObject* kwargs) {
  if (owner != getpid()) {  // a thread does not survive a fork
    device = new Device;
    owner = getpid();
    std::thread([it = device] { it->work(); }).detach();
  }
  Call call{function, args, kwargs};
  Py_BEGIN_ALLOW_THREADS;
  device->run(call);
  Py_END_ALLOW_THREADS;
  if (call.result == nullptr) PyErr_Restore(call.type, call.error, call.traceback);
  return call.result;
}
