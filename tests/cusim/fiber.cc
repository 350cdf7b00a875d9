#include "tests/cusim/fiber.h"

#include <cstdint>
#include <cstdio>
#include <cstdlib>

#include <sys/mman.h>
#include <unistd.h>

// This file is compiled without -fsanitize=thread (it would instrument the switch itself); the
// build passes a macro for it.
// NOLINTBEGIN: these names are the sanitizers'.
#if defined(CUSIM_TSAN)
extern "C" {
void* __tsan_get_current_fiber();
void* __tsan_create_fiber(unsigned flags);
void __tsan_destroy_fiber(void* fiber);
void __tsan_switch_to_fiber(void* fiber, unsigned flags);
void __tsan_acquire(void* tag);
void __tsan_release(void* tag);
void AnnotateIgnoreReadsBegin(const char* file, int line);
void AnnotateIgnoreReadsEnd(const char* file, int line);
}
#else
static void* __tsan_get_current_fiber() {
  return nullptr;
}
static void* __tsan_create_fiber(unsigned) {
  return nullptr;
}
static void __tsan_destroy_fiber(void*) {}
static void __tsan_switch_to_fiber(void*, unsigned) {}
static void __tsan_acquire(void*) {}
static void __tsan_release(void*) {}
static void AnnotateIgnoreReadsBegin(const char*, int) {}
static void AnnotateIgnoreReadsEnd(const char*, int) {}
#endif
#if defined(__SANITIZE_ADDRESS__)
extern "C" {
void __sanitizer_start_switch_fiber(void** fake_stack_save, const void* bottom, size_t size);
void __sanitizer_finish_switch_fiber(void* fake_stack, const void** bottom_old, size_t* size_old);
}
#else
static void __sanitizer_start_switch_fiber(void**, const void*, size_t) {}
static void __sanitizer_finish_switch_fiber(void*, const void**, size_t*) {}
#endif
// NOLINTEND

// Saves the registers that the System V ABI has callees keep, and continues on another stack.
extern "C" void cusim_switch_stack(void** save_stack_pointer, void* new_stack_pointer);
asm(R"(
.pushsection .text
.globl cusim_switch_stack
.type cusim_switch_stack, @function
cusim_switch_stack:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size cusim_switch_stack, . - cusim_switch_stack
.popsection
)");

namespace cusim {
namespace {

// The stack of the thread that called Resume().
struct Host {
  void* stack_pointer = nullptr;
  void* tsan_fiber = nullptr;
  void* asan_fake_stack = nullptr;
  const void* stack_bottom = nullptr;
  size_t stack_bytes = 0;
};
Host host;
Fiber* running = nullptr;

constexpr int kSavedRegisters = 6;

constexpr unsigned kNoSynchronisation = 1;

}  // namespace

Fiber::Fiber(void (*body)()) : body_(body) {
  const auto page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
  void* const memory = mmap(nullptr, page + kStackBytes, PROT_READ | PROT_WRITE,
                            MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED || mprotect(memory, page, PROT_NONE) != 0) {
    std::perror("cusim: no memory for the stack of a CUDA thread");
    std::abort();
  }
  stack_ = static_cast<char*>(memory) + page;
  // The stack as cusim_switch_stack leaves it: the saved registers, then the return address. On
  // entry to a function the stack pointer is 8 above a multiple of 16.
  auto* const top = reinterpret_cast<uint64_t*>(stack_ + kStackBytes) - 2;
  *top = reinterpret_cast<uint64_t>(&Fiber::Enter);
  stack_pointer_ = top - kSavedRegisters;
  tsan_fiber_ = __tsan_create_fiber(0);
}

Fiber::~Fiber() {
  const auto page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
  __tsan_destroy_fiber(tsan_fiber_);
  munmap(stack_ - page, page + kStackBytes);
}

bool Fiber::Holds(const void* memory) const {
  const auto at = reinterpret_cast<uintptr_t>(memory), begin = reinterpret_cast<uintptr_t>(stack_);
  return at >= begin && at - begin < kStackBytes;
}

void Fiber::Enter() {
  __sanitizer_finish_switch_fiber(nullptr, &host.stack_bottom, &host.stack_bytes);
  running->body_();
  std::abort();
}

void Fiber::Resume() {
  host.tsan_fiber = __tsan_get_current_fiber();
  running = this;
  __sanitizer_start_switch_fiber(&host.asan_fake_stack, stack_, kStackBytes);
  __tsan_switch_to_fiber(tsan_fiber_, kNoSynchronisation);
  cusim_switch_stack(&host.stack_pointer, stack_pointer_);
  __sanitizer_finish_switch_fiber(host.asan_fake_stack, nullptr, nullptr);
}

void Fiber::SwitchToHost() {
  Fiber* const self = running;
  __sanitizer_start_switch_fiber(&self->asan_fake_stack_, host.stack_bottom, host.stack_bytes);
  __tsan_switch_to_fiber(host.tsan_fiber, kNoSynchronisation);
  cusim_switch_stack(&self->stack_pointer_, host.stack_pointer);
  __sanitizer_finish_switch_fiber(self->asan_fake_stack_, &host.stack_bottom, &host.stack_bytes);
}

void TsanRelease(void* tag) {
  __tsan_release(tag);
}
void TsanAcquire(void* tag) {
  __tsan_acquire(tag);
}
TsanIgnore::TsanIgnore() {
  AnnotateIgnoreReadsBegin(__FILE__, __LINE__);
}
TsanIgnore::~TsanIgnore() {
  AnnotateIgnoreReadsEnd(__FILE__, __LINE__);
}

}  // namespace cusim
