// Persistent worker threads that help a caller with one piece of work at a time.
#pragma once

#include <condition_variable>
#include <cstddef>
#include <deque>
#include <functional>
#include <mutex>

namespace kvtier {

// One pool per process, shared by every caller. A caller always works itself, so a busy pool, or
// one that cannot start threads, costs speed and never the result.
//
// The pool is never destroyed: joining threads at exit would hang in a child made by fork, which
// inherits the pool's memory but none of its threads. In such a child the pool starts anew.
class WorkerPool {
 public:
  static WorkerPool& shared();

  // Calls `work` on this thread and on up to `num_threads - 1` workers; returns when all calls have
  // ended. `work` must divide the work by itself, must not throw, and may be called fewer times
  // than `num_threads`.
  void run(std::size_t num_threads, const std::function<void()>& work);

  WorkerPool() = default;
  WorkerPool(const WorkerPool&) = delete;
  WorkerPool& operator=(const WorkerPool&) = delete;

 private:
  struct Job {
    const std::function<void()>& work;
    std::size_t num_wanted;       // workers that may still join
    std::size_t num_running = 0;  // workers inside `work`
  };

  void grow_to(std::size_t num_workers);  // with the mutex held
  void serve();

  std::mutex mutex_;
  std::condition_variable job_waits_;
  std::condition_variable worker_done_;
  std::deque<Job*> jobs_;
  std::size_t num_workers_ = 0;
};

}  // namespace kvtier
