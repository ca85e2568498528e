// Work that XLA:CPU's own threads share.

#ifndef EAGLE_CPU_THREADS_H_
#define EAGLE_CPU_THREADS_H_

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <functional>
#include <memory>
#include <thread>

#include "xla/ffi/api/ffi.h"

namespace {  // a process may load libraries of several versions

namespace ffi = xla::ffi;

constexpr int kSpins = 4096;  // before a waiting thread lets others run

// What threads share. It outlives the call: a task may begin when all chunks are taken and the call has returned, and
// then touches nothing else.
struct Shared {
  std::atomic<size_t> next{0}, done{0};
};

// Runs `chunk(0)` to `chunk(count - 1)`, here and on the pool's threads. Waits for chunks that a thread has begun, and
// never for a task that none has.
void InParallel(ffi::ThreadPool pool, size_t count, const std::function<void(size_t)>& chunk) {
  const size_t helpers = std::min<size_t>(count, std::max<int64_t>(pool.num_threads(), 1)) - 1;
  if (helpers == 0) {
    for (size_t i = 0; i < count; ++i) chunk(i);
    return;
  }
  const auto shared = std::make_shared<Shared>();
  const auto work = [shared, count, &chunk] {
    for (size_t i; (i = shared->next.fetch_add(1, std::memory_order_relaxed)) < count;) {
      chunk(i);
      shared->done.fetch_add(1, std::memory_order_release);
    }
  };
  for (size_t i = 0; i < helpers; ++i) pool.Schedule([work] { work(); });
  work();
  for (int spin = 0; shared->done.load(std::memory_order_acquire) < count; ++spin) {
    if (spin >= kSpins) std::this_thread::yield();
  }
}

}  // namespace

#endif  // EAGLE_CPU_THREADS_H_
