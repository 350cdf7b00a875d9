// A thread of control with its own stack, switched explicitly: each runs one CUDA thread.
#ifndef MOE_TESTS_CUSIM_FIBER_H_
#define MOE_TESTS_CUSIM_FIBER_H_

#include <cstddef>

namespace cusim {

// Resume() and SwitchToHost() inform the sanitizers which stack runs next. ThreadSanitizer treats
// every fiber as a thread of its own, and a switch as no synchronisation: only the operations of
// the simulated program (barriers, atomics) order two fibers.
//
// One host thread may use fibers at a time. Stacks have a guard page below.
class Fiber {
 public:
  // The first Resume() calls `body`, which must never return: a fiber is reused.
  explicit Fiber(void (*body)());
  ~Fiber();
  Fiber(const Fiber&) = delete;
  Fiber& operator=(const Fiber&) = delete;

  // From the host: runs the fiber until it calls SwitchToHost.
  void Resume();
  // Called inside a fiber: returns to the Resume() that runs it.
  static void SwitchToHost();

  // Whether the memory is of its stack.
  bool Holds(const void* memory) const;

  static constexpr size_t kStackBytes = 128 << 10;

 private:
  static void Enter();

  void (*body_)();
  char* stack_;          // kStackBytes, above the guard page
  void* stack_pointer_;  // while it is suspended
  void* tsan_fiber_ = nullptr;
  void* asan_fake_stack_ = nullptr;
};

// Happens-before edges for ThreadSanitizer; nothing without it. What precedes a release of `tag`
// happens before what follows a later acquire of it.
void TsanRelease(void* tag);
void TsanAcquire(void* tag);

// While an object lives, accesses of the simulator to memory that it takes, fills and gives back do
// not count as the simulated program's.
class TsanIgnore {
 public:
  TsanIgnore();
  ~TsanIgnore();
  TsanIgnore(const TsanIgnore&) = delete;
  TsanIgnore& operator=(const TsanIgnore&) = delete;
};

}  // namespace cusim

#endif  // MOE_TESTS_CUSIM_FIBER_H_
