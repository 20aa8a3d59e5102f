#include "common/worker_pool.hpp"

#include <algorithm>
#include <new>
#include <system_error>
#include <thread>

#if defined(__unix__) || defined(__APPLE__)
#include <pthread.h>

#include <csignal>
#define KVTIER_POSIX 1
#endif

namespace kvtier {
namespace {

alignas(WorkerPool) std::byte storage[sizeof(WorkerPool)];

WorkerPool* make_pool() { return ::new (static_cast<void*>(storage)) WorkerPool; }

// Signals belong to the interpreter's threads: a worker starts with all of them blocked.
class BlockSignals {
 public:
#ifdef KVTIER_POSIX
  BlockSignals() {
    sigset_t all;
    sigfillset(&all);
    blocked_ = pthread_sigmask(SIG_SETMASK, &all, &before_) == 0;
  }
  ~BlockSignals() {
    if (blocked_) pthread_sigmask(SIG_SETMASK, &before_, nullptr);
  }

 private:
  sigset_t before_{};
  bool blocked_ = false;
#else
  BlockSignals() = default;
#endif

 public:
  BlockSignals(const BlockSignals&) = delete;
  BlockSignals& operator=(const BlockSignals&) = delete;
};

}  // namespace

WorkerPool& WorkerPool::shared() {
  static WorkerPool* const pool = [] {
#ifdef KVTIER_POSIX
    pthread_atfork(nullptr, nullptr, [] { make_pool(); });
#endif
    return make_pool();
  }();
  return *pool;
}

void WorkerPool::run(std::size_t num_threads, const std::function<void()>& work) {
  if (num_threads <= 1) {
    work();
    return;
  }
  Job job{work, num_threads - 1};
  {
    const std::lock_guard lock(mutex_);
    grow_to(job.num_wanted);
    if (num_workers_ > 0) jobs_.push_back(&job);
  }
  job_waits_.notify_all();
  work();
  // No worker may join from here on; wait for the ones that have joined.
  std::unique_lock lock(mutex_);
  std::erase(jobs_, &job);
  worker_done_.wait(lock, [&job] { return job.num_running == 0; });
}

void WorkerPool::grow_to(std::size_t num_workers) {
  const BlockSignals while_starting;
  try {
    for (; num_workers_ < num_workers; ++num_workers_) std::thread([this] { serve(); }).detach();
  } catch (const std::system_error&) {
    // The system has no more threads: the caller and the existing workers do the work.
  }
}

void WorkerPool::serve() {
  std::unique_lock lock(mutex_);
  for (;;) {
    job_waits_.wait(lock, [this] { return !jobs_.empty(); });
    Job& job = *jobs_.front();
    if (--job.num_wanted == 0) jobs_.pop_front();
    ++job.num_running;
    lock.unlock();
    job.work();
    lock.lock();
    // Under the mutex: the caller frees the job once it sees zero.
    if (--job.num_running == 0) worker_done_.notify_all();
  }
}

}  // namespace kvtier
