// SPDX-License-Identifier: Apache-2.0
// A small pool of threads for callers that bring none (the Python module, C programs). Beside torch's pool it is never
// used. After fork() the child starts with a fresh pool: threads do not survive forking.
#include <pthread.h>
#if defined(__linux__)
#include <sched.h>
#endif

#include <algorithm>
#include <cstdio>
#include <condition_variable>
#include <mutex>
#include <thread>
#include <vector>

#include "amx_kernels/amx_kernels.h"
#include "base/status.h"

namespace {

constexpr int kMaxThreads = 4096;

// CPUs that a container's quota pays for, or a large number: cgroup v2's "quota period" file, else v1's two files.
int quota_threads() {
  double quota = -1, period = -1;
  if (std::FILE* file = std::fopen("/sys/fs/cgroup/cpu.max", "r")) {
    if (std::fscanf(file, "%lf %lf", &quota, &period) != 2) quota = -1;  // "max"
    std::fclose(file);
  } else {
    const auto read = [](const char* path, double& value) {
      if (std::FILE* one = std::fopen(path, "r")) {
        if (std::fscanf(one, "%lf", &value) != 1) value = -1;
        std::fclose(one);
      }
    };
    read("/sys/fs/cgroup/cpu/cpu.cfs_quota_us", quota);
    read("/sys/fs/cgroup/cpu/cpu.cfs_period_us", period);
  }
  return quota > 0 && period > 0 ? std::max(1, static_cast<int>(quota / period + 0.999)) : kMaxThreads;
}

// The CPUs this process may run on, within the container's quota.
int default_threads() {
  int cpus = static_cast<int>(std::max(1u, std::thread::hardware_concurrency()));
#if defined(__linux__)
  cpu_set_t set;
  if (sched_getaffinity(0, sizeof set, &set) == 0) cpus = std::max(1, CPU_COUNT(&set));
#endif
  return std::min(cpus, quota_threads());
}

class Pool {
 public:
  void run(int n, void (*task)(void*, int), void* arg) {
    const std::lock_guard<std::mutex> one_call(calls_);
    grow(n - 1);
    std::unique_lock<std::mutex> lock(mutex_);
    task_ = task;
    arg_ = arg;
    next_ = 0;
    total_ = running_ = n;
    wake_.notify_all();
    work(lock);
    done_.wait(lock, [this] { return running_ == 0; });
  }

 private:
  // Takes tasks until none is left. Called and left with the lock held.
  void work(std::unique_lock<std::mutex>& lock) {
    while (next_ < total_) {
      const int index = next_++;
      const auto task = task_;
      void* const arg = arg_;
      lock.unlock();
      task(arg, index);
      lock.lock();
      if (--running_ == 0) done_.notify_all();
    }
  }

  void grow(int workers) {
    while (static_cast<int>(threads_.size()) < workers) {
      try {
        threads_.emplace_back([this] {
          std::unique_lock<std::mutex> lock(mutex_);
          for (;;) {
            wake_.wait(lock, [this] { return next_ < total_; });
            work(lock);
          }
        });
        threads_.back().detach();
      } catch (...) {
        return;  // the system gives no more threads: those there are, and the caller, do the work
      }
    }
  }

  std::mutex calls_, mutex_;
  std::condition_variable wake_, done_;
  std::vector<std::thread> threads_;
  void (*task_)(void*, int) = nullptr;
  void* arg_ = nullptr;
  int next_ = 0, total_ = 0, running_ = 0;
};

// Never destroyed: its threads may still wait on it when the process ends.
Pool* pool = nullptr;
int num_threads = 0;
std::mutex setup;

Pool& the_pool() {
  const std::lock_guard<std::mutex> lock(setup);
  if (pool == nullptr) {
    pool = new Pool;
    static const int registered = pthread_atfork(
        [] { setup.lock(); }, [] { setup.unlock(); },
        [] {
          pool = nullptr;  // the parent's, with threads that do not exist here
          setup.unlock();
        });
    (void)registered;
  }
  return *pool;
}

void run(void*, int n, void (*task)(void*, int), void* arg) { the_pool().run(n, task, arg); }

}  // namespace

extern "C" amxk_code amxk_set_num_threads(int n, amxk_error* error) {
  if (n < 1 || n > kMaxThreads) {
    return amxk::fail(error, AMXK_INVALID_ARGUMENT, "set_num_threads: num_threads is %d, expected between 1 and %d", n,
                      kMaxThreads);
  }
  const std::lock_guard<std::mutex> lock(setup);
  num_threads = n;
  return AMXK_OK;
}

extern "C" int amxk_get_num_threads(void) {
  const std::lock_guard<std::mutex> lock(setup);
  if (num_threads == 0) num_threads = default_threads();  // once: the quota is a file
  return num_threads;
}

extern "C" amxk_parallel amxk_default_parallel(void) { return {amxk_get_num_threads(), nullptr, run}; }
