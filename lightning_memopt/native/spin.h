// A lock that is held for a few instructions; it needs no destruction, because memory may be freed while the process ends.
#pragma once
#include <atomic>
#include <thread>

namespace memopt {

class Spin {
 public:
  void lock() {
    for (int turns = 0; taken_.exchange(true, std::memory_order_acquire); ++turns)
      if (turns > 64) std::this_thread::yield();
  }
  void unlock() { taken_.store(false, std::memory_order_release); }

 private:
  std::atomic<bool> taken_{false};
};

}  // namespace memopt
