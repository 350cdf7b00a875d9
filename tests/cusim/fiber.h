// A thread of control with its own stack, entered and left by hand: what one CUDA thread runs on.
#ifndef MOE_TESTS_CUSIM_FIBER_H_
#define MOE_TESTS_CUSIM_FIBER_H_

#include <cstddef>

namespace cusim {

// Resume() and SwitchToHost() tell the sanitizers which stack runs next. ThreadSanitizer sees every
// fiber as a thread of its own, and a switch as no synchronisation: only what the simulated program
// does (barriers, atomics) orders two fibers.
//
// One host thread may use fibers at a time. Stacks have a guard page below.
class Fiber {
 public:
  // The first Resume() calls `body`, which must never return: a fiber is used again and again.
  explicit Fiber(void (*body)());
  ~Fiber();
  Fiber(const Fiber&) = delete;
  Fiber& operator=(const Fiber&) = delete;

  // From the host: runs the fiber until it calls SwitchToHost.
  void Resume();
  // From inside a fiber: goes back to the Resume() that runs it.
  static void SwitchToHost();

  static constexpr size_t kStackBytes = 128 << 10;

 private:
  static void Enter();

  void (*body_)();
  char* stack_;          // kStackBytes, above the guard page
  void* stack_pointer_;  // while it does not run
  void* tsan_fiber_ = nullptr;
  void* asan_fake_stack_ = nullptr;
};

// Happens-before as ThreadSanitizer sees it; nothing without it. What precedes a release of `tag`
// happens before what follows a later acquire of it.
void TsanRelease(void* tag);
void TsanAcquire(void* tag);

// While it lives, memory that the simulator takes, fills and gives back is no access of the
// simulated program.
class TsanIgnore {
 public:
  TsanIgnore();
  ~TsanIgnore();
  TsanIgnore(const TsanIgnore&) = delete;
  TsanIgnore& operator=(const TsanIgnore&) = delete;
};

}  // namespace cusim

#endif  // MOE_TESTS_CUSIM_FIBER_H_
